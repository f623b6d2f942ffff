"""`fxopt verify ORIGINAL TRANSFORMED`: do two models compute the same?"""

from __future__ import annotations

from typing import Annotated

import typer

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import check_sources
from fxopt.commands.failures import ExitCode, blaming
from fxopt.commands.parameters import (
    SOURCE_HELP,
    AtolOption,
    InputsOption,
    JsonOption,
    PickleOption,
    RtolOption,
    SqnrOption,
)
from fxopt.commands.terminal import Terminal

OriginalArgument = Annotated[str, typer.Argument(metavar="ORIGINAL", help=SOURCE_HELP)]
TransformedArgument = Annotated[str, typer.Argument(metavar="TRANSFORMED", help="The same, of the other model.")]


def verify(
    original: OriginalArgument,
    transformed: TransformedArgument,
    inputs: InputsOption = None,
    rtol: RtolOption = None,
    atol: AtolOption = None,
    sqnr: SqnrOption = None,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run two models on the same inputs and compare their outputs.

    The exit code is 7 if they differ.
    """

    def work(terminal: Terminal) -> Answer:
        check_sources(original, transformed, inputs=inputs)
        with terminal.steps() as step:
            from fxopt.commands.data import report_data
            from fxopt.commands.models.inputs import inputs_for
            from fxopt.commands.models.sources import read_source
            from fxopt_tools import verify as compare

            step("reading the original")
            model = read_source(original)
            calls = inputs_for(model, inputs, run_pickled_code=run_pickled_code)
            step("reading the other")
            other = read_source(transformed)
            step("comparing")
            with blaming(ExitCode.FILE):
                report = compare(model.model, other.model, calls, rtol=rtol, atol=atol, sqnr=sqnr)
        code = ExitCode.DONE if report.passed else ExitCode.DIFFERS
        return Answer(report_data(report), lambda terminal: terminal.print(str(report)), code)

    answer(work, as_json=as_json)
