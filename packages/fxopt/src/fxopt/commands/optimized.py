"""What `fxopt optimize` does: read, capture, transform, verify, save; then report."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

from torch import nn

from fxopt.commands.data import operations_of, report_data, size_data
from fxopt.commands.failures import CommandError, ExitCode, FileError, blaming
from fxopt.commands.models.files import opened
from fxopt.commands.models.inputs import prepared
from fxopt.commands.models.sources import Source
from fxopt.commands.outputs import write_folder, write_graph
from fxopt.commands.parameters import Job
from fxopt.commands.terminal import Step
from fxopt_core import Demands, History, VerificationError, compose, history, registry
from fxopt_tools import Inputs, VerificationReport, verify


def optimized(
    step: Step, job: Job, path: Path, page: Path | None
) -> tuple[dict[str, Any], History, VerificationReport | None]:
    """Optimize a model and save it; report after that, so that what fails there costs no result.

    Args:
        step: announces steps.
        job: the options of the command.
        path: where to save the archive.
        page: where to save the report; None for no report.

    Returns:
        What was done, for scripts; the records; and the verification.

    Raises:
        CommandError: Anything that goes wrong; nothing is saved then, unless it is the report that failed.
    """
    source, graph_module, transformation, calls = prepared(step, job)
    before, known = size_data(graph_module), len(history(graph_module))
    kinds = operations_of(graph_module)
    step("running passes")
    with blaming(ExitCode.PASS):
        graph_module = (transformation if source.note is None else compose(source.note, transformation))(graph_module)
    # An archive brings along the records of earlier runs.
    records = History(history(graph_module)[known:])
    with blaming(ExitCode.DEMAND):
        Demands(expect=job.expect, strict=job.strict).check(transformation.name, records)
    verification = None

    def check(folder: Path) -> None:
        """Verify a folder as its user opens and calls it."""
        nonlocal verification
        if not job.verify:
            return
        try:
            found, own = opened(folder, source.model)
            if source.calls and not own:
                raise FileError(f"the tokenizer or processor in {folder} cannot be loaded")
        except FileError as error:
            # The folder still has a temporary name, which means nothing to the user.
            reason = str(error).replace(str(folder), str(path))
            hint = "save model and tokenizer with their save_pretrained, and start from that folder"
            raise FileError(f"{path} was not written, because it would be unusable: {reason}; {hint}") from error
        # Without a file of inputs, those that the new folder's own tokenizer prepares, as for its later users.
        verification = _verified(source, found, calls if job.inputs else own or calls, job)

    step("verifying")
    if path.suffix != ".fxopt":
        size = write_folder(graph_module, path, source=job.source, check=check)
    else:
        verification = _verified(source, graph_module, calls, job) if job.verify else None
        step("saving")
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
        "verification": None if verification is None else report_data(verification),
        "output": str(path),
        "bytes": size,
        "report": None,
    }
    if page is not None:
        step("drawing")
        try:
            from fxopt_report import report

            title = f"{source.text} after fxopt"
            report(source.model, graph_module, title=title, verification=verification).save(page, force=True)
        except Exception as error:  # whatever it is, the archive is there
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise CommandError(f"{path} is saved, but the report failed: {reason}", ExitCode.REPORT) from error
        data["report"] = str(page)
    return data, records, verification


def _verified(source: Source, found: nn.Module, calls: list[Inputs], job: Job) -> VerificationReport:
    with blaming(ExitCode.FILE):
        report = verify(source.model, found, calls, **job.bounds)
    try:
        report.raise_if_failed()
    except VerificationError as error:
        bisecting = shlex.join(["fxopt", "bisect", job.source, *(["-p", job.pipeline] if job.pipeline else [])])
        hint = f"to find the rewrite that caused it: {bisecting}, with the same inputs and tolerances"
        raise CommandError(f"{error}\n{hint}", ExitCode.DIFFERS, kind=type(error).__name__) from error
    return report
