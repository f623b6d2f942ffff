"""What fxopt keeps in an archive beside torch's program: the graph as it was, its modules, and the ledger, as JSON.

A program of torch has neither modules nor the names and marks of nodes, so that nothing could be undone after loading
it. The tensors stay in the program; the document names them, and a digest says which program it belongs to.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule

from fxopt_core.errors import CaptureError, FxoptError
from fxopt_core.export_inputs import InputChecks, ModulesAsInputs
from fxopt_core.graph import iter_nodes
from fxopt_core.known_classes import class_path
from fxopt_core.ledger import Ledger, ledger_of, set_ledger
from fxopt_core.ledger_codec import tag_from_json, tag_to_json
from fxopt_core.marks import META_KEY
from fxopt_core.registry import registry
from fxopt_core.shape_inference import infer_shapes

from .archive_digest import program_digest
from .archive_inputs import ProgramInputs, guards_row, read_inputs, with_row
from .archive_ledger import read_ledger, write_ledger
from .archive_modules import module_rows, tree_of
from .archive_raising import binding_of
from .archive_table import check_names, graph_rows, read_graph
from .archive_values import Json, Unarchivable, from_json, to_json
from .arguments import CallForm, InputBinding, Parameter
from .caches import CacheReturn
from .captured import CapturedModule, assemble
from .guards import GUARDS, GuardedCall

FILE = "fxopt.json"
"""The name of the extra file."""
FORMAT = 1
"""Raised when older versions could not read what this one writes."""
_MALFORMED = (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError, RuntimeError, FxoptError)


_OWN_HOOKS = (InputBinding, GuardedCall, InputChecks, ModulesAsInputs)


def write_document(
    graph_module: GraphModule, program: ExportedProgram, form: CallForm, mode: bool | None, *, narrowed: bool
) -> str:
    """Return the text of the document.

    Args:
        graph_module: what is saved.
        program: the program that it was exported to.
        form: how it is called.
        mode: the mode that it is valid in, or None for both.
        narrowed: whether the program is for fewer sizes than the graph module, because its caller has asked for that.

    Raises:
        Unarchivable: a node, a module or a record cannot be written; the message names it.
    """
    document = {
        "format": FORMAT,
        "program": program_digest(program),
        "name": type(graph_module).__name__,
        "mode": mode,
        "form": _form_rows(form),
        "checks": guards_row(graph_module._modules.get(GUARDS), complete=not narrowed),
        "caches": _cache_rows(graph_module),
        "modules": module_rows(graph_module, (GUARDS,), lambda graph: graph_rows(graph, tag_to_json)),
        "graph": graph_rows(graph_module.graph, tag_to_json),
        "ledger": _ledger_text(graph_module),
    }
    return json.dumps(document, allow_nan=False)


def _ledger_text(graph_module: GraphModule) -> str | None:
    ledger = graph_module.meta.get(META_KEY)
    return write_ledger(ledger) if isinstance(ledger, Ledger) else None


def _cache_rows(graph_module: GraphModule) -> Json:
    """Return where outputs are caches that a caller gives; hooks of other kinds cannot be archived."""
    places: dict[str, Any] = {}
    for hook in (*graph_module._forward_pre_hooks.values(), *graph_module._forward_hooks.values()):
        if isinstance(hook, CacheReturn):
            places.update(hook.places)
        elif not isinstance(hook, _OWN_HOOKS) and getattr(hook, "__module__", None) != "torch.export._unlift":
            raise Unarchivable(f"the graph module has a forward hook, {hook}")
    return [[name, to_json(place)] for name, place in places.items()]


def _form_rows(form: CallForm) -> Json:
    """Return how a module is called; values that an archive cannot hold are left out."""
    parameters = [
        [one.name, one.positional, one.keyword, one.required, _value_or_none(one.default)] for one in form.parameters
    ]
    fixed = [[name, to_json(value)] for name, value in form.fixed.items() if _is_value(value)]
    return {
        "parameters": parameters,
        "inputs": list(form.inputs),
        "fixed": fixed,
        "implied": sorted(form.implied),
        "variadic": list(form.variadic),
    }


def _value_or_none(value: object) -> Json:
    return to_json(value) if _is_value(value) else None


def _is_value(value: object) -> bool:
    try:
        to_json(value)
    except Unarchivable:
        return False
    return True


def _form(rows: Json) -> CallForm:
    parameters = tuple(
        Parameter(str(name), bool(positional), bool(keyword), bool(required), from_json(default))
        for name, positional, keyword, required, default in rows["parameters"]
    )
    fixed = {str(name): from_json(value) for name, value in rows["fixed"]}
    return CallForm(parameters, tuple(rows["inputs"]), fixed, frozenset(rows["implied"]), tuple(rows["variadic"]))


def read_document(text: str, program: ExportedProgram, path: str) -> CapturedModule:
    """Return the graph module that was saved, with the tensors that the program has now.

    Raises:
        CaptureError: the document is malformed, of a newer version, or belongs to another program.
    """
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
    except (*_MALFORMED, Unarchivable) as error:
        raise CaptureError(
            f"{FILE} in {path!r} is malformed: {type(error).__name__}: {error}. Load the archive with ledger=False to "
            f"get its program, without history and undo"
        ) from error


def _restore(document: Json, program: ExportedProgram) -> CapturedModule:
    inputs, form, mode = read_inputs(program), _form(document["form"]), document["mode"]
    if not (mode is None or isinstance(mode, bool)) or not str(document["name"]).isidentifier():
        raise ValueError("there is no name and mode of a module")
    tensors: Mapping[str, Any] = {**program.state_dict, **program.constants}

    def graph_of(rows: Json) -> Graph:
        return read_graph(rows, tag_from_json)

    tree = tree_of(document["modules"], tensors, graph_of)
    graph = graph_of(document["graph"])
    if document["graph"]["pytree"]:
        graph.set_codegen(inputs.code_generator())
    guards = with_row(inputs.guards(program, mode), document["checks"])
    calls_guards = any(node.target == GUARDS for node in iter_nodes(graph) if node.op == "call_module")
    _check_regions(graph, tree, calls_guards)
    binding = binding_of(inputs, form, document["name"])
    restored = assemble(tree, graph, guards, binding)
    graph.lint()
    if not calls_guards:
        restored.register_forward_pre_hook(GuardedCall(guards), with_kwargs=True)
    if document["caches"]:
        places = {str(name): from_json(place) for name, place in document["caches"]}
        restored.register_forward_hook(CacheReturn(places), with_kwargs=True)
    if document["ledger"] is not None:
        set_ledger(restored, read_ledger(document["ledger"]))
    _infer(restored, inputs)
    _replace_code_generator(restored)
    return restored


def _replace_code_generator(restored: CapturedModule) -> None:
    """Let passes that are installed, and did no more than that, replace the code generator as they had done."""
    try:
        records = ledger_of(restored).records
    except FxoptError:  # of a newer version, which is kept and not read
        return
    for record in records:
        info = registry().available().get(record.pass_name) if record.state == "applied" else None
        if info is None or class_path(info.transformation) != record.transformation:
            continue
        if info.transformation.replaces_code_generator:
            info.transformation(**dict(record.options)).transform(restored)
            restored.recompile()


def _check_regions(graph: Graph, tree: nn.Module, calls_guards: bool) -> None:
    """Check the names in a graph, and in those of the graph modules within, against the modules."""
    if calls_guards:
        tree._modules.setdefault(GUARDS, nn.Module())  # until the guards take its place
    check_names(graph, tree)
    tree._modules.pop(GUARDS, None)
    for module in tree.modules():
        if isinstance(module, GraphModule):
            check_names(module.graph, module)
            module.graph.lint()


def _infer(restored: CapturedModule, inputs: ProgramInputs) -> None:
    """Give the nodes the shapes that their values have, sizes that vary as symbols; without them where torch cannot."""
    try:
        infer_shapes(restored, **inputs.examples)
    except FxoptError:
        return
