"""How a graph module is called, as data: the form of the call, containers of inputs and outputs, and the guards."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections import defaultdict, namedtuple
from contextlib import suppress
from dataclasses import is_dataclass, replace
from importlib.metadata import version
from typing import Any, TypeVar

import torch
from torch.fx import Graph
from torch.utils import _pytree as pytree

from fxopt_capture._torch import pytree_info, set_pytree_info
from fxopt_capture.archive.arithmetic import check_conditions
from fxopt_capture.call.arguments import CallForm, InputBinding, Parameter
from fxopt_capture.call.caches import is_cache_type, register_cache_type
from fxopt_capture.call.guards import LAYOUTS, InputGuards, InputSpec
from fxopt_capture.call.nesting import Nesting, nesting_of
from fxopt_capture.call.structures import inputs_by_name, structures_of
from fxopt_core import (
    type_text,
    with_article,
)
from fxopt_core.errors import CaptureError
from fxopt_rewrite import (
    PLAIN,
    Fields,
    Form,
    InexpressibleError,
    MalformedError,
    ValueReader,
    ValueWriter,
    is_plain_identifier,
)

_FIELDS = Fields((Parameter, InputSpec))
_write = ValueWriter(_FIELDS.writers, names=PLAIN).write
_read = ValueReader(_FIELDS.readers, names=PLAIN).read
T = TypeVar("T")
_DEEPEST = 64
_KINDS = frozenset({"bool", "integer", "floating", "complex"})
#: The modules that loading a file may import: each registers the outputs or caches that it defines.
_MODULES = re.compile(r"transformers\.(?:modeling_outputs|cache_utils|utils\.generic|models\.\w+\.modeling_\w+)")
# The names that transformers looks up in the context of a cache: those of its classes and of plain data.
_IN_CACHES = re.compile(
    r"transformers\.(?:cache_utils|models\.\w+\.modeling_\w+)[.:]\w*(?:Cache|Layer)"
    r"|builtins[.:](?:dict|frozenset|list|set|tuple)|collections[.:](?:OrderedDict|deque)|torch[.:]Size"
)
_LIBRARY = "transformers"
#: A dtype or layout, which transformers reads from torch by its name.
_TORCH_NAME = re.compile(r"[a-z]\w*")


# -- containers


def write_containers(graph: Graph) -> Form:
    """Return how a graph flattens its inputs and builds its output; None if it takes and returns plain values."""
    info = pytree_info(graph)
    if info is None:
        return None
    outputs = None if info.out_spec is None else _spec_form(info.out_spec)
    return {"names": list(info.orig_args), "inputs": _spec_form(info.in_spec), "outputs": outputs}


def read_containers(form: Form, graph: Graph) -> None:
    """Let a graph take and return the containers that `write_containers` has written.

    Raises:
        CaptureError: a container is not known in this process.
    """
    if form is None:
        return
    if not all(map(is_plain_identifier, form["names"])):
        raise MalformedError(f"{form['names']!r:.60} are not names of inputs")
    outputs = None if form["outputs"] is None else _spec(form["outputs"])
    set_pytree_info(graph, form["names"], _spec(form["inputs"]), outputs)


def _spec_form(spec: pytree.TreeSpec) -> Form:
    if spec.is_leaf():
        return None
    known = pytree.SUPPORTED_SERIALIZED_TYPES.get(spec.context if spec.type is namedtuple else spec.type)
    name = None if known is None else known.serialized_type_name
    if not isinstance(name, str) or pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE.get(name) not in (spec.type, spec.context):
        raise InexpressibleError(
            f"an input or output is {type_text(spec.type)}, for which torch.export has no name; register it: "
            f"torch.export.register_dataclass(..., serialized_type_name=...)"
        )
    context = None if spec.type is namedtuple else _write(spec.context)
    return [name, context, [_spec_form(child) for child in spec.children()]]


def _spec(form: Form, depth: int = 0) -> pytree.TreeSpec:
    if form is None:
        return pytree.treespec_leaf()
    if depth > _DEEPEST:
        raise MalformedError("inputs or outputs nest too deeply")
    name, context, children = form
    kind = _container(name)
    found = _read(context)
    # The context of a defaultdict is its factory, which a missing key would call, and its keys.
    if kind is defaultdict and not (isinstance(found[0], type) or found[0] is None):
        raise MalformedError(f"a defaultdict calls {found[0]!r:.60}")
    _check_cache(found, 0)
    if name.startswith(_LIBRARY) and isinstance(kind, type) and is_dataclass(kind):
        _check_fields(kind, found)
    if isinstance(kind, type) and issubclass(kind, tuple) and kind is not tuple:
        return pytree.TreeSpec(namedtuple, kind, [_spec(child, depth + 1) for child in children])
    return pytree.TreeSpec(kind, found, [_spec(child, depth + 1) for child in children])


def _container(name: Form) -> Any:
    """Return a registered class of containers; for one of transformers, import the module that registers it."""
    if not isinstance(name, str):
        raise MalformedError("the type of a container is not text")
    module, _, cls = name.replace(":", ".").rpartition(".")
    is_known = name in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
    if not is_known and _MODULES.fullmatch(module) and importlib.util.find_spec("transformers") is not None:
        with suppress(ImportError):
            importlib.import_module(module)  # which registers its own outputs
        found = getattr(sys.modules.get(module), cls, None)
        if isinstance(found, type) and is_cache_type(found):
            register_cache_type(found)
    if name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE:
        raise CaptureError(
            f"its inputs or outputs are of type {name:.200}, which torch.export does not know in this process; import "
            f"the module that defines and registers it (torch.export.register_dataclass, or `import transformers`) "
            f"before loading"
        )
    return pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE[name]


def _check_fields(kind: type, names: Any) -> None:
    """Refuse outputs with fields that the installed transformers has neither now nor under former names."""
    try:
        pytree.SUPPORTED_NODES[kind].unflatten_fn([None] * len(names), names)
    except TypeError as error:
        raise CaptureError(
            f"it returns {with_article(kind.__name__)} with {', '.join(map(str, names))}, which transformers "
            f"{version(_LIBRARY)} does not have: {error}; open it with the transformers that it was saved with, or "
            f"capture the model again"
        ) from error


def _check_cache(context: Any, depth: int) -> None:
    """Refuse names that transformers would import, and should not, when it makes a cache from its context."""
    if depth > _DEEPEST:
        raise MalformedError("the context of a container nests too deeply")
    # As transformers writes it: "_t" is the kind of a value, "p" the path of its class, and "n" a name in torch.
    if isinstance(context, dict) and "_t" in context:
        path, name = context.get("p", ""), context.get("n", "t")
        harmless = isinstance(path, str) and isinstance(name, str) and _TORCH_NAME.fullmatch(name)
        if not harmless or ("p" in context and not _IN_CACHES.fullmatch(path)):
            raise MalformedError(f"a cache among the inputs or outputs holds {path or name!r:.80}, not a cache")
    entries = [*context, *context.values()] if isinstance(context, dict) else context
    for entry in entries if isinstance(entries, list | tuple) else ():
        _check_cache(entry, depth + 1)


# -- the form of the call


def write_binding(binding: InputBinding) -> Form:
    """Return the input binding of a captured module as data; values that data cannot express are left out."""
    form = binding.form
    return {
        # Without ``by_position``, which only matters when the model itself is called.
        "parameters": [_write(one if _is_data(one) else replace(one, default=None)) for one in form.parameters],
        "inputs": list(form.inputs),
        "fixed": [[name, _write(value)] for name, value in form.fixed.items() if _is_data(value)],
        "implied": sorted(form.implied),
        "variadic": list(form.variadic),
        "absent": dict(form.absent),
        "ignored": sorted(form.ignored),
        "nested": [name for name, nesting in binding.nestings.items() if nesting is not None],
        "checked": list(binding.nestings),
    }


def _is_data(value: object) -> bool:
    try:
        _write(value)
    except InexpressibleError:
        return False
    return True


def read_binding(rows: Form, graph: Graph, name: str) -> InputBinding:
    """Return the input binding that `write_binding` has written."""
    form = CallForm(
        _instances(rows["parameters"], Parameter),
        _texts(rows["inputs"]),
        {str(local): _read(value) for local, value in rows["fixed"]},
        frozenset(_texts(rows["implied"])),
        _texts(rows["variadic"]),
        absent={str(local): int(number) for local, number in rows["absent"].items()},
        ignored=frozenset(_texts(rows["ignored"])),
    )
    nestings: dict[str, Nesting | None] = dict.fromkeys(_texts(rows["checked"]))
    values = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    examples = inputs_by_name(graph, values) if rows["nested"] else {}
    nestings |= {local: nesting_of(examples[local]) for local in _texts(rows["nested"])}
    return InputBinding(form, name, structures_of(graph), nestings)


def _instances(rows: Form, cls: type[T]) -> tuple[T, ...]:
    found = _read(rows)
    if not isinstance(found, tuple) or not all(isinstance(each, cls) for each in found):
        raise MalformedError(f"{rows!r:.60} is not a list of {cls.__name__}")
    return found


def _texts(names: Form) -> tuple[str, ...]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise MalformedError(f"{names!r:.60} is not a list of texts")
    return tuple(names)


# -- guards


def write_guards(guards: InputGuards) -> Form:
    """Return guards as data."""
    return {
        "specs": [_write(spec) for spec in guards.specs],
        "conditions": list(guards.conditions),
        "mode": guards.mode,
        "module_dtype": _write(guards.module_dtype),
        "baked": guards.baked,
    }


def read_guards(rows: Form) -> InputGuards:
    """Return the guards that `write_guards` has written."""
    specs = _instances(rows["specs"], InputSpec)
    for spec in specs:
        if spec.kind not in (_KINDS | {None}):
            raise MalformedError(f"{spec.kind!r:.40} is not a kind of dtype")
        if spec.layout not in (None, *LAYOUTS):
            raise MalformedError(f"{spec.layout} is not a layout that guards demand")
        if spec.kind is not None and spec.value is not None:
            values: Any = spec.value if isinstance(spec.value, tuple) else None
            sizes: Any = spec.sizes
            try:
                torch.tensor(values, dtype=spec.dtype).view(sizes)
            except Exception as error:  # whatever torch raises for values and sizes of a file
                raise MalformedError(f"the values of `{spec.name:.40}` do not fill its sizes") from error
    conditions = _texts(rows["conditions"])
    check_conditions(conditions)
    mode, dtype, baked = rows["mode"], _read(rows["module_dtype"]), rows["baked"]
    if not (isinstance(mode, bool | None) and isinstance(dtype, torch.dtype | None) and isinstance(baked, str | None)):
        raise MalformedError("guards have no mode and dtype")
    return InputGuards(specs, conditions, mode, dtype, baked)
