"""`fxopt optimize SOURCE -p PIPELINE -o OUT`: read, capture, transform, verify, save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fxopt.commands.answering import Answer, answer
from fxopt.commands.jobs import Job
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
from fxopt.commands.terminal import Terminal

if TYPE_CHECKING:
    from fxopt.commands.optimization import Optimized

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
ReportOption = Annotated[
    str | None, typer.Option("--report", metavar="FILE", help="Write a report too: an .html file that opens from disk.")
]
ReproducersOption = Annotated[
    str | None,
    typer.Option(
        "--reproducers",
        metavar="FOLDER",
        help="Where to write a file with which `fxopt reproduce` lets a pass fail again; OUT.reproducers otherwise.",
    ),
]
_STEPS = {
    "loading torch": 3.0,
    "reading": 4.0,
    "capturing": 6.0,
    "running passes": 0.5,
    "verifying": 1.0,
    "drawing": 2.0,
    "saving": 8.0,
}


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
    report: ReportOption = None,
    reproducers: ReproducersOption = None,
    force: ForceOption = False,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run a pipeline on a model, check that it computes the same, and save it as an archive.

    No archive is written where a pass fails, a demand is not met, or the numbers differ.
    """
    job = Job(
        source=source,
        pipeline=pipeline,
        output=output,
        inputs=inputs,
        seed=seed,
        verify=verify,
        strict=strict,
        expect=expect,
        rtol=rtol,
        atol=atol,
        history=history,
        report=report,
        reproducers=reproducers,
        force=force,
        run_pickled_code=run_pickled_code,
    )
    answer(lambda terminal: _work(terminal, job), as_json=as_json)


def _work(terminal: Terminal, job: Job) -> Answer:
    from fxopt.commands.outputs import check_output

    path = check_output(job.output, force=job.force)
    page = None if job.report is None else check_output(job.report, force=job.force, suffix=".html")
    with terminal.steps({name: seconds for name, seconds in _STEPS.items() if page or name != "drawing"}) as step:
        step("loading torch")
        from fxopt.commands.optimization import optimized
        from fxopt_core import registry

        done = optimized(step, job, registry().pipeline(job.pipeline), path, page)
    return Answer(done.data, lambda terminal: _show(terminal, done))


def _show(terminal: Terminal, done: Optimized) -> None:
    from fxopt.commands.outputs import size_text

    terminal.print(str(done.records))
    terminal.print()
    terminal.print("not verified" if done.verification is None else str(done.verification))
    terminal.print()
    data = done.data
    rewritten = sum(len(record["rewritten"]) for record in data["passes"])
    if not rewritten:
        terminal.print("no site was rewritten", style="yellow")
    counts = f"{data['before']['nodes']} -> {data['after']['nodes']} nodes"
    terminal.print(f"{data['output']} ({size_text(data['bytes'])}): {counts}, {rewritten} sites rewritten")
    if data["report"] is not None:
        terminal.print(f"{data['report']}: the report, for a browser")
