"""Finds a model on which a pass changes something, and runs it there."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt_capture import capture
from fxopt_core import PassInfo, faithful_copy, history
from fxopt_report import Picture, Report, picture, report
from site_pages.programs import Session, Subject, run, subjects
from site_pages.public_names import public_module


@dataclass(frozen=True)
class Shown:
    """A pass at work.

    Attributes:
        description: on which model, in words.
        program: the model, and the pass on it, as a reader can run them; each "" where that cannot be.
        printed: what it prints.
        before: the graph before.
        after: the graph after.
        picture: both, and what is different.
    """

    description: str
    program: tuple[str, str]
    printed: str
    before: GraphModule
    after: GraphModule
    picture: Picture

    def report(self, title: str) -> Report:
        """Return a page of both graphs to look around in."""
        return report(self.before, self.after, title=title)


def show(info: PassInfo, session: Session | None) -> Shown | None:
    """Return a pass at work on the model of the site with the most sites for it.

    Where it changes none of them, it is shown on what its docstring's example leaves, and else on the first model of
    the conformance kit's zoo that it changes.

    Returns:
        None where it changes no graph at all.
    """
    if info.family == "core":  # they copy and check
        return None
    found = [(subject, changed) for subject, captured in _captured() if (changed := _changed(info, captured))]
    if found:
        subject, changed = max(found, key=lambda each: _sites(each[1][1]))
        return _shown(subject, _program(info), changed)
    of_session = None if session is None else _in_session(info, session)
    return of_session or next(_in_zoo(info), None)


@functools.cache
def _captured() -> tuple[tuple[Subject, GraphModule], ...]:
    """Return the models of the site as graphs, each captured once."""
    found = []
    for subject in subjects():
        namespace, _ = run(subject.program)
        found.append((subject, capture(namespace["model"], namespace["inputs"])))
    return tuple(found)


def _sites(graph_module: GraphModule) -> int:
    """Return how many sites the last pass rewrote."""
    records = history(graph_module)
    return len(records[-1].rewrites) if records else 0


def _shown(subject: Subject, program: str, changed: tuple[GraphModule, GraphModule, Picture]) -> Shown:
    """Return a pass at work, with the program that lets it work, unless that fails."""
    programs = (subject.program, program)
    try:
        _, printed = run("\n".join(programs))
    except Exception:  # a class that cannot be imported, or a pass that does not keep what it says
        programs, printed = ("", ""), ""
    return Shown(subject.description, programs, printed, *changed)


def _changed(info: PassInfo, captured: GraphModule) -> tuple[GraphModule, GraphModule, Picture] | None:
    """Return a graph before and after a pass, and their picture; None where it changes nothing or fails."""
    try:
        after = info.create({})(faithful_copy(captured))
    except Exception:  # a pass that is not for this model
        return None
    drawn = picture(after, captured)
    return (captured, after, drawn) if _changes(drawn) else None


def _changes(drawn: Picture) -> bool:
    return any(drawn.status(name) != "kept" for name in drawn.order)


def _program(info: PassInfo) -> str:
    """Return a program that runs a pass on ``model`` and checks what it promises."""
    checks = ["history"] + ["undo"] * info.reversible + ["verify"] * info.preserves_computation
    lines = _lines(info, ["capture", *checks], "capture(model, inputs)")
    if info.preserves_computation:
        lines += ["assert verify(model, graph_module, inputs).passed"]
    if info.reversible:
        lines += ["undo(graph_module)", "assert list(graph_module.state_dict()) == list(model.state_dict())"]
    return "\n".join(lines)


def _lines(info: PassInfo, imported: list[str], graph_module: str) -> list[str]:
    cls = info.transformation
    return [
        f"from fxopt import {', '.join(imported)}",
        f"from {public_module(cls) or cls.__module__} import {cls.__name__}",
        "",
        f"graph_module = {cls.__name__}()({graph_module})",
        "for rewrite in history(graph_module)[-1].rewrites:",
        '    print(rewrite.site, "->", ", ".join(rewrite.modules_after or rewrite.after))',
    ]


def _in_session(info: PassInfo, session: Session) -> Shown | None:
    for value in session.namespace.values():
        if isinstance(value, GraphModule) and info.name in {record.pass_name for record in history(value)}:
            drawn = picture(value)
            if drawn.before is not None and _changes(drawn):
                return Shown("the model of the example below", ("", ""), "", value, value, drawn)
    return None


def _in_zoo(info: PassInfo) -> Iterator[Shown]:
    from fxopt_testing import zoo

    for case in zoo():
        if case.dtype is not torch.float32 or case.device != "cpu" or case.training:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            graph_module = case.capture().graph_module
        changed = _changed(info, graph_module)
        if changed is not None:
            model = f"from fxopt_testing import model_case\n\ncaptured = model_case({case.id!r}).capture()"
            subject = Subject(f"`{case.name}`, a model of the conformance kit's zoo", model)
            yield _shown(subject, "\n".join(_lines(info, ["history"], "captured.graph_module")), changed)


def size_of(module: nn.Module) -> tuple[int, int]:
    """Return how many modules with tensors of their own there are, and how many numbers these hold."""
    modules = [each for each in module.modules() if list(each.parameters(recurse=False))]
    return len(modules), sum(each.numel() for each in module.parameters())
