"""A graph module as JSON and tensors, and back: rows of nodes and modules, the call, values of nodes, the ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen

from fxopt_capture._torch import is_hook_of_export
from fxopt_capture.archive.calls import (
    read_binding,
    read_containers,
    read_guards,
    write_binding,
    write_containers,
    write_guards,
)
from fxopt_capture.archive.container import Buffer, Container
from fxopt_capture.archive.ledger import read_ledger, write_ledger
from fxopt_capture.archive.module_rows import layer_class, new_module, read_modules, write_modules
from fxopt_capture.archive.shapes import ShapeReader, ShapeWriter
from fxopt_capture.archive.tensors import ENTRY as WEIGHTS, TensorReader, TensorWriter
from fxopt_capture.call.caches import CacheReturn
from fxopt_capture.call.guards import GUARDS, InputGuards
from fxopt_capture.captured import CapturedModule, assemble
from fxopt_capture.huggingface.clients import NOTE, add_attributes, checked_note, note_to_write
from fxopt_core import (
    META_KEY,
    Ledger,
    NodeTag,
    PyTreeCodeGen,
    class_path,
    codegen_of,
    install_pickling,
    ledger_of,
    registry,
    set_ledger,
    set_tag,
    tag_of,
)
from fxopt_core.errors import CaptureError, FxoptError
from fxopt_rewrite import (
    PLAIN,
    Form,
    InexpressibleError,
    MalformedError,
    ValueReader,
    ValueWriter,
    check_targets,
    check_values,
    generator_class,
    plain_attributes,
    read_graph,
    tag_from_json,
    tag_to_json,
    write_graph,
)

FILE, LEDGER = "fxopt.json", "ledger.json"
#: Incremented when older versions could not read what this one writes.
FORMAT = 1
_write = ValueWriter(names=PLAIN).write
_read = ValueReader(names=PLAIN).read
_GRAPH_MODULE = class_path(GraphModule)
# Some of torch's own checks, as of the range of a size, are assertions.
_MALFORMED = (
    *(LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError, AssertionError, NameError),
    FxoptError,
)
_OF_EXPORT = (
    "the graph module was made by torch.export, whose checks of inputs are compiled code: make it with "
    "fxopt_capture.capture, from the model or from `program.module(check_guards=False)`"
)


# -- writing


def write_document(graph_module: GraphModule) -> dict[str, list[Buffer]]:
    """Return the entries of the archive of a graph module, in parts.

    Raises:
        InexpressibleError: something in it cannot be written; the message names the node, module, tensor or record.
    """
    tensors, shapes = TensorWriter(), ShapeWriter()
    guards = graph_module._modules.get(GUARDS)
    if not isinstance(guards, InputGuards | None):
        raise InexpressibleError(_OF_EXPORT)
    ledger = graph_module.meta.get(META_KEY)
    document: dict[str, Any] = {
        "format": FORMAT,
        "name": type(graph_module).__name__,
        "call": write_binding(graph_module._input_binding) if isinstance(graph_module, CapturedModule) else None,
        "guards": None if guards is None else write_guards(guards),
        "caches": _cache_rows(graph_module),
        "modules": _module_rows(graph_module, tensors),
        "graph": _graph_form(graph_module.graph, shapes),
        "pretrained": note_to_write(graph_module.meta.get(NOTE)),
    }
    rows, weights = tensors.finish()
    text = json.dumps({**document, "tensors": rows, **shapes.tables()}, allow_nan=False, separators=(",", ":"))
    entries: dict[str, list[Buffer]] = {FILE: [text.encode()]}
    if isinstance(ledger, Ledger):
        entries[LEDGER] = [write_ledger(ledger).encode()]
    return {**entries, WEIGHTS: weights}


def _graph_form(graph: Graph, shapes: ShapeWriter | None = None) -> Form:
    if generator_class(graph) not in (CodeGen, PyTreeCodeGen):
        raise InexpressibleError(f"the graph has a code generator of its own, {type(codegen_of(graph)).__qualname__}")
    form: dict[str, Any] = write_graph(graph, ValueWriter(names=PLAIN), partial(_node_row, shapes))
    for row in form["rows"]:
        row.pop("trace", None)  # lines of the author's code
    return {"containers": write_containers(graph), **form}


def _node_row(shapes: ShapeWriter | None, node: Node) -> dict[str, Form]:
    tag, row = tag_of(node), {}
    if tag != NodeTag():
        row["tag"] = tag_to_json(tag)
    # Written, because inferring it on loading takes about a second, and could take very long for a hostile graph.
    value = None if shapes is None or "val" not in node.meta else shapes.form(node.meta["val"])
    return row if value is None else {**row, "value": value}


def _module_rows(root: GraphModule, tensors: TensorWriter) -> list[Form]:
    """Return the modules of a graph module as data, without its guards."""

    def described(name: str, module: nn.Module) -> dict[str, Form]:
        if module is root:
            return {}
        hooks = [key for key, value in vars(module).items() if key.endswith(("_hooks", "_hooks_with_kwargs")) and value]
        if hooks:
            raise InexpressibleError(f"module `{name}` has hooks ({', '.join(hooks)})")
        if isinstance(module, GraphModule):
            return {"class": _GRAPH_MODULE, "graph": _graph_form(module.graph)}
        path = class_path(type(module))
        if layer_class(path) is not type(module):
            found = f"module `{name}` is a {path.replace(':', '.')}"
            raise InexpressibleError(
                f"{found}, which is neither of torch.nn nor offered by a plugin's hook fxopt_layers"
            )

        def numbered(_: ValueWriter, tensor: torch.Tensor) -> Form:
            return {"tensor": tensors.number(name, tensor)}

        write = ValueWriter({torch.Tensor: numbered, nn.Parameter: numbered}, names=PLAIN).write
        try:
            return {"class": path, "attributes": [[key, write(value)] for key, value in plain_attributes(module)]}
        except InexpressibleError as error:
            raise InexpressibleError(f"module `{name}`, an attribute: {error}") from error

    return write_modules(root, tensors.number, described, (GUARDS,))


def _cache_rows(graph_module: GraphModule) -> Form:
    """Return which outputs are caches that a caller gives; hooks of other kinds cannot be archived."""
    places: dict[str, Any] = {}
    for hook in (*graph_module._forward_pre_hooks.values(), *graph_module._forward_hooks.values()):
        if isinstance(hook, CacheReturn):
            places.update(hook.places)
        elif is_hook_of_export(hook):
            raise InexpressibleError(_OF_EXPORT)
        else:
            raise InexpressibleError(f"the graph module has a forward hook, {hook}")
    return [[name, _write(place)] for name, place in places.items()]


# -- reading


def read_document(container: Container) -> GraphModule:
    """Return the graph module of an archive.

    Raises:
        CaptureError: the archive is damaged, or holds something that needs trust.
    """
    document = container.data(FILE)
    try:
        version = document["format"]
        if type(version) is not int:
            raise MalformedError(f"{version!r:.20} is not a format number")
        if version > FORMAT:
            raise CaptureError(
                f"{container.name!r} was written in format {version}, and this version of fxopt-capture reads formats "
                f"up to {FORMAT}: upgrade it"
            )
        text = container.text(LEDGER) if LEDGER in container else None
        return _restored(document, TensorReader(container, document["tensors"]), text)
    except CaptureError:
        raise
    except _MALFORMED as error:
        raise CaptureError(
            f"{container.name!r} was not loaded: {FILE} in it is damaged or hostile: {type(error).__name__}: {error}"
        ) from error


def _restored(document: Form, tensors: TensorReader, ledger: str | None) -> GraphModule:
    name = document["name"]
    if not isinstance(name, str) or not name.isidentifier():
        raise MalformedError(f"{name!r:.60} is not the name of a class")
    shapes = ShapeReader(document)
    tree, graph = _read_modules(document["modules"], tensors), _graph(document["graph"], shapes)
    tree._modules.setdefault(GUARDS, nn.Module())  # until the guards take its place
    check_targets(graph, tree)
    tree._modules.pop(GUARDS, None)
    for module in tree.modules():
        if isinstance(module, GraphModule):
            check_targets(module.graph, module)
            module.graph.lint()
    restored = _assembled(document, tree, graph)
    graph.lint()
    if document["pretrained"] is not None:
        restored.meta[NOTE] = checked_note(document["pretrained"])
        add_attributes(restored)
    if ledger is not None:
        set_ledger(restored, read_ledger(ledger))
    _replace_code_generator(restored)
    return restored


def _assembled(document: Form, tree: nn.Module, graph: Graph) -> GraphModule:
    if document["call"] is None:
        traced = GraphModule(nn.Module(), Graph(), class_name=document["name"])
        # `GraphModule(tree, graph)` would copy only what the graph reads, and make all buffers persistent.
        for key in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", "training"):
            vars(traced)[key] = vars(tree)[key]
        traced.graph = graph
        install_pickling(traced)
        return traced
    binding, guards = read_binding(document["call"], graph, document["name"]), read_guards(document["guards"])
    if len(guards.specs) != len(graph.find_nodes(op="placeholder")):
        raise MalformedError(f"there are guards for {len(guards.specs)} inputs, but the graph has another number")
    captured = assemble(tree, graph, guards, binding)
    if document["caches"]:
        places = {str(local): _read(place) for local, place in document["caches"]}
        captured.register_forward_hook(CacheReturn(places), with_kwargs=True)
    return captured


def _graph(form: Form, shapes: ShapeReader | None = None) -> Graph:
    def extra(node: Node, row: Mapping[str, Form]) -> None:
        if "tag" in row:
            set_tag(node, tag_from_json(row["tag"]))
        if "value" in row and shapes is not None:
            node.meta["val"] = shapes.value(row["value"])

    graph = read_graph(form, ValueReader(names=PLAIN), extra)
    check_values(graph)  # before torch generates code from it
    read_containers(form["containers"], graph)
    return graph


def _read_modules(rows: list[Form], tensors: TensorReader) -> nn.Module:
    """Return the modules that `_module_rows` has written; the root is a plain ``nn.Module``."""
    read = ValueReader({"tensor": lambda _, number: tensors(number)}, names=PLAIN).read

    def instance(row: Mapping[str, Form]) -> nn.Module:
        if row.get("class") == _GRAPH_MODULE:
            return GraphModule(nn.Module(), _graph(row["graph"]))
        cls = layer_class(row.get("class", class_path(nn.Module)))
        if cls is None:
            raise MalformedError(f"{row['class']!r:.60} is neither a class of torch.nn nor a layer of a plugin")
        return new_module(cls, [(key, read(value)) for key, value in row.get("attributes", ())])

    return read_modules(rows, instance, tensors)[""]


def _replace_code_generator(restored: GraphModule) -> None:
    """Rerun the recorded passes that only replace the code generator, if they are installed."""
    records = ledger_of(restored).records
    applied = {(record.transformation, repr(record.options)): record for record in records if record.state == "applied"}
    passes = registry().available() if applied else {}
    for record in applied.values():
        info = passes.get(record.pass_name)
        if info is None or class_path(info.transformation) != record.transformation:
            continue
        if info.transformation.replaces_code_generator:
            info.create(dict(record.options)).transform(restored)
            restored.recompile()
