"""`ShapeTables`: tensors that depend only on sizes, computed once for each set of sizes.

Three kinds of input decide their values. A ``size`` is a number, a shape, a dtype or a device, and counts by its
value. A ``like`` tensor, as of ``ones_like(x)``, counts by shape, dtype and device. A ``buffer``, which
may be a parameter, is watched, so that loading, moving or writing it is noticed.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from fxopt_rewrite import (
    PLAIN,
    GraphIndex,
    MalformedError,
    ValueReader,
    ValueWriter,
    Watched,
    check_targets,
    check_values,
    read_graph,
    runs_plainly,
    write_graph,
)

SIZE, LIKE, BUFFER = "size", "like", "buffer"
_MOST_KEPT = 8
#: The most bytes of tables that are kept beside others; larger ones are kept alone, if at all.
MOST_BYTES = 2**24
_LOCK = threading.Lock()
#: The exact types of sizes: True and 1.0 equal 1 as keys, and make other tensors.
_SIZES = (int, torch.Size, torch.dtype, torch.device)

Tables = Tensor | tuple[Tensor, ...]


def program_text(graph: Graph) -> str:
    """Return a graph of torch's functions as text.

    Raises:
        InexpressibleError: The graph calls something else than functions, operators and methods of torch.
    """
    rows = write_graph(graph, ValueWriter(names=PLAIN))
    for row in rows["rows"]:
        row.pop("trace", None)  # a line of code, with a path: this text goes into archives
    return json.dumps(rows)


def program_of(text: str) -> GraphModule:
    """Return a module that computes the graph in a text, which may only name functions of torch."""
    graph = read_graph(json.loads(text), ValueReader(names=PLAIN))
    check_values(graph)  # before torch generates code from it
    check_targets(graph, nn.Module())
    graph.lint()
    program = GraphModule(nn.Module(), graph)
    index = GraphIndex(program)
    for node in filter(index.effects.writes, index.nodes):
        raise MalformedError(f"node `{node.name}` of a table writes to its inputs, expected new tensors alone")
    return program


class ShapeTables(nn.Module):
    """Tensors that do not depend on the numbers in the inputs, computed once for each set of sizes.

    It keeps those of the last 8 sizes, up to 16 MiB each, on CPUs; larger ones for the last size only, if they take
    no more memory than the buffers and parameters that they come from. They belong to this object: copies, pickles
    and archives start without them. Under ``torch.compile``, ``torch.export`` and other tracing, under autocast and
    modes that intercept calls, where gradients flow into a parameter, and on other devices, it computes them at each
    call.

    Args:
        graph: the computation, as text; see `ShapeTables.of`.
        roles: what each input is: ``"size"``, ``"like"`` or ``"buffer"``.

    >>> graph = Graph()
    >>> positions = graph.call_function(torch.arange, (graph.placeholder("n"),))
    >>> _ = graph.output(graph.call_function(torch.unsqueeze, (positions, 0)))
    >>> tables = ShapeTables.of(graph, ["size"])
    >>> tables(3), tables(3) is tables(3)
    (tensor([[0, 1, 2]]), True)
    """

    only_computes = shares_inputs = True
    # In slots and not in vars(), so that copies, pickles and archives start without them.
    __slots__ = ("_kept", "_program")

    _kept: dict[Hashable, tuple[Tables, Watched]]
    _program: GraphModule

    def __init__(self, graph: str, roles: tuple[str, ...]) -> None:
        super().__init__()
        self.graph, self.roles = graph, roles
        self.check_attributes()

    @classmethod
    def of(cls, graph: Graph, roles: Sequence[str]) -> ShapeTables:
        """Return a module that computes what a graph of torch's functions does.

        Raises:
            InexpressibleError: The graph calls something else than functions, operators and methods of torch.
        """
        return cls(program_text(graph), tuple(roles))

    def check_attributes(self) -> None:
        """Read the computation, which may come from an untrusted file."""
        object.__setattr__(self, "_program", program_of(self.graph))
        object.__setattr__(self, "_kept", {})

    def forward(self, *inputs: Any) -> Tables:
        """Return the tensors for these sizes: one, or a tuple of several. They are shared, and must not be written."""
        if not hasattr(self, "_program"):
            self.check_attributes()
        key = self._key(inputs) if runs_plainly() else None
        if key is None:
            return self._compute(inputs)
        buffers = [value for role, value in zip(self.roles, inputs, strict=True) if role == BUFFER]
        kept = self._kept.get(key)
        if kept is not None and kept[1].hold(buffers):
            return kept[0]
        # Before computing, so that a write by another thread meanwhile is noticed by the next call.
        watched = Watched(buffers)
        # A tensor made in inference mode could not take part in training later.
        with torch.inference_mode(False), torch.no_grad():
            tables = self._compute(inputs)
        size = _bytes_kept(tables)
        if size is not None and size <= max(MOST_BYTES, sum(buffer.nbytes for buffer in buffers)):
            with _LOCK:
                # Dictionaries are in the order of insertion: the oldest go first, and all of them for a large table.
                while len(self._kept) >= (_MOST_KEPT if size <= MOST_BYTES else 1):
                    self._kept.pop(next(iter(self._kept)))
                self._kept[key] = tables, watched
        return tables

    def _compute(self, inputs: Sequence[Any]) -> Tables:
        tables: Tables = self._program(*inputs)
        return tables

    def _key(self, inputs: Sequence[Any]) -> Hashable | None:
        """Return the key that decides the tensors, or None where they have to be computed."""
        # The default dtype is that of factories to which none is given.
        key: list[Hashable] = [torch.get_default_dtype()]
        for role, value in zip(self.roles, inputs, strict=True):
            if role == SIZE:
                if type(value) not in _SIZES:
                    return None
                key.append(value)
            elif type(value) not in (Tensor, nn.Parameter) or not value.is_cpu or value.layout is not torch.strided:
                return None
            elif role == LIKE:
                # ``ones_like`` follows the strides, too.
                key.append((value.shape, value.dtype, value.stride()))
            # It has no version counter by which a write could be noticed.
            elif value.is_inference():
                return None
            elif value.requires_grad and torch.is_grad_enabled():
                self.forget_derived()  # some optimizers change a parameter without a new version
                return None
            else:
                key.append(id(value))
        return tuple(key)

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes alone, to be copied and saved."""
        return dict(vars(self))

    def forget_derived(self) -> None:
        """Drop what is kept; the next call computes it again."""
        if hasattr(self, "_kept"):
            with _LOCK:  # another thread may be making room
                self._kept.clear()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> ShapeTables:
        """Drop what is kept when the model is converted or moved, which replaces its buffers."""
        self.forget_derived()
        applied: ShapeTables = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        return applied

    def extra_repr(self) -> str:
        """Return the kinds of inputs."""
        return ", ".join(self.roles)


def _bytes_kept(tables: Tables) -> int | None:
    """Return the bytes that tensors take; None if not on CPUs: elsewhere, a stream or CUDA graph may own them."""
    tensors = tables if isinstance(tables, tuple) else (tables,)
    if not all(type(tensor) is Tensor and tensor.is_cpu and not tensor.requires_grad for tensor in tensors):
        return None
    # By storages: a view keeps all of the memory that it lies in.
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
