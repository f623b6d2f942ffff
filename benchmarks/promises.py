"""What a rewriter owes besides correct values: the caller's model untouched, flags kept, undo exact, also of copies."""

from __future__ import annotations

import copy
import math
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import Argument, map_aggregate

from benchmarks.cases import NORMS, Case
from benchmarks.contenders import Contender, rewrote
from benchmarks.suite import Cell, Row, Table
from fxopt_core import iter_nodes

Promise = Callable[[Contender, Case], bool | None]
"""Whether a promise is kept; None where the case says nothing about it."""
State = dict[str, Tensor]


def caller_untouched(contender: Contender, case: Case) -> bool | None:
    """The caller's model has the same keys and values as before, and the same flags."""
    model = case.build()
    before, flags = state_of(model), flags_of(model)
    contender.rewrite(model, case)
    return same(before, state_of(model)) and flags == flags_of(model)


def frozen_stays_frozen(contender: Contender, case: Case) -> bool | None:
    """Nothing in the result is trainable if nothing was before."""
    model = case.build().requires_grad_(False)
    result = contender.rewrite(model, case)
    if not isinstance(result, GraphModule) or not rewrote(result, case):
        return None
    return not any(parameter.requires_grad for parameter in result.parameters())


def modes_kept(contender: Contender, case: Case) -> bool | None:
    """Every module in the result is in the mode that all modules of the model are in."""
    model = case.build().eval()
    result = contender.rewrite(model, case)
    if not isinstance(result, GraphModule) or not rewrote(result, case):
        return None
    return not any(module.training for name, module in result.named_modules() if name and not _is_container(module))


def undone(contender: Contender, case: Case) -> bool | None:
    """Undo gives back the same nodes, keys and bits."""
    return _undone(contender, case, lambda graph_module: graph_module)


def undone_after_copy(contender: Contender, case: Case) -> bool | None:
    """Undo does the same on a deep copy."""
    return _undone(contender, case, copy.deepcopy)


def undone_after_pickle(contender: Contender, case: Case) -> bool | None:
    """Undo does the same after pickling and unpickling."""
    return _undone(contender, case, lambda graph_module: pickle.loads(pickle.dumps(graph_module)))


PROMISES: Mapping[str, Promise] = {
    "the caller's model stays as it was": caller_untouched,
    "what is frozen stays frozen": frozen_stays_frozen,
    "new layers keep evaluation mode": modes_kept,
    "undo restores nodes, keys and bits": undone,
    "undo on a deep copy": undone_after_copy,
    "undo on an unpickled copy": undone_after_pickle,
}
TEXT = """The same cases in evaluation mode, where the tool rewrites something without an error. Undo, of reversible \
passes only, must restore all nodes with names and constants, and all state_dict keys in order, bit for bit."""


def table(cases: Iterable[Case], contenders: Sequence[Contender]) -> Table:
    """How often each promise was kept."""
    chosen = [case for case in cases if not case.training]
    rows = []
    for title, promise in PROMISES.items():
        cells: list[Cell] = [counted(promise, contender, chosen) for contender in contenders]
        rows.append(Row(title, tuple(cells)))
    return Table("Other promises, kept", ("promise", *(each.name for each in contenders)), tuple(rows), TEXT)


def counted(promise: Promise, contender: Contender, cases: Iterable[Case]) -> Cell:
    """Cases in which a contender keeps a promise, of all in which it rewrites."""
    kept = Counter(
        answer
        for case in cases
        if contender.applies(case) and (answer := kept_in(promise, contender, case)) is not None
    )
    return f"{kept[True]} of {kept.total()}" if kept else "-"


def kept_in(promise: Promise, contender: Contender, case: Case) -> bool | None:
    """Whether a promise is kept; None where the contender does not get that far."""
    try:
        with redirect_stderr(StringIO()):
            result = contender.rewrite(case.build(), case)
            if not isinstance(result, GraphModule) or not rewrote(result, case):
                return None
    except Exception:  # counted as an error in another table
        return None
    try:
        with redirect_stderr(StringIO()):
            return promise(contender, case)
    except Exception:  # undo may raise anything, and has failed then
        return False


def state_of(module: nn.Module) -> State:
    """A copy of the keys and values."""
    return {key: value.detach().clone() for key, value in module.state_dict().items()}


def flags_of(module: nn.Module) -> dict[str, tuple[bool, bool]]:
    """Mode and type of every module, and what is trained."""
    return {name: (parameter.requires_grad, parameter.is_leaf) for name, parameter in module.named_parameters()}


def same(one: State, other: State) -> bool:
    """Whether keys, their order, and all bits are equal."""
    return list(one) == list(other) and all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(one.values(), other.values(), strict=True)
    )


def nodes_of(graph_module: GraphModule) -> list[tuple[object, ...]]:
    """The nodes in a form where equal constants are equal: 2 equals 2.0, and NaN itself."""
    return [
        (node.op, node.name, str(node.target), map_aggregate((node.args, node.kwargs), _plain))
        for node in iter_nodes(graph_module.graph)
    ]


def _plain(argument: Argument) -> Argument:
    if isinstance(argument, Node):
        return argument.name
    return "nan" if isinstance(argument, float) and math.isnan(argument) else argument


def _undone(contender: Contender, case: Case, travel: Callable[[GraphModule], GraphModule]) -> bool | None:
    if contender.undo is None or case.family in NORMS:
        return None
    plain = torch.fx.symbolic_trace(case.build())
    if not _travels(plain, travel):
        return None
    result = contender.rewrite(case.build(), case)
    if not isinstance(result, GraphModule):
        return None
    restored = contender.undo(travel(result), case)
    return nodes_of(restored) == nodes_of(plain) and same(state_of(plain), state_of(restored))


def _travels(graph_module: GraphModule, travel: Callable[[GraphModule], GraphModule]) -> bool:
    """Whether torch itself can do this with an untouched trace."""
    try:
        travel(graph_module)
    except Exception:  # lambdas do not pickle, say
        return False
    return True


def _is_container(module: nn.Module) -> bool:
    """Whether a module only has children: tracing makes such modules anew, in training mode, which nothing reads."""
    return type(module) is nn.Module
