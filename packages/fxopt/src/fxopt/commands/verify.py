"""`fxopt verify ORIGINAL TRANSFORMED`: do two models compute the same?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fxopt.commands.answering import Answer, answer
from fxopt.commands.exit_codes import ExitCode
from fxopt.commands.failures import blaming
from fxopt.commands.parameters import (
    SOURCE_HELP,
    AtolOption,
    InputsOption,
    JsonOption,
    PickleOption,
    RtolOption,
    SeedOption,
)
from fxopt.commands.terminal import Terminal

if TYPE_CHECKING:
    from fxopt_tools import VerificationReport

OriginalArgument = Annotated[str, typer.Argument(metavar="ORIGINAL", help=SOURCE_HELP)]
TransformedArgument = Annotated[str, typer.Argument(metavar="TRANSFORMED", help="The same, of the other model.")]
_STEPS = {"loading torch": 3.0, "reading the original": 4.0, "reading the other": 4.0, "comparing": 1.0}


def verify(
    original: OriginalArgument,
    transformed: TransformedArgument,
    inputs: InputsOption = None,
    seed: SeedOption = 0,
    rtol: RtolOption = None,
    atol: AtolOption = None,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run two models on the same inputs and compare all that they return; exit with 7 where they differ."""

    def work(terminal: Terminal) -> Answer:
        from fxopt.commands.graph_data import report_data

        report = _report(terminal, (original, transformed), inputs, seed, (rtol, atol), run_pickled_code)
        code = ExitCode.DONE if report.passed else ExitCode.DIFFERS
        return Answer(report_data(report), lambda terminal: terminal.print(str(report)), code)

    answer(work, as_json=as_json)


def _report(
    terminal: Terminal,
    sources: tuple[str, str],
    inputs: str | None,
    seed: int,
    tolerances: tuple[float | None, float | None],
    run_pickled_code: bool,
) -> VerificationReport:
    with terminal.steps(_STEPS) as step:
        step("loading torch")
        from fxopt.commands.model_inputs import inputs_for
        from fxopt.commands.sources import read_source
        from fxopt_tools import verify as compare

        step("reading the original")
        original = read_source(sources[0], run_pickled_code=run_pickled_code)
        calls = inputs_for(original, inputs, seed, run_pickled_code=run_pickled_code)
        step("reading the other")
        transformed = read_source(sources[1], run_pickled_code=run_pickled_code)
        step("comparing")
        with blaming(ExitCode.FILE):
            return compare(original.model, transformed.model, calls, rtol=tolerances[0], atol=tolerances[1])
