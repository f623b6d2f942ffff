"""What `fxopt optimize` does: read, capture, transform, verify, save; then measure and report."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from fxopt.commands.data import operations_of, report_data, size_data
from fxopt.commands.failures import CommandError, ExitCode, FileError, blaming
from fxopt.commands.models.files import opened
from fxopt.commands.models.inputs import prepared
from fxopt.commands.models.sources import Source
from fxopt.commands.models.wanted import Wanted
from fxopt.commands.outputs import write_folder, write_graph
from fxopt.commands.parameters import Job
from fxopt.commands.terminal import Steps
from fxopt_capture.huggingface.clients import dtype_of
from fxopt_core import Demands, History, VerificationError, compose, history, registry
from fxopt_tools import Inputs, VerificationReport, verify
from fxopt_tools.bench import Sampler
from fxopt_tools.speed import doubt

_ROUNDS = 30


def optimized(
    step: Steps, job: Job, path: Path, page: Path | None
) -> tuple[dict[str, Any], History, VerificationReport | None]:
    """Optimize a model and save it; measure and report after that, so that what fails there costs no result.

    Args:
        step: announces steps.
        job: the options of the command.
        path: where to save the archive.
        page: where to save the report; None for no report.

    Returns:
        What was done, for scripts, with what failed after saving under "problem"; the records; and the verification.

    Raises:
        CommandError: Anything that goes wrong before the archive is saved; then nothing is saved.
    """
    source, graph_module, transformation, calls = prepared(step, job)
    before, known = size_data(graph_module), len(history(graph_module))
    kinds = operations_of(graph_module)
    drawn = None
    if page is not None and not known:  # the ledger knows the graph before the passes of earlier commands
        from fxopt_report import DrawnGraph

        drawn = DrawnGraph.of(graph_module)
    step("running passes")
    noting = transformation if source.note is None else compose(source.note, transformation)
    with blaming(ExitCode.PASS):
        graph_module = noting(graph_module)
    records = History(history(graph_module)[known:])
    with blaming(ExitCode.DEMAND):
        Demands(expect=job.expect, strict=job.strict).check(transformation.name, records)
    step("verifying")
    is_archive = path.suffix == ".fxopt"
    verification = _verified(source, graph_module, calls, job) if job.verify and is_archive else None

    def check(folder: Path) -> None:
        """Verify a folder as its user opens and calls it."""
        nonlocal verification
        if job.verify:
            try:
                found, own = opened(folder, taker=source.model)
                if source.calls and not own:
                    raise FileError(f"the tokenizer or processor in {folder} cannot be loaded")
            except FileError as error:
                reason = str(error).replace(str(folder), str(path))
                hint = "save model and tokenizer with their save_pretrained, and start from that folder"
                raise FileError(f"{path} was not written, because it would be unusable: {reason}; {hint}") from error
            wanted = replace(Wanted.read(None, job.device, {}), dtype=dtype_of(source.model))
            own = [] if job.inputs else [wanted.moved(call) for call in own]
            verification = _verified(source, found, own or calls, job)

    if not is_archive:
        size = write_folder(graph_module, path, source=job.source, check=check)
    step("saving")
    if is_archive:
        size = write_graph(graph_module, path)
    after = operations_of(graph_module)
    data: dict[str, Any] = {
        "source": job.source,
        "pipeline": registry().pipeline_text(transformation),
        "passes": json.loads(records.to_json())["passes"],
        "before": before,
        "after": size_data(graph_module),
        "operations": sorted(
            ((kind, kinds[kind], after[kind]) for kind in {**kinds, **after}), key=lambda row: -abs(row[2] - row[1])
        ),
        "times": None,
        "doubt": None,
        "verification": None if verification is None else report_data(verification),
        "output": str(path),
        "bytes": size,
        "report": None,
        "problem": None,
    }
    doing = "measuring"
    try:
        if job.times:
            step(doing)
            found = Sampler(calls[0], rounds=_ROUNDS).measure(source.model, graph_module)
            data["times"] = dict(zip(("original", "transformed"), (each.seconds for each in found), strict=True))
            data["doubt"] = doubt(found)
        doing = "the report"
        if page is not None:
            step("drawing")
            from fxopt_report import report

            made = report(
                source.model,
                graph_module,
                title=f"{source.text} after fxopt",
                verification=verification,
                before=drawn,
                speed=data["times"],
            )
            made.save(page, force=True)
            data["report"] = str(page)
    except Exception as error:  # whatever it is, the archive is there
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        data["problem"] = f"{path} is saved, but {doing} failed: {reason}"
    return data, records, verification


def _verified(source: Source, found: nn.Module, calls: list[Inputs], job: Job) -> VerificationReport:
    with blaming(ExitCode.FILE):
        report = verify(source.model, found, calls, **job.bounds)
    try:
        report.raise_if_failed()
    except VerificationError as error:
        bisecting = shlex.join(["fxopt", "bisect", job.source, *(["-p", job.pipeline] if job.pipeline else [])])
        hint = f"to find the rewrite that caused it: {bisecting}, with the same inputs, seed and tolerances"
        raise CommandError(f"{error}\n{hint}", ExitCode.DIFFERS, kind=type(error).__name__) from error
    return report
