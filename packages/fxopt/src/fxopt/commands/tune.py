"""`fxopt tune SOURCE -p PIPELINE`: the passes of a pipeline that make the model faster on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fxopt.commands.answer import Answer, answer
from fxopt.commands.bench import RoundsOption, ratio_data
from fxopt.commands.checks import check_pipeline, check_sources
from fxopt.commands.failures import ExitCode, blaming
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
    pipeline: PipelineOption = None,
    rounds: RoundsOption = 30,
    inputs: InputsOption = None,
    seed: SeedOption = 0,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Keep the passes of a pipeline that make a model faster here.

    Kept are those whose benefit exceeds the noise; the exit code is 9 if there are none. Prints the
    remaining pipeline, for `fxopt optimize -p`. Nothing is saved.
    """

    def work(terminal: Terminal) -> Answer:
        check_pipeline(pipeline)
        check_sources(source, inputs=inputs, trusted=run_pickled_code)
        with terminal.steps(4) as step:
            from fxopt.commands.models.inputs import prepared
            from fxopt_tools import tune as measure

            model = prepared(step, source, pipeline, inputs, seed, run_pickled_code=run_pickled_code)
            step("measuring")
            with blaming(ExitCode.PASS):
                found = measure(*model, rounds=rounds, seed=seed, progress=step.part)
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
