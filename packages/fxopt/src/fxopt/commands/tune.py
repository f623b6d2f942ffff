"""`fxopt tune SOURCE -p PIPELINE`: the passes of a pipeline that make the model faster on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxopt.commands.answering import Answer, answer
from fxopt.commands.exit_codes import ExitCode
from fxopt.commands.measurements import Measurement, RoundsOption, ratio_data
from fxopt.commands.parameters import (
    InputsOption,
    JsonOption,
    PickleOption,
    PipelineOption,
    SeedOption,
    SourceArgument,
)
from fxopt.commands.terminal import Terminal

if TYPE_CHECKING:
    from fxopt_tools import Tuning


def tune(
    source: SourceArgument,
    pipeline: PipelineOption = "inference",
    rounds: RoundsOption = 30,
    inputs: InputsOption = None,
    seed: SeedOption = 0,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Keep the passes of a pipeline whose benefit exceeds the noise on this machine; exit with 9 where none does.

    The pipeline that is kept is printed, for `fxopt optimize -p`. Nothing is saved.
    """

    def tuned_by_tools(*given: Any, **settings: Any) -> Tuning:
        from fxopt_tools import tune

        return tune(*given, **settings)

    def work(terminal: Terminal) -> Answer:
        measurement = Measurement(source, pipeline, inputs, seed, rounds, run_pickled_code)
        found = measurement.made_by(terminal, tuned_by_tools)
        data = _data(found)
        code = ExitCode.DONE if found else ExitCode.NOTHING_FOUND
        return Answer(data, lambda terminal: _show(terminal, found, data), code)

    answer(work, as_json=as_json)


def _data(found: Tuning) -> dict[str, Any]:
    from fxopt_core import registry

    return {
        "pipeline": registry().pipeline_text(found.transformation),
        "speedup": None if found.speedup is None else ratio_data(found.speedup),
        "noise": found.noise,
        "decisions": [
            {
                "name": each.name,
                "kept": each.kept,
                "reason": each.reason,
                "effect": None if each.effect is None else ratio_data(each.effect),
            }
            for each in found.decisions
        ],
    }


def _show(terminal: Terminal, found: Tuning, data: dict[str, Any]) -> None:
    terminal.print(str(found))
    if found:
        terminal.print(f"\nkept: {data['pipeline']}")
