"""What fxopt keeps in an archive beside torch's program: the graph as it was, its modules, and the ledger, as JSON.

A program of torch has neither modules nor the names and marks of nodes, so that nothing could be undone after loading
it. The tensors stay in the program; the document names them, and a digest says which program it belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from fxopt_capture._torch import is_hook_of_export
from fxopt_capture.archive.digest import program_digest
from fxopt_capture.archive.inputs import guards_row, read_inputs, with_row
from fxopt_capture.archive.ledger import read_ledger, write_ledger
from fxopt_capture.archive.raising import binding_of
from fxopt_capture.call.arguments import CallForm, Parameter
from fxopt_capture.call.caches import CacheReturn
from fxopt_capture.call.guards import GUARDS, GuardedCall
from fxopt_capture.captured import CapturedModule, assemble
from fxopt_capture.huggingface.clients import NOTE, add_attributes, checked_note
from fxopt_core._torch import PyTreeCodeGen, codegen_of, generator_class
from fxopt_core.errors import CaptureError, FxoptError
from fxopt_core.graph import iter_nodes
from fxopt_core.ledger.codec import tag_from_json, tag_to_json
from fxopt_core.ledger.marks import META_KEY, NodeTag, set_tag, tag_of
from fxopt_core.ledger.records import Ledger, ledger_of, set_ledger
from fxopt_core.registry.registry import registry
from fxopt_core.travel.export_checks import InputChecks
from fxopt_core.travel.graph_rows import read_graph, write_graph
from fxopt_core.values.forms import Form, InexpressibleError, MalformedError, ValueReader, ValueWriter
from fxopt_core.values.names import class_path
from fxopt_rewrite.layers import plain_attributes
from fxopt_rewrite.module_rows import check_targets, check_values, new_module, read_modules, write_modules
from fxopt_rewrite.plain_names import PLAIN, layer_class
from fxopt_rewrite.shapes.effort import TooMuchError
from fxopt_rewrite.shapes.infer import infer_shapes

FILE = "fxopt.json"
"""The name of the extra file."""
FORMAT = 2
"""Raised when older versions could not read what this one writes."""
_write = ValueWriter(names=PLAIN).write
_read = ValueReader(names=PLAIN).read
_GRAPH_MODULE = class_path(GraphModule)
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, RuntimeError, FxoptError)


_OWN_HOOKS = (GuardedCall, InputChecks)


def write_document(
    graph_module: GraphModule, program: ExportedProgram, form: CallForm, mode: bool | None, *, narrowed: bool
) -> str:
    """Return the text of the document for a graph module that was exported to `program`.

    `narrowed` says that the caller asked for fewer sizes than the graph module takes. An `InexpressibleError` names the
    node, module or record that cannot be written.
    """
    document = {
        "format": FORMAT,
        "program": program_digest(program),
        "name": type(graph_module).__name__,
        "mode": mode,
        "form": _form_rows(form),
        "checks": guards_row(graph_module._modules.get(GUARDS), complete=not narrowed),
        "caches": _cache_rows(graph_module),
        "modules": _module_forms(graph_module),
        "graph": _graph_form(graph_module.graph),
        "pretrained": graph_module.meta.get(NOTE),
        "ledger": _ledger_text(graph_module),
    }
    return json.dumps(document, allow_nan=False)


def _graph_form(graph: Graph) -> Form:
    generator = generator_class(graph)
    if generator not in (CodeGen, PyTreeCodeGen):
        raise InexpressibleError(f"the graph has a code generator of its own, {type(codegen_of(graph)).__qualname__}")
    return {"pytree": generator is PyTreeCodeGen, **write_graph(graph, ValueWriter(names=PLAIN), _tag_form)}


def _tag_form(node: Node) -> dict[str, Form]:
    tag = tag_of(node)
    return {} if tag == NodeTag() else {"tag": tag_to_json(tag)}


def _graph(form: Form) -> Graph:
    graph = read_graph(form, ValueReader(names=PLAIN), _read_tag)
    check_values(graph)  # before torch generates code from it
    return graph


def _read_tag(node: Node, row: Mapping[str, Form]) -> None:
    if "tag" in row:
        set_tag(node, tag_from_json(row["tag"]))


def _module_forms(root: GraphModule) -> list[Form]:
    """Return the modules of a graph module as data, without its guards; tensors go by their keys in the program."""
    keys: dict[int, str] = {}

    def extra(name: str, module: nn.Module) -> Mapping[str, Form]:
        return {} if module is root else _described(name, module)

    return write_modules(root, lambda key, tensor: keys.setdefault(id(tensor), key), extra, (GUARDS,))


def _described(name: str, module: nn.Module) -> dict[str, Form]:
    hooks = [key for key, value in vars(module).items() if key.endswith(("_hooks", "_hooks_with_kwargs")) and value]
    if hooks:
        raise InexpressibleError(f"module `{name}` has hooks ({', '.join(hooks)})")
    if isinstance(module, GraphModule):
        return {"class": _GRAPH_MODULE, "graph": _graph_form(module.graph)}
    path = class_path(type(module))
    if layer_class(path) is not type(module):
        found = f"module `{name}` is a {path.replace(':', '.')}"
        raise InexpressibleError(f"{found}, none of torch.nn, and none that a plugin offers by its hook fxopt_layers")
    try:
        return {"class": path, "attributes": [[key, _write(value)] for key, value in plain_attributes(module)]}
    except InexpressibleError as error:
        raise InexpressibleError(f"module `{name}`, an attribute: {error}") from error


def _read_modules(rows: list[Form], tensors: Mapping[str, torch.Tensor]) -> nn.Module:
    """Return the modules that `_module_forms` has written; the root is a plain ``nn.Module``."""

    def instance(row: Mapping[str, Form]) -> nn.Module:
        if row.get("class") == _GRAPH_MODULE:
            return GraphModule(nn.Module(), _graph(row["graph"]))
        cls = layer_class(row.get("class", class_path(nn.Module)))
        if cls is None:
            raise MalformedError(f"{row['class']!r:.60} is no class of torch.nn, and no layer that a plugin offers")
        return new_module(cls, [(key, _read(value)) for key, value in row.get("attributes", ())])

    return read_modules(rows, instance, tensors.__getitem__)[""]


def _ledger_text(graph_module: GraphModule) -> str | None:
    ledger = graph_module.meta.get(META_KEY)
    return write_ledger(ledger) if isinstance(ledger, Ledger) else None


def _cache_rows(graph_module: GraphModule) -> Form:
    """Return where outputs are caches that a caller gives; hooks of other kinds cannot be archived."""
    places: dict[str, Any] = {}
    for hook in (*graph_module._forward_pre_hooks.values(), *graph_module._forward_hooks.values()):
        if isinstance(hook, CacheReturn):
            places.update(hook.places)
        elif not (isinstance(hook, _OWN_HOOKS) or is_hook_of_export(hook)):
            raise InexpressibleError(f"the graph module has a forward hook, {hook}")
    return [[name, _write(place)] for name, place in places.items()]


def _form_rows(form: CallForm) -> Form:
    """Return how a module is called; values that an archive cannot hold are left out."""
    parameters = [
        [one.name, one.positional, one.keyword, one.required, _write(one.default) if _is_value(one.default) else None]
        for one in form.parameters
    ]
    fixed = [[name, _write(value)] for name, value in form.fixed.items() if _is_value(value)]
    return {
        "parameters": parameters,
        "inputs": list(form.inputs),
        "fixed": fixed,
        "implied": sorted(form.implied),
        "variadic": list(form.variadic),
        "absent": dict(form.absent),
        "ignored": sorted(form.ignored),
    }


def _is_value(value: object) -> bool:
    try:
        _write(value)
    except InexpressibleError:
        return False
    return True


def _form(rows: Form) -> CallForm:
    parameters = tuple(
        Parameter(str(name), bool(positional), bool(keyword), bool(required), _read(default))
        for name, positional, keyword, required, default in rows["parameters"]
    )
    fixed = {str(name): _read(value) for name, value in rows["fixed"]}
    absent = {str(name): int(number) for name, number in rows.get("absent", {}).items()}
    implied, variadic = frozenset(rows["implied"]), tuple(rows["variadic"])
    ignored = frozenset(map(str, rows.get("ignored", ())))
    return CallForm(parameters, tuple(rows["inputs"]), fixed, implied, variadic, absent=absent, ignored=ignored)


def read_document(text: str, program: ExportedProgram, path: str) -> CapturedModule:
    """Return the graph module that was saved, with the tensors that the program has now."""
    try:
        document = json.loads(text)
        version = document["format"]
        if type(version) is not int:
            raise ValueError(f"{version!r} is no number of a format")
        if version > FORMAT:
            raise CaptureError(
                f"{FILE} in {path!r} was written in format {version}, and this version of fxopt-capture reads formats "
                f"up to {FORMAT}: upgrade it, or load the program alone with ledger=False"
            )
        if document["program"] != program_digest(program):
            raise CaptureError(
                f"{FILE} in {path!r} belongs to another program than the one beside it: the archive was changed after "
                f"it was saved. Load it with ledger=False to get the program as it is now, without history and undo"
            )
        return _restore(document, program)
    except CaptureError:
        raise
    except _MALFORMED as error:
        raise CaptureError(
            f"{FILE} in {path!r} is malformed: {type(error).__name__}: {error}. Load the archive with ledger=False to "
            f"get its program, without history and undo"
        ) from error


def _restore(document: Form, program: ExportedProgram) -> CapturedModule:
    inputs, form, mode = read_inputs(program), _form(document["form"]), document["mode"]
    if not (mode is None or isinstance(mode, bool)) or not str(document["name"]).isidentifier():
        raise ValueError("there is no name and mode of a module")
    tensors: Mapping[str, Any] = {**program.state_dict, **program.constants}

    tree, graph = _read_modules(document["modules"], tensors), _graph(document["graph"])
    if document["graph"]["pytree"]:
        inputs.name(graph)
    guards = with_row(inputs.guards(program, mode), document["checks"])
    calls_guards = any(node.target == GUARDS for node in iter_nodes(graph) if node.op == "call_module")
    _check_regions(graph, tree, calls_guards)
    binding = binding_of(inputs, form, document["name"])
    restored = assemble(tree, graph, guards, binding)
    graph.lint()
    if not calls_guards:
        restored.register_forward_pre_hook(GuardedCall(guards), with_kwargs=True)
    if document["caches"]:
        places = {str(name): _read(place) for name, place in document["caches"]}
        restored.register_forward_hook(CacheReturn(places), with_kwargs=True)
    if document.get("pretrained") is not None:
        restored.meta[NOTE] = checked_note(document["pretrained"])
        add_attributes(restored)
    if document["ledger"] is not None:
        set_ledger(restored, read_ledger(document["ledger"]))
    try:
        infer_shapes(restored, **inputs.examples)
    except TooMuchError:
        raise
    except FxoptError:  # the nodes have no shapes where torch cannot infer them
        pass
    _replace_code_generator(restored)
    return restored


def _replace_code_generator(restored: CapturedModule) -> None:
    """Let passes that are installed, and did no more than that, replace the code generator as they had done."""
    try:
        records = ledger_of(restored).records
    except FxoptError:  # of a newer version, which is kept and not read
        return
    applied = {(record.transformation, repr(record.options)): record for record in records if record.state == "applied"}
    passes = registry().available() if applied else {}
    for record in applied.values():
        info = passes.get(record.pass_name)
        if info is None or class_path(info.transformation) != record.transformation:
            continue
        if info.transformation.replaces_code_generator:
            info.create(dict(record.options)).transform(restored)
            restored.recompile()


def _check_regions(graph: Graph, tree: nn.Module, calls_guards: bool) -> None:
    """Check the names in a graph, and in those of the graph modules within, against the modules."""
    if calls_guards:
        tree._modules.setdefault(GUARDS, nn.Module())  # until the guards take its place
    check_targets(graph, tree)
    tree._modules.pop(GUARDS, None)
    for module in tree.modules():
        if isinstance(module, GraphModule):
            check_targets(module.graph, module)
            module.graph.lint()
