"""A graph module or a record as text that is the same in every process.

It has no addresses, no times and no arbitrary order of sets, so two dumps can be compared line by line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Size, Tensor, nn
from torch._ops import OpOverload
from torch.fx import GraphModule, Node
from torch.nn.parameter import is_lazy

from fxopt_core import Record, iter_nodes
from fxopt_core.text import text_table

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_WIDEST = 48
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def graph_table(graph_module: GraphModule) -> Iterator[str]:
    """Yield the lines of a table of the nodes: name, operation, target, dtype and shape if known, arguments."""
    rows = [("name", "op", "target", "value", "arguments")]
    for node in iter_nodes(graph_module.graph):
        arguments = [*map(text_of, node.args), *(f"{key}={text_of(value)}" for key, value in node.kwargs.items())]
        rows.append((node.name, node.op, name_of(node.target), _value(node), ", ".join(arguments)))
    yield from text_table(rows, widest=_WIDEST)


def graph_code(graph_module: GraphModule) -> Iterator[str]:
    """Yield the lines of the graph's code, even if the module has not been recompiled."""
    code = without_addresses(graph_module.graph.python_code("self").src)
    yield from (line.rstrip() for line in code.strip().splitlines())


def module_tree(graph_module: GraphModule) -> Iterator[str]:
    """Yield a line for each module, parameter and buffer, indented by depth; repeats refer to the first name."""
    yield from _module_lines(type(graph_module).__name__, "", graph_module, 0, {})


def record_text(record: Record) -> Iterator[str]:
    """Yield the lines of a record without its time: what was rewritten, what was refused and why."""
    options = ", ".join(f"{name}={text_of(value)}" for name, value in record.options)
    yield f"{record.pass_name}({options}): {record.state}, {'changed' if record.changed else 'nothing changed'}"
    yield f"{'taken back' if record.state == 'undone' else 'rewritten'}: {len(record.rewrites)}"
    for each in record.rewrites:
        line = f"  {each.site}: {', '.join(each.before)} -> {', '.join(each.after)}"
        modules = f"; modules {', '.join(each.modules_before)} -> {', '.join(each.modules_after)}"
        yield line + (modules if each.modules_before or each.modules_after else "")
    yield f"refused: {len(record.refusals)}"
    for refusal in record.refusals:
        yield f"  {refusal.site}: {refusal.reason}: {without_addresses(refusal.message)}"


def text_of(value: object) -> str:
    """Return an argument as text: ``%name`` for a node, a short readable form for other values.

    >>> import torch
    >>> text_of((1, torch.float32, torch.zeros(2, 3), slice(None, 2), torch.relu, {"b", "a"}))
    "(1, torch.float32, tensor float32[2, 3], slice(None, 2, None), torch.relu, {'a', 'b'})"
    """
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, Tensor):
        return f"tensor {_tensor(value)}"
    if isinstance(value, (list, tuple, set, frozenset)) and not isinstance(value, Size):
        return _collected(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{text_of(key)}: {text_of(item)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({text_of(value.start)}, {text_of(value.stop)}, {text_of(value.step)})"
    if isinstance(value, (FunctionType, BuiltinFunctionType, type, OpOverload)):
        return name_of(value)
    return without_addresses(repr(value))


def name_of(target: object) -> str:
    """Return the name of a target: the path of a module or attribute, or the qualified name of a function.

    >>> import operator, torch
    >>> name_of("layer.0"), name_of(operator.add), name_of(torch.ops.aten.relu.default)
    ('layer.0', 'operator.add', 'aten.relu.default')
    """
    if isinstance(target, str):
        return target
    if isinstance(target, BuiltinFunctionType):  # their qualified names in torch contain internal classes
        return f"{_public(target.__module__ or 'torch')}.{target.__name__}"
    if isinstance(target, (FunctionType, type)):
        return f"{_public(target.__module__)}.{target.__qualname__.rpartition('>.')[2]}"
    return without_addresses(str(target))


def _public(module: str) -> str:
    return module.removeprefix("_").partition("._C")[0]


def without_addresses(text: str) -> str:
    """Remove addresses from a text, as in ``<object object at 0x7f00>``."""
    return _ADDRESS.sub("", text)


def sections(graph_module: GraphModule, contents: Collection[str] = ("graph", "code", "modules")) -> Iterator[str]:
    """Yield the chosen sections on a graph module: its nodes as a table, its code, its modules."""
    if "graph" in contents:
        yield from section(f"graph: {len(graph_module.graph.nodes)} nodes", lambda: graph_table(graph_module))
    if "code" in contents:
        yield from section("code", lambda: graph_code(graph_module))
    if "modules" in contents:
        yield from section("modules", lambda: module_tree(graph_module))


def section(title: str, lines: Callable[[], Iterator[str]]) -> Iterator[str]:
    """Yield a title and lines, or the error if they cannot be made: a graph module may be half edited."""
    yield f"== {title}"
    try:
        yield from list(lines())
    except Exception as error:  # of any kind: the other sections are still useful
        yield f"cannot be shown: {type(error).__name__}: {without_addresses(str(error))}"
    yield ""


def _collected(value: list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any]) -> str:
    """Return a container as text; torch.fx's immutable lists look like lists."""
    texts = [text_of(item) for item in value]
    if isinstance(value, list):
        return f"[{', '.join(texts)}]"
    if isinstance(value, tuple):
        name = type(value).__name__ if hasattr(value, "_fields") else ""
        return f"{name}({', '.join(texts)}{',' if len(texts) == 1 else ''})"
    return f"{{{', '.join(sorted(texts))}}}"


def _value(node: Node) -> str:
    for key in ("val", "tensor_meta"):
        value: Any = node.meta.get(key)
        if hasattr(value, "shape") and hasattr(value, "dtype"):
            return f"{_short(value.dtype)}[{', '.join(map(str, value.shape))}]"
    return ""


def _tensor(tensor: Tensor) -> str:
    shape = "?" if is_lazy(tensor) else ", ".join(map(str, tensor.shape))
    device = "" if tensor.device.type == "cpu" else f" {tensor.device}"
    return f"{_short(tensor.dtype)}[{shape}]{device}"


def _short(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _module_lines(title: str, path: str, module: nn.Module, depth: int, seen: dict[int, str]) -> Iterator[str]:
    inside = "  " * (depth + 1)
    if id(module) in seen:
        yield f"{'  ' * depth}{title}, the same as {seen[id(module)] or 'the root'}"
        return
    seen[id(module)] = path
    hooks = sum(len(vars(module).get(name) or ()) for name in _HOOKS)
    mode = "train" if module.training else "eval"
    yield f"{'  ' * depth}{title}, {mode}{f', hooks: {hooks}' if hooks else ''}"
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        yield f"{inside}{name}: {_tensor_line(module, name, f'{path}.{name}'.lstrip('.'), tensor, seen)}"
    for name, child in module._modules.items():
        if child is None:
            yield f"{inside}{name}: None"
        else:
            title = f"{name}: {type(child).__name__}({_extra(child)})"
            yield from _module_lines(title, f"{path}.{name}".lstrip("."), child, depth + 1, seen)


def _tensor_line(module: nn.Module, name: str, path: str, tensor: Tensor | None, seen: dict[int, str]) -> str:
    if tensor is None:
        return "None"
    if id(tensor) in seen:
        return f"the same as {seen[id(tensor)]}"
    seen[id(tensor)] = path
    kind = "parameter" if name in module._parameters else "buffer"
    frozen = ", frozen" if kind == "parameter" and not tensor.requires_grad else ""
    left_out = ", not persistent" if name in module._non_persistent_buffers_set else ""
    return f"{kind} {_tensor(tensor)}{frozen}{left_out}"


def _extra(module: nn.Module) -> str:
    if isinstance(module, GraphModule):
        return ""
    try:
        return without_addresses(" ".join(module.extra_repr().split()))
    except Exception:  # third-party code, on a module that may be half edited
        return "..."
