"""`fxopt bench SOURCE -p PIPELINE`: how much faster a pipeline makes a model."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import check_dynamic, check_sources
from fxopt.commands.failures import ExitCode, blaming
from fxopt.commands.parameters import (
    DynamicOption,
    InputsOption,
    Job,
    JsonOption,
    PickleOption,
    PipelineOption,
    SourceArgument,
)
from fxopt.commands.terminal import Terminal

if TYPE_CHECKING:
    from fxopt_tools import Benchmark, Comparison
    from fxopt_tools.speed import Times

RoundsOption = Annotated[int, typer.Option("--rounds", min=8, help="Measurements of each variant, 8 or more.")]
PerOption = Annotated[
    Literal["pipeline", "pass", "site"],
    typer.Option("--per", help="Also measure what each pass, or each rewrite, contributes."),
]


def bench(
    source: SourceArgument,
    pipeline: PipelineOption = None,
    per: PerOption = "pipeline",
    rounds: RoundsOption = 30,
    inputs: InputsOption = None,
    dynamic: DynamicOption = None,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure how much faster pipelines make a model here.

    Without -p, the named pipelines for the device of the model are compared. The captured
    model and the transformed ones take turns, in random order. Nothing is saved.
    """

    def work(terminal: Terminal) -> Answer:
        varying = check_dynamic(dynamic or ())
        check_sources(source, inputs=inputs)
        with terminal.steps() as step:
            # These imports load torch, which takes seconds: they follow the checks of the command line.
            from fxopt.commands.models.inputs import prepared
            from fxopt.optimization import named_pipelines
            from fxopt_tools import bench as measure, compare_pipelines

            job = Job(source, pipeline, inputs, run_pickled_code, varying)
            _, graph_module, transformation, calls = prepared(step, job)
            step("measuring")
            with blaming(ExitCode.PASS):
                if pipeline is None and per == "pipeline":
                    ways = {name: name for name in named_pipelines(graph_module)}
                    table = compare_pipelines(graph_module, ways, calls, rounds=rounds)
                    return Answer(_table_data(table), lambda terminal: terminal.print(str(table)))
                found = measure(graph_module, transformation, calls, per=per, rounds=rounds)
        return Answer(_data(found), lambda terminal: terminal.print(str(found)))

    answer(work, as_json=as_json)


def _data(measured: Benchmark) -> dict[str, Any]:
    return {
        "verdict": measured.verdict,
        "speedup": None if measured.doubt else asdict(measured.speedup),
        "doubt": measured.doubt,
        "noise": measured.noise,
        "original": _times_data(measured.original),
        "transformed": _times_data(measured.transformed),
        "contributions": [
            {"name": each.part.name, "verdict": each.effect.against(measured.noise), **asdict(each.effect)}
            for each in measured.contributions
        ],
    }


def _table_data(found: Comparison) -> dict[str, Any]:
    return {
        "best": None if found.best is None else found.best.name,
        "noise": found.noise,
        "doubt": found.doubt,
        "original": _times_data(found.original),
        "pipelines": [
            {name: getattr(each, name) for name in ("name", "problem", "exact", "sqnr_db")}
            | {"speedup": None if each.speedup is None or found.doubt else asdict(each.speedup)}
            for each in found.candidates
        ],
    }


def _times_data(times: Times) -> dict[str, float]:
    return {"median_seconds": times.median, "spread_seconds": times.spread, "rounds": len(times.seconds)}
