"""`fxopt optimize SOURCE -p PIPELINE -o OUT`: read, capture, transform, verify, save."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer
from rich import filesize

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import check_dynamic, check_pipeline, check_sources
from fxopt.commands.failures import ExitCode
from fxopt.commands.parameters import (
    AtolOption,
    DeviceOption,
    DtypeOption,
    DynamicOption,
    ForceOption,
    InputsOption,
    Job,
    JsonOption,
    PickleOption,
    PipelineOption,
    RtolOption,
    SeedOption,
    SourceArgument,
    SqnrOption,
)
from fxopt.commands.show_history import VerboseOption, history_text
from fxopt.commands.terminal import Terminal

OutOption = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        metavar="OUT",
        help="The .fxopt archive to write; or, for a folder in Hugging Face format, a folder: the archive as "
        "model.fxopt beside the configuration and the tokenizer.",
    ),
]
StrictOption = Annotated[bool, typer.Option("--strict", help="Fail if a pass leaves a site alone.")]
ExpectOption = Annotated[
    int | None, typer.Option("--expect", min=0, metavar="N", help="Fail unless exactly N sites are rewritten.")
]
VerifyOption = Annotated[
    bool, typer.Option("--verify/--no-verify", help="Whether to compare the result with SOURCE before it is saved.")
]
ReportOption = Annotated[
    str | None,
    typer.Option("--report", metavar="FILE", help="Also write a report: an .html file for a browser."),
]
TimesOption = Annotated[
    bool,
    typer.Option(
        "--times",
        help="Also measure calls of SOURCE and of the result on the first inputs, taking turns, for the answer and the "
        "report.",
    ),
]
QuietOption = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")]


def optimize(
    source: SourceArgument,
    output: OutOption,
    pipeline: PipelineOption = None,
    inputs: InputsOption = None,
    seed: SeedOption = 0,
    verify: VerifyOption = True,
    strict: StrictOption = False,
    expect: ExpectOption = None,
    rtol: RtolOption = None,
    atol: AtolOption = None,
    sqnr: SqnrOption = None,
    dtype: DtypeOption = None,
    device: DeviceOption = None,
    dynamic: DynamicOption = None,
    report: ReportOption = None,
    times: TimesOption = False,
    force: ForceOption = False,
    run_pickled_code: PickleOption = False,
    verbose: VerboseOption = False,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Optimize a model, verify the result, and save it.

    No archive is written if a pass fails, a demand is not met, or the numbers differ. A report that cannot be written
    costs no archive.
    """

    def work(terminal: Terminal) -> Answer:
        check_pipeline(pipeline)
        varying = check_dynamic(dynamic or ())
        check_sources(source, inputs=inputs)
        from fxopt.commands.outputs import check_output, check_output_folder, check_reports, is_folder_name

        check = partial(check_output_folder, source=source) if is_folder_name(output) else check_output
        path = check(output, force=force)
        page = None
        if report is not None:
            check_reports()
            page = check_output(report, force=force, suffix=".html")
        job = Job(
            source=source,
            pipeline=pipeline,
            inputs=inputs,
            seed=seed,
            verify=verify,
            strict=strict,
            expect=expect,
            bounds={"rtol": rtol, "atol": atol, "sqnr": sqnr},
            run_pickled_code=run_pickled_code,
            dtype=dtype,
            device=device,
            dynamic=varying,
            times=times,
        )
        with terminal.steps(6 + (page is not None) + times, hidden=quiet) as step:
            from fxopt.commands.optimized import optimized

            data, records, verification = optimized(step, job, path, page)
        if data["problem"] is not None:
            terminal.error(data["problem"])
        code = ExitCode.DONE if data["problem"] is None else ExitCode.REPORT

        def show(terminal: Terminal) -> None:
            if not quiet:
                terminal.raw(history_text(records, verbose))
                terminal.print(f"\n{verification or 'not verified'}\n")
                _show(terminal, data)

        return Answer(data, show, code)

    answer(work, as_json=as_json)


def _show(terminal: Terminal, data: dict[str, Any]) -> None:
    from fxopt_tools.size import operations_text
    from fxopt_tools.verification.report import counted

    rewritten = sum(len(record["rewritten"]) for record in data["passes"])
    if not rewritten:
        terminal.print("no site was rewritten", style="yellow")
    nodes = f"{data['before']['nodes']} -> {data['after']['nodes']} nodes"
    terminal.print(
        f"{data['output']} ({filesize.decimal(data['bytes'])}): {counted(rewritten, 'site')} rewritten, {nodes}"
    )
    terminal.print(f"operations: {operations_text(data['operations'])}")
    if data["times"] is not None:
        from fxopt_tools.bench import no_ratio
        from fxopt_tools.speed import Times

        before, after = (Times(tuple(seconds)) for seconds in data["times"].values())
        ratio = f"{before.median / after.median:.2f} times as fast"
        ratio = no_ratio(data["doubt"]) if data["doubt"] else ratio
        terminal.print(f"calls of SOURCE: {before}; of the result: {after}; {ratio}")
    if data["report"] is not None:
        terminal.print(f"{data['report']}: the report, to open in a browser")
