"""Whether a transformed module is good: by a caller's own check, or by verification on inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from torch.fx import GraphModule

from fxopt_core import PreconditionError
from fxopt_tools.baseline import baseline, report_on, run_or_refuse
from fxopt_tools.inputs import OneInput, read_inputs
from fxopt_tools.reference import Reference

CheckOrInputs: TypeAlias = "Callable[[GraphModule], object] | OneInput | Sequence[OneInput]"
"""What is called with the transformed module, or what it is verified on."""
Judge: TypeAlias = "Callable[[GraphModule], str | None]"
"""Returns what is wrong with a module, or None."""


def judge_of(
    check: CheckOrInputs, graph_module: GraphModule, *, rtol: float | None = None, atol: float | None = None
) -> Judge:
    """Return what judges what becomes of a graph module.

    Args:
        check: a function of the module that returns false or raises where it is bad; None, as of a function that
            only asserts, is good. Or inputs as for `verify`, on which the module has to compute what it does now.
        graph_module: the module before it is transformed.
        rtol: relative tolerance on inputs; if None, that of the dtype.
        atol: absolute tolerance on inputs; if None, that of the dtype.

    Raises:
        PreconditionError: The inputs make no sense, or the module refuses them; or there are tolerances for a function,
            which judges by its own.
    """
    if not callable(check):
        return _verified(check, graph_module, rtol, atol)
    if rtol is not None or atol is not None:
        raise PreconditionError(
            f"rtol={rtol} and atol={atol} are for comparing outputs on inputs, and the check is a function: give "
            "inputs in its place, or let the function judge by tolerances of its own"
        )
    return _called(check)


def _called(check: Callable[[GraphModule], object]) -> Judge:
    def judge(graph_module: GraphModule) -> str | None:
        try:
            found = check(graph_module)
            good = found is None or bool(found)
        except Exception as error:  # of any kind: that is how a check says no
            return f"the check raised {type(error).__name__}: {error}"
        return None if good else f"the check returned {_first_line(found)}"

    return judge


def _first_line(value: object) -> str:
    lines = str(value).splitlines()
    return lines[0] if lines else repr(value)


def _verified(
    inputs: OneInput | Sequence[OneInput], graph_module: GraphModule, rtol: float | None, atol: float | None
) -> Judge:
    read, reference = read_inputs(inputs), Reference(graph_module)
    expected = [baseline(graph_module, item, "the model", place, reference) for place, item in enumerate(read)]

    def judge(transformed: GraphModule) -> str | None:
        try:
            found = [run_or_refuse(transformed, item, "the module", place) for place, item in enumerate(read)]
        except PreconditionError as error:
            return str(error)
        report = report_on(zip(expected, found, strict=True), rtol=rtol, atol=atol)
        return None if report.worst is None else str(report.worst)

    return judge
