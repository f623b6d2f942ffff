"""`fxopt bisect SOURCE -p PIPELINE`: the one rewrite that makes a check fail."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import check_sources
from fxopt.commands.failures import CommandError, ExitCode, blaming
from fxopt.commands.parameters import (
    AtolOption,
    InputsOption,
    Job,
    JsonOption,
    PickleOption,
    PipelineOption,
    RtolOption,
    SourceArgument,
    SqnrOption,
)
from fxopt.commands.terminal import Terminal

if TYPE_CHECKING:
    from fxopt_tools import Bisection

CheckOption = Annotated[
    str | None,
    typer.Option(
        "--check",
        metavar="MODULE:FUNCTION",
        help="A function that takes the transformed module and returns false or raises if it is bad. By default, the "
        "module has to compute the same as the untransformed one, on the inputs and within the tolerances.",
    ),
]


def bisect(
    source: SourceArgument,
    pipeline: PipelineOption = None,
    check: CheckOption = None,
    inputs: InputsOption = None,
    rtol: RtolOption = None,
    atol: AtolOption = None,
    sqnr: SqnrOption = None,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Find the one rewrite of a pipeline that makes a check fail.

    The exit code is 9 if there is none. Among N rewrites, it is found with at most
    log2(N) + 2 checks. Nothing is saved.
    """

    def work(terminal: Terminal) -> Answer:
        check_sources(source, inputs=inputs)
        bounds: dict[str, Any] = {"rtol": rtol, "atol": atol, "sqnr": sqnr}
        if check is not None and any(value is not None for value in bounds.values()):
            message = "--rtol, --atol and --sqnr are for comparing outputs; --check does not use them"
            raise CommandError(message, ExitCode.USAGE)
        with terminal.steps() as step:
            from fxopt.commands.models.factories import named_function
            from fxopt.commands.models.inputs import prepared
            from fxopt_tools import bisect as search

            function = None if check is None else named_function(check)
            _, graph_module, transformation, calls = prepared(step, Job(source, pipeline, inputs, run_pickled_code))
            step("checking")
            with blaming(ExitCode.FILE):
                found = search(graph_module, transformation, function or calls, **bounds)
        code = ExitCode.DONE if found else ExitCode.NOTHING_FOUND
        return Answer(_data(found), lambda terminal: terminal.print(str(found)), code)

    answer(work, as_json=as_json)


def _data(found: Bisection) -> dict[str, Any]:
    culprit = None
    if found.culprit is not None:
        problems = {trial.limit: trial.problem for trial in found.trials}
        culprit = asdict(found.culprit)
        culprit |= {"pass": culprit.pop("pass_name"), "problem": problems.get(culprit["number"] or 0)}
    checks = [asdict(trial) for trial in found.trials]
    return {"verdict": found.verdict, "rewrites": found.total, "checks": checks, "culprit": culprit}
