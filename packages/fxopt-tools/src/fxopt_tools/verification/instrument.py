"""`Verify`: an instrument that accepts a pass only if the module still computes the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from torch.fx import GraphModule

from fxopt_core import Instrument, PassRun, PreconditionError, Record, VerificationError
from fxopt_tools.inputs import OneInput, read_inputs
from fxopt_tools.verification.bounds import read_bounds, records_of
from fxopt_tools.verification.isolated_run import run_thrice
from fxopt_tools.verification.report import VerificationReport
from fxopt_tools.verification.verify import Baseline, baselines, report_on


@dataclass(frozen=True)
class Check:
    """The result of `Verify` for one run of a pass.

    Attributes:
        pass_name: the pass.
        index: its position in the composition, or None outside one.
        reverse: whether it was being undone.
        passed: whether the module computed the same afterwards, or None if that was not checked.
        report: the comparison, or None if there was none.
        reason: why there was none, or None.
    """

    pass_name: str
    index: int | None
    reverse: bool
    passed: bool | None
    report: VerificationReport | None = None
    reason: str | None = None

    def __str__(self) -> str:
        """Return one line."""
        verdict = {True: "passed", False: "FAILED", None: "not checked"}[self.passed]
        what = f"undoing {self.pass_name}" if self.reverse else self.pass_name
        return f"{what}: {verdict}{f': {self.reason}' if self.reason else ''}"


class Verify(Instrument):
    """Runs the module before and after each pass, and accepts the pass only if the outputs agree.

    Use ``with instrumented(Verify(inputs)):`` around passes and compositions, forwards and in reverse. It compares as
    `verify` does, by the same criterion, and checks every pass, whether or not it claims to preserve the computation
    (``preserves_computation``), since many authors do not say.

    Each pass costs four runs of the module for each input, and a float64 copy of the module with one run. A pass that
    another one calls on another graph module (for example, a part of the whole) is checked with its caller alone.

    Attributes:
        checks: a `Check` for each run of a pass, in order.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile, instrumented
    >>> gate = Verify(torch.ones(2, 3))
    >>> with instrumented(gate):
    ...     _ = LintAndRecompile()(torch.fx.symbolic_trace(torch.nn.ReLU()))
    >>> print(*gate.checks)
    lint-and-recompile: passed
    """

    runs_module = True

    def __init__(
        self,
        inputs: OneInput | Sequence[OneInput],
        *,
        rtol: float | None = None,
        atol: float | None = None,
        sqnr: float | None = None,
        on_failure: Literal["raise", "veto"] = "raise",
    ) -> None:
        """Prepare to check passes.

        Args:
            inputs: as for `verify`.
            rtol: relative tolerance instead of the dtype's.
            atol: absolute tolerance instead of the dtype's.
            sqnr: the lowest signal-to-noise ratio in dB, in place of tolerances and of the passes' promises.
            on_failure: "raise" a `VerificationError`, which rolls back the whole run, or "veto", which rolls back only
                this pass and continues with the next one.

        Raises:
            PreconditionError: An argument is invalid.
        """
        if on_failure not in ("raise", "veto"):
            raise PreconditionError(f"on_failure is {on_failure!r}, expected 'raise' or 'veto'")
        self._bounds = read_bounds(rtol, atol, sqnr)
        self.checks: list[Check] = []
        self._vetoes = on_failure == "veto"
        self._inputs = read_inputs(inputs)
        # By the run's id, since a pass may call another: what the module did, the module, and its records
        self._pending: dict[int, tuple[list[Baseline], GraphModule, tuple[Record, ...]]] = {}

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        """Run the module before the pass; raise a `PreconditionError` if it refuses the inputs."""
        caller = run.parent
        while caller is not None and id(caller) not in self._pending:  # a composition
            caller = caller.parent
        # A part of the whole need not accept the inputs of the whole.
        if caller is not None and self._pending[id(caller)][1] is not graph_module:
            return
        try:
            expected = baselines(graph_module, self._inputs, f"the graph module before pass `{run.name}`")
        except PreconditionError as error:
            error.pass_name, error.index = run.name, run.index
            raise
        self._pending[id(run)] = expected, graph_module, records_of(graph_module)

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> bool | None:
        """Run the module again and compare; veto the pass, or raise, if the results differ."""
        check = Check(run.name, run.index, run.reverse, None)
        if id(run) not in self._pending:
            reason = "it works on another graph module, inside of a pass that is checked"
            self.checks.append(replace(check, reason=reason))
            return None
        expected, _, known = self._pending.pop(id(run))
        try:
            found = [run_thrice(graph_module, item) for item in self._inputs]
        except Exception as error:
            reason = f"it now refuses inputs that it took before: {type(error).__name__}: {error}"
            self.checks.append(replace(check, passed=False, reason=reason))
            if self._vetoes:
                return False
            raise VerificationError(
                f"pass `{run.name}` broke the graph module: {reason}. Expected it to run as before. Leave the pass out "
                "or report it, or let Verify veto it by on_failure='veto'",
                pass_name=run.name,
                index=run.index,
            ) from error
        # The pass's own record enters the ledger only after the instruments have accepted it.
        bounds = self._bounds.between(known, (*records_of(graph_module), record))
        report = report_on(zip(expected, found, strict=True), bounds, (record,))
        self.checks.append(replace(check, passed=report.passed, report=report))
        if not self._vetoes:
            report.raise_if_failed(pass_name=run.name, index=run.index)
        return None if report.passed else False

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        """Forget the outputs before this run."""
        self._pending.pop(id(run), None)
