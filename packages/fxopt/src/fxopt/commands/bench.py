"""`fxopt bench SOURCE -p PIPELINE`: what a pipeline brings on this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fxopt.commands.answering import Answer, answer
from fxopt.commands.exit_codes import ExitCode
from fxopt.commands.failures import blaming
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
    from fxopt_tools import Benchmark, Ratio, Times


PerOption = Annotated[
    Literal["pipeline", "pass", "site"],
    typer.Option("--per", help="Measure what each pass, or each rewrite, brings, too."),
]
RoundsOption = Annotated[int, typer.Option("--rounds", min=8, help="How often each variant is measured.")]
_Given = tuple[str | None, int, bool]  # inputs, seed, whether pickles may be opened
_STEPS = {"loading torch": 3.0, "reading": 4.0, "capturing": 6.0, "measuring": 20.0}


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

    def work(terminal: Terminal) -> Answer:
        measured = _measured(terminal, source, pipeline, per, rounds, (inputs, seed, run_pickled_code))
        return Answer(_data(measured), lambda terminal: terminal.print(str(measured)))

    answer(work, as_json=as_json)


def _measured(
    terminal: Terminal, source: str, pipeline: str, per: Literal["pipeline", "pass", "site"], rounds: int, given: _Given
) -> Benchmark:
    with terminal.steps(_STEPS) as step:
        step("loading torch")
        from fxopt.commands.captured_sources import captured_source
        from fxopt_core import registry
        from fxopt_tools import bench as measure

        transformation = registry().pipeline(pipeline)
        inputs, seed, run_pickled_code = given
        graph_module, calls = captured_source(step, source, inputs, seed, run_pickled_code=run_pickled_code)
        step("measuring")
        with blaming(ExitCode.PASS):
            return measure(graph_module, transformation, calls, per=per, rounds=rounds, seed=seed, progress=step.part)


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


def ratio_data(ratio: Ratio) -> dict[str, float]:
    """Return a ratio for scripts."""
    return {"median": ratio.median, "low": ratio.low, "high": ratio.high}


def _times_data(times: Times) -> dict[str, float]:
    return {"median_seconds": times.median, "spread_seconds": times.spread, "rounds": len(times.seconds)}
