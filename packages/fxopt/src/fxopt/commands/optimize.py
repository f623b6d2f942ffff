"""`fxopt optimize SOURCE -p PIPELINE -o OUT`: read, capture, transform, verify, save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxopt.commands.answering import Answer, answer
from fxopt.commands.exit_codes import ExitCode
from fxopt.commands.failures import blaming
from fxopt.commands.parameters import (
    AtolOption,
    ForceOption,
    InputsOption,
    JsonOption,
    OutputOption,
    PickleOption,
    PipelineOption,
    RtolOption,
    SeedOption,
    SourceArgument,
)
from fxopt.commands.progress import Announce
from fxopt.commands.terminal import Terminal

if TYPE_CHECKING:
    from torch import nn
    from torch.fx import GraphModule

    from fxopt_core import History, Transformation
    from fxopt_tools import Inputs, VerificationReport

StrictOption = Annotated[bool, typer.Option("--strict", help="Fail where a pass leaves a site alone.")]
ExpectOption = Annotated[
    int | None, typer.Option("--expect", min=0, metavar="N", help="Fail unless exactly N sites are rewritten.")
]
VerifyOption = Annotated[
    bool, typer.Option("--verify/--no-verify", help="Whether to compare the result with SOURCE before it is saved.")
]
HistoryOption = Annotated[
    bool,
    typer.Option("--history/--no-history", help="Whether to save the history too. Without it, nothing can be undone."),
]
_STEPS = {
    "loading torch": 3.0,
    "reading": 4.0,
    "capturing": 6.0,
    "running passes": 0.5,
    "verifying": 1.0,
    "saving": 8.0,
}


@dataclass(frozen=True)
class _Job:
    """What the command line asks for."""

    source: str
    pipeline: str
    output: str
    inputs: str | None
    seed: int
    verify: bool
    strict: bool
    expect: int | None
    rtol: float | None
    atol: float | None
    history: bool
    force: bool
    run_pickled_code: bool


def optimize(
    source: SourceArgument,
    output: OutputOption,
    pipeline: PipelineOption = "inference",
    inputs: InputsOption = None,
    seed: SeedOption = 0,
    verify: VerifyOption = True,
    strict: StrictOption = False,
    expect: ExpectOption = None,
    rtol: RtolOption = None,
    atol: AtolOption = None,
    history: HistoryOption = True,
    force: ForceOption = False,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a pipeline on a model, check that it computes the same, and save it as an archive.

    Nothing is written where a pass fails, a demand is not met, or the numbers differ.
    """
    job = _Job(
        source, pipeline, output, inputs, seed, verify, strict, expect, rtol, atol, history, force, run_pickled_code
    )
    answer(lambda terminal: _work(terminal, job), as_json=as_json)


def _work(terminal: Terminal, job: _Job) -> Answer:
    from fxopt.commands.outputs import check_output

    path = check_output(job.output, force=job.force)
    with terminal.steps(_STEPS) as step:
        step("loading torch")
        from fxopt_core import registry

        transformation = registry().pipeline(job.pipeline)
        return _optimized(step, job, transformation, path)


def _optimized(step: Announce, job: _Job, transformation: Transformation, path: Path) -> Answer:
    from fxopt.commands.graph_data import passes_data, report_data, size_data
    from fxopt.commands.model_inputs import inputs_for
    from fxopt.commands.saving import write_graph
    from fxopt.commands.sources import graph_of, read_source
    from fxopt_core import History, history

    step("reading")
    source = read_source(job.source, run_pickled_code=job.run_pickled_code)
    calls = inputs_for(source, job.inputs, job.seed, run_pickled_code=job.run_pickled_code)
    step("capturing")
    graph_module = graph_of(source, calls[0])
    before, known = size_data(graph_module), len(history(graph_module))
    step("running passes")
    graph_module = _transformed(graph_module, transformation, job, known)
    step("verifying")
    report = _verified(source.model, graph_module, calls, job) if job.verify else None
    step("saving")
    data = {
        "source": job.source,
        "pipeline": _pipeline_text(transformation, job.pipeline),
        "passes": passes_data(graph_module, known),
        "before": before,
        "after": size_data(graph_module),
        "verification": None if report is None else report_data(report),
        "output": str(path),
        "bytes": write_graph(graph_module, path, calls[0], keep_history=job.history),
    }
    records = History(history(graph_module)[known:])
    return Answer(data, lambda terminal: _show(terminal, data, records, report))


def _transformed(graph_module: GraphModule, transformation: Transformation, job: _Job, known: int) -> GraphModule:
    """Run the passes; that a demand is not met is told apart from a pass that fails."""
    from fxopt_core import history
    from fxopt_core.execution import Demands

    with blaming(ExitCode.PASS):
        transformed = transformation(graph_module)
    with blaming(ExitCode.DEMAND):
        Demands(expect=job.expect, strict=job.strict).check(transformation, history(transformed)[known:])
    return transformed


def _verified(model: nn.Module, graph_module: GraphModule, calls: list[Inputs], job: _Job) -> VerificationReport:
    from fxopt_tools import verify

    with blaming(ExitCode.FILE):
        report = verify(model, graph_module, calls, rtol=job.rtol, atol=job.atol)
        report.raise_if_failed()
    return report


def _pipeline_text(transformation: Transformation, given: str) -> str:
    from fxopt_core import PassOptionError, registry

    try:
        return registry().pipeline_text(transformation)
    except PassOptionError:  # an option whose value text cannot express
        return given


def _show(terminal: Terminal, data: dict[str, Any], records: History, report: VerificationReport | None) -> None:
    from fxopt.commands.outputs import size_text

    terminal.print(str(records))
    terminal.print()
    terminal.print("not verified" if report is None else str(report))
    terminal.print()
    rewritten = sum(len(record["rewritten"]) for record in data["passes"])
    if not rewritten:
        terminal.print("no site was rewritten", style="yellow")
    counts = f"{data['before']['nodes']} -> {data['after']['nodes']} nodes"
    terminal.print(f"{data['output']} ({size_text(data['bytes'])}): {counts}, {rewritten} sites rewritten")
