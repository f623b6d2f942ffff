"""`fxopt bench SOURCE -p PIPELINE`: what a pipeline brings on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fxopt.commands.answering import Answer, answer
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
    from fxopt_tools import Benchmark, Times


PerOption = Annotated[
    Literal["pipeline", "pass", "site"],
    typer.Option("--per", help="Measure what each pass, or each rewrite, brings, too."),
]


def bench(
    source: SourceArgument,
    pipeline: PipelineOption = "inference",
    per: PerOption = "pipeline",
    rounds: RoundsOption = 30,
    inputs: InputsOption = None,
    seed: SeedOption = 0,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure what a pipeline brings on a model and its inputs, on this machine, against the noise.

    The captured model and what the pipeline makes of it take turns, in an order that is drawn. Nothing is saved.
    """

    def measured_by_tools(*given: Any, **settings: Any) -> Benchmark:
        from fxopt_tools import bench

        return bench(*given, per=per, **settings)

    def work(terminal: Terminal) -> Answer:
        measurement = Measurement(source, pipeline, inputs, seed, rounds, run_pickled_code)
        measured = measurement.made_by(terminal, measured_by_tools)
        return Answer(_data(measured), lambda terminal: terminal.print(str(measured)))

    answer(work, as_json=as_json)


def _data(measured: Benchmark) -> dict[str, Any]:
    return {
        "verdict": measured.verdict,
        "speedup": ratio_data(measured.speedup),
        "noise": measured.noise,
        "original": _times_data(measured.original),
        "transformed": _times_data(measured.transformed),
        "contributions": [
            {"name": each.name, "verdict": each.effect.against(measured.noise), **ratio_data(each.effect)}
            for each in measured.contributions
        ],
    }


def _times_data(times: Times) -> dict[str, float]:
    return {"median_seconds": times.median, "spread_seconds": times.spread, "rounds": len(times.seconds)}
