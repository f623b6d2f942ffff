"""The containers of a program's inputs and outputs, which an archive names: known ones, and no class of its choice."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from torch.utils import _pytree as pytree

from fxopt_capture.call.caches import is_cache_type, register_cache_type
from fxopt_core.errors import CaptureError

_DEEPEST = 64
_MODULES = re.compile(r"transformers\.(?:modeling_outputs|cache_utils|utils\.generic|models\.\w+\.modeling_\w+)")
_IN_CACHES = re.compile(
    r"transformers\.(?:cache_utils|models\.\w+\.modeling_\w+)[.:]\w*(?:Cache|Layer)"
    r"|builtins[.:](?:dict|frozenset|list|set|tuple)|collections[.:](?:OrderedDict|deque)|torch[.:]Size"
)
_FACTORIES = frozenset({"bool", "dict", "float", "int", "list", "set", "str", "tuple"})
_TORCH_NAME = re.compile(r"[a-z]\w*")


def check_spec(text: str) -> None:
    """Check the containers of a module's inputs or outputs, and let torch know those that are found here.

    Raises:
        CaptureError: a container is not known, or says more than which entries it has.
    """
    try:
        version, spec = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise CaptureError(f"the structure of inputs or outputs is malformed ({error!s:.80})") from error
    if version != 1:
        raise CaptureError(f"the structure of inputs or outputs is of version {version!r:.20}, expected 1")
    _check(spec, 0)


def keyword_names(text: str) -> list[Any]:
    """Return the names of the inputs that a program takes by name, as the structure of its inputs has them."""
    children = json.loads(text)[1]["children_spec"]
    names = json.loads(children[1]["context"]) if len(children) == 2 else []
    return names if isinstance(names, list) else [names]


def _check(spec: Any, depth: int) -> None:
    is_spec = isinstance(spec, dict) and isinstance(spec.get("children_spec"), list)
    if not is_spec or depth > _DEEPEST or spec.keys() != {"type", "context", "children_spec"}:
        raise CaptureError("the structure of inputs or outputs is malformed, or nests too deeply")
    name, context = spec["type"], spec["context"]
    if name is not None:
        if not isinstance(name, str):
            raise CaptureError("the structure of inputs or outputs is malformed: a type is no text")
        if name not in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE and not _found(name):
            raise CaptureError(
                f"its inputs or outputs are of type {name:.200}, which torch.export does not know in this process; "
                f"import the module that defines and registers it (torch.export.register_dataclass, or "
                f"`import transformers`) before loading"
            )
        _check_context(name, context)
    elif context is not None or spec["children_spec"]:
        raise CaptureError("the structure of inputs or outputs is malformed: a leaf has entries")
    for child in spec["children_spec"]:
        _check(child, depth + 1)


def _check_context(name: str, context: Any) -> None:
    try:
        content = json.loads(context) if isinstance(context, str) and not _is_named_tuple(name) else context
    except (ValueError, RecursionError) as error:
        raise CaptureError(f"the structure of inputs or outputs is malformed: {name:.200} ({error!s:.80})") from error
    if name == "collections.defaultdict":
        factory = (content or {}).get("default_factory_module"), (content or {}).get("default_factory_name")
        if factory[0] != "builtins" or factory[1] not in _FACTORIES:
            raise CaptureError(f"its inputs or outputs have a defaultdict of {factory!r:.80}, expected one of builtins")
    for entry in _mappings(content, 0):
        if "__enum__" in entry:
            raise CaptureError(
                f"its inputs or outputs have the member {entry.get('name')!r:.60} of the enumeration "
                f"{entry.get('fqn')!r:.80} as a key, for which torch would import a module that the file names"
            )
        if "_t" in entry and not _is_harmless(entry):
            raise CaptureError(
                f"a cache among its inputs or outputs holds {entry.get('p', entry['_t'])!r:.80}, which would be "
                f"imported by that name; load the file with trusted=True if you trust whoever has written it"
            )


def _is_named_tuple(name: str) -> bool:
    return name == "collections.namedtuple"


def _is_harmless(entry: dict[str, Any]) -> bool:
    """Whether transformers makes plain data, or an object of a cache, of an entry of a cache."""
    if "p" in entry and not (isinstance(entry["p"], str) and _IN_CACHES.fullmatch(entry["p"])):
        return False
    return "n" not in entry or (isinstance(entry["n"], str) and bool(_TORCH_NAME.fullmatch(entry["n"])))


def _mappings(content: Any, depth: int) -> Iterator[dict[str, Any]]:
    if depth > _DEEPEST:
        raise CaptureError("the structure of inputs or outputs nests too deeply")
    if isinstance(content, dict):
        yield content
    for item in content.values() if isinstance(content, dict) else content if isinstance(content, list) else ():
        yield from _mappings(item, depth + 1)


def _found(name: str) -> bool:
    """Register a type by its name, where transformers has it; no other module is imported."""
    module, _, cls = name.replace(":", ".").rpartition(".")
    if _MODULES.fullmatch(module) and importlib.util.find_spec("transformers") is not None:
        try:
            importlib.import_module(module)  # which registers its own outputs
        except ImportError:
            return False
        found = getattr(sys.modules.get(module), cls, None)
        if isinstance(found, type) and is_cache_type(found):
            register_cache_type(found)
    return name in pytree.SERIALIZED_TYPE_TO_PYTHON_TYPE
