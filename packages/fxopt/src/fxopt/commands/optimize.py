"""`fxopt optimize SOURCE -p PIPELINE -o OUT`: read, capture, transform, verify, save."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer
from rich import filesize

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import check_dynamic, check_sources
from fxopt.commands.parameters import (
    AtolOption,
    DynamicOption,
    ForceOption,
    InputsOption,
    Job,
    JsonOption,
    PickleOption,
    PipelineOption,
    RtolOption,
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
    str | None, typer.Option("--report", metavar="FILE", help="Also write a report: an .html file for a browser.")
]


def optimize(
    source: SourceArgument,
    output: OutOption,
    pipeline: PipelineOption = None,
    inputs: InputsOption = None,
    verify: VerifyOption = True,
    strict: StrictOption = False,
    expect: ExpectOption = None,
    rtol: RtolOption = None,
    atol: AtolOption = None,
    sqnr: SqnrOption = None,
    dynamic: DynamicOption = None,
    report: ReportOption = None,
    force: ForceOption = False,
    run_pickled_code: PickleOption = False,
    verbose: VerboseOption = False,
    as_json: JsonOption = False,
) -> None:
    """Optimize a model, verify the result, and save it.

    No archive is written if a pass fails, a demand is not met, or the numbers differ. A report that cannot be written
    costs no archive.
    """

    def work(terminal: Terminal) -> Answer:
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
            verify=verify,
            strict=strict,
            expect=expect,
            bounds={"rtol": rtol, "atol": atol, "sqnr": sqnr},
            run_pickled_code=run_pickled_code,
            dynamic=varying,
        )
        with terminal.steps() as step:
            from fxopt.commands.optimized import optimized

            data, records, verification = optimized(step, job, path, page)

        def show(terminal: Terminal) -> None:
            terminal.raw(history_text(records, verbose))
            terminal.print(f"\n{verification or 'not verified'}\n")
            _show(terminal, data)

        return Answer(data, show)

    answer(work, as_json=as_json)


def _show(terminal: Terminal, data: dict[str, Any]) -> None:
    from fxopt_tools.size import operations_text
    from fxopt_tools.verification.report import counted

    rewritten = sum(len(record["rewritten"]) for record in data["passes"])
    nodes = f"{data['before']['nodes']} -> {data['after']['nodes']} nodes"
    terminal.print(
        f"{data['output']} ({filesize.decimal(data['bytes'])}): {counted(rewritten, 'site')} rewritten, {nodes}"
    )
    terminal.print(f"operations: {operations_text(data['operations'])}")
    if data["report"] is not None:
        terminal.print(f"{data['report']}: the report, to open in a browser")
