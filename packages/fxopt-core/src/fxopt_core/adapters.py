"""A pass as torch's own machinery takes it: in a `PassManager`, and among inductor's custom passes.

The way back, from a torch pass or a plain function to a transformation, is in `fxopt_core.wrapped`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import GraphModule
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fxopt_core.checks import check_graph_module
from fxopt_core.compose import check_is_transformation
from fxopt_core.ledger import ledger_of
from fxopt_core.transformation import Transformation

if TYPE_CHECKING:
    from fxopt_core.inductor import InductorPass


class TransformationPass(PassBase):
    """A transformation as torch's `PassBase`; made by `as_pass_base`.

    Attributes:
        transformation: what it runs.
    """

    def __init__(self, transformation: Transformation) -> None:
        check_is_transformation(transformation, "the argument of as_pass_base")
        self.transformation = transformation

    def call(self, graph_module: GraphModule) -> PassResult:
        """Run the transformation as the transaction that it is.

        Returns:
            The result, and whether any pass of it changed anything.

        Raises:
            PassError: The transformation failed; the graph module is as it was.
        """
        check_graph_module(graph_module, f"pass `{self.transformation.name}`")
        known = len(ledger_of(graph_module).records)
        result = self.transformation(graph_module)
        records = ledger_of(result).records[known:]
        return PassResult(result, any(record.changed and record.state == "applied" for record in records))

    def __eq__(self, other: object) -> bool:
        """Equal transformations make equal passes, so that constraints between them may be told with new ones."""
        if not isinstance(other, TransformationPass):
            return NotImplemented
        return self.transformation == other.transformation

    def __hash__(self) -> int:
        """Follow the transformation."""
        return hash(self.transformation)

    def __repr__(self) -> str:
        """Return the call that makes an equal one."""
        return f"as_pass_base({self.transformation!r})"


def as_pass_base(transformation: Transformation) -> TransformationPass:
    """Return a transformation as a pass for torch's `PassManager`.

    It lints, rolls back on an error and writes the ledger as ever. ``modified`` is told truly, so that a manager with
    several steps stops when nothing changes any more.

    Args:
        transformation: a pass, or a composition.

    Raises:
        PreconditionError: The argument is no transformation.

    >>> import torch
    >>> from torch.fx.passes.infra.pass_manager import PassManager
    >>> from fxopt_core import LintAndRecompile
    >>> result = PassManager([as_pass_base(LintAndRecompile())])(torch.fx.symbolic_trace(torch.nn.ReLU()))
    >>> type(result).__name__, result.modified
    ('PassResult', False)
    """
    return TransformationPass(transformation)


def as_inductor_pass(transformation: Transformation) -> InductorPass:
    """Return a transformation as a custom pass of inductor, for `torch.compile`.

        with torch._inductor.config.patch(post_grad_custom_pre_pass=as_inductor_pass(MyPass())):
            compiled = torch.compile(model)
            compiled(x)

    Inductor's graphs hold parameters as placeholders, so that passes which read or write weights find none, and leave
    such layers alone; run those before compiling. What a run did is in the result's ``records``.

    Args:
        transformation: a pass, or a composition, that edits its graph module in place.

    Raises:
        PreconditionError: The argument is no transformation.
    """
    from fxopt_core.inductor import InductorPass  # inductor takes longer to import than torch

    return InductorPass(transformation)
