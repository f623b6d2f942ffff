"""A pass as torch's own machinery takes it: in a `PassManager`, and among inductor's custom passes."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Graph, GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fxopt_core import (
    META_KEY,
    PostconditionError,
    PreconditionError,
    Record,
    Transformation,
    check_graph_module,
    check_is_transformation,
    iter_nodes,
    ledger_of,
    lint_and_recompile,
    new_run,
    perform,
    transaction,
)

__all__ = ["as_inductor_pass", "as_pass_base"]

_IN_PLACE = "inductor expects its own graph to be edited in place"


@dataclass(frozen=True, repr=False)
class TransformationPass(PassBase):
    """A transformation as torch's `PassBase`; made by `as_pass_base`.

    Equal transformations make equal passes, so that constraints may name them by new ones.
    """

    transformation: Transformation

    def __post_init__(self) -> None:
        check_is_transformation(self.transformation, "the argument of as_pass_base")

    def call(self, graph_module: GraphModule) -> PassResult:
        """Run the transformation as a transaction, and say whether any of its passes changed anything."""
        check_graph_module(graph_module, f"pass `{self.transformation.name}`")
        known = len(ledger_of(graph_module).records)
        result = self.transformation(graph_module)
        records = ledger_of(result).records[known:]
        return PassResult(result, any(record.changed and record.state == "applied" for record in records))

    def __repr__(self) -> str:
        return f"as_pass_base({self.transformation!r})"


def as_pass_base(transformation: Transformation) -> TransformationPass:
    """Return a transformation as a pass for torch's `PassManager`.

    It lints, rolls back on an error and writes the ledger as usual. ``modified`` is accurate, so a manager with
    several steps stops when nothing changes any more.

    Args:
        transformation: a pass, or a composition.

    Raises:
        PreconditionError: The argument is not a transformation.

    >>> import torch
    >>> from torch.fx.passes.infra.pass_manager import PassManager
    >>> from fxopt_core import LintAndRecompile
    >>> result = PassManager([as_pass_base(LintAndRecompile())])(torch.fx.symbolic_trace(torch.nn.ReLU()))
    >>> type(result).__name__, result.modified
    ('PassResult', False)
    """
    return TransformationPass(transformation)


class InductorPass:
    """A transformation as inductor's `CustomGraphPass`; made by `as_inductor_pass`.

    Attributes:
        transformation: what it runs.
        records: what each run did and refused, the oldest first. Graphs of inductor keep no ledger and no marks: they
            would enter the key of inductor's cache, and nothing in them is undone.
    """

    def __init__(self, transformation: Transformation) -> None:
        check_is_transformation(transformation, "the argument of as_inductor_pass")
        if transformation._copies:
            raise PreconditionError(f"{transformation!r} works on a copy, and {_IN_PLACE}: omit inplace=False")
        self.transformation = transformation
        self.records: list[Record] = []

    def __call__(self, graph: Graph) -> None:
        """Run the transformation on a graph of inductor, as a transaction.

        Raises:
            PreconditionError: The graph belongs to no graph module.
            PostconditionError: The result is another graph module, or calls modules where the graph called none.
            PassError: The transformation failed; the graph is as it was.
        """
        owner, name = graph.owning_module, self.transformation.name
        if not isinstance(owner, GraphModule) or owner.graph is not graph:
            message = f"pass `{name}` is given a graph that belongs to no graph module, expected one of inductor's"
            raise PreconditionError(message, pass_name=name)
        calls_modules = bool(graph.find_nodes(op="call_module"))
        # Put back at the end, so that this run leaves no marks.
        traces = {node.name: node.meta.get(META_KEY) for node in iter_nodes(graph)}
        ledger = owner.meta.get(META_KEY)
        known, run = len(ledger_of(owner).records), new_run(self.transformation, owner)
        with transaction(run):
            if perform(run, run) is not owner:
                raise PostconditionError(
                    f"pass `{name}` returned another graph module, and {_IN_PLACE}: omit what copies (deep-copy, "
                    "inplace=False)"
                )
            for node in () if calls_modules else owner.graph.find_nodes(op="call_module"):
                raise PostconditionError(
                    f"pass `{name}` left node `{node.name}`, which calls module {node.target}; inductor's graphs call "
                    "only functions. Run this pass before torch.compile"
                )
            lint_and_recompile(owner, self.transformation)
            self.records += ledger_of(owner).records[known:]
            _put_back(owner.meta, ledger)
            for node in iter_nodes(owner.graph):
                _put_back(node.meta, traces.get(node.name))

    def uuid(self) -> str | None:
        """Return a key of class, options, code and version for inductor's cache; None, which turns that cache off,
        for a pass whose options have no stable value.
        """
        try:
            return self.transformation.uuid()
        except TypeError:
            return None

    def __repr__(self) -> str:
        return f"as_inductor_pass({self.transformation!r})"


def _put_back(meta: dict[str, object], value: object) -> None:
    if value is None:
        meta.pop(META_KEY, None)
    else:
        meta[META_KEY] = value


def as_inductor_pass(transformation: Transformation) -> InductorPass:
    """Return a transformation as a custom pass of inductor, for `torch.compile`.

        with torch._inductor.config.patch(post_grad_custom_pre_pass=as_inductor_pass(MyPass())):
            compiled = torch.compile(model)
            compiled(x)

    Inductor's graphs hold parameters as placeholders, so that passes which read or write weights find none, and leave
    such layers alone; run those before compiling. In graphs before gradients, which have no ``val``, shapes are
    unknown. What a run did is in the result's ``records``.

    Args:
        transformation: a pass, or a composition, that edits its graph module in place.

    Raises:
        PreconditionError: The argument is not a transformation.
    """
    from torch._inductor.custom_graph_pass import CustomGraphPass  # importing inductor takes longer than torch

    CustomGraphPass.register(InductorPass)
    return InductorPass(transformation)
