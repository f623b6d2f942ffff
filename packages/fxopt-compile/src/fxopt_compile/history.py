"""What was done to a model's graphs, and `undo`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TypeVar

from torch import Tensor, nn

from fxopt_compile.backend import GRAPHS
from fxopt_core import (
    PreconditionError,
    Record,
    Refusal,
    text_table,
    type_text,
)
from fxopt_rewrite import refresh


@dataclass(frozen=True)
class GraphHistory:
    """What was done to one of dynamo's graphs.

    Attributes:
        name: dynamo's number: of the function, of the compilation, and of the part after a break.
        nodes: how many nodes it has.
        pipeline: the text of the passes.
        records: what each pass rewrote and refused; empty where the graph is left alone.
        reason: why it is left alone: code and sentence.
        calls: how many calls ran the rewritten graph.
        plain_calls: how many ran dynamo's own: the first ones after a change of the weights, and those in modes.
        refreshes: how often merged, folded or packed weights were derived again.
    """

    name: str
    nodes: int
    pipeline: str
    records: tuple[Record, ...]
    reason: Refusal | None
    calls: int
    plain_calls: int
    refreshes: int

    @property
    def rewritten(self) -> int:
        """The number of sites that were rewritten."""
        return sum(len(record.rewrites) for record in self.records)

    @property
    def refused(self) -> tuple[Refusal, ...]:
        """The sites that were left alone, or the graph as a whole."""
        whole = () if self.reason is None else (self.reason,)
        return (*whole, *(refusal for record in self.records for refusal in record.refusals))


_NO_GRAPHS = (
    "dynamo has made no graphs with backend fxopt in this process: no call of the model went through torch.compile. "
    "model.forward() bypasses model.compile(), and generate() bypasses what torch.compile returns: compile in place "
    "what is called. A spawned process has to compile the model itself"
)


class CompileHistory(tuple[GraphHistory, ...]):
    """The graphs that dynamo made of a model, oldest first; ``print`` shows a table."""

    __slots__ = ()

    def __str__(self) -> str:
        if not self:
            return _NO_GRAPHS
        rows: list[tuple[str, ...]] = [("graph", "rewritten", "refused", "calls", "plain calls", "refreshes")]
        for each in self:
            numbers = each.rewritten, len(each.refused), each.calls, each.plain_calls, each.refreshes
            rows.append((each.name, *map(str, numbers)))
        heading, *table = text_table(rows, right=range(1, 6))
        lines = [heading]
        for each, line in zip(self, table, strict=True):
            lines += [line, *(f"    {detail}" for detail in _details(each))]
        return "\n".join(lines)


def _details(graph: GraphHistory) -> Iterator[str]:
    if graph.reason is not None:
        yield f"left alone, {graph.reason.reason}: {graph.reason.message}"
    for record in graph.records:
        reasons = Counter(refusal.reason for refusal in record.refusals)
        refused = ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())
        if record.rewrites or record.changed or refused:
            more = f"; refused: {refused}" if refused else ""
            yield f"{record.pass_name}: {len(record.rewrites)} rewritten{more}"


ModuleT = TypeVar("ModuleT", bound=nn.Module)


def history(model: nn.Module | None = None) -> CompileHistory:
    """Return what was done to the graphs that dynamo made of a model with the backend ``fxopt``.

    A graph belongs to a model if it reads one of its parameters or buffers: of models that share weights, each has the
    graphs of the others. A graph without weights belongs to none.

    Args:
        model: the model, compiled or not; None for all graphs of this process.
    """
    tensors = _tensors_of(model, "history") if model is not None else None
    graphs = sorted(GRAPHS, key=lambda graph: graph.number)
    names = [field.name for field in fields(GraphHistory)]
    return CompileHistory(
        GraphHistory(**{name: getattr(graph, name) for name in names})
        for graph in graphs
        if tensors is None or graph.is_of(tensors)
    )


def undo(model: nn.Module) -> nn.Module:
    """Return the plain model, which was never changed, and drop what was derived from its weights.

    After ``model.compile(backend="fxopt")``, the model itself is plain again, and so are compiled modules in it.

    Raises:
        PreconditionError: It is not a module.
    """
    _tensors_of(model, "undo")
    from torch._dynamo.eval_frame import OptimizedModule  # which loads dynamo

    refresh(model)
    for module in model.modules():
        # `nn.Module.compile` sets it.
        module._compiled_call_impl = None
    return model._orig_mod if isinstance(model, OptimizedModule) else model


def _tensors_of(model: nn.Module, caller: str) -> dict[int, Tensor]:
    if not isinstance(model, nn.Module):
        raise PreconditionError(f"{caller} is given {type_text(model)}, expected a model, compiled or not")
    return {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
