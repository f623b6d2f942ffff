"""`report`: what passes did to a model, as an HTML page in one file."""

from __future__ import annotations

import html
import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from os import PathLike
from pathlib import Path

from torch import nn
from torch.fx import GraphModule

from fxopt_core import PreconditionError, ledger_of, registry
from fxopt_report.comparison import kinds_text
from fxopt_report.drawn import DrawnGraph
from fxopt_report.page import Contents, page
from fxopt_report.pictures import Picture, picture
from fxopt_tools import Size, VerificationReport
from fxopt_tools.verification.report import counted

_FRAME_HEIGHT = 760


class Report:
    """A report on what passes did: a page, and the picture that it shows.

    ``print`` shows a summary; a notebook shows the page.

    Attributes:
        contents: everything that it shows.
    """

    def __init__(self, contents: Contents) -> None:
        """Hold what the report shows."""
        self.contents = contents

    @property
    def picture(self) -> Picture:
        """The graphs before and after."""
        return self.contents.picture

    @cached_property
    def html(self) -> str:
        """The page: one file that loads nothing; only its picture needs scripts."""
        registry().available()  # imports the passes, which declare what their reasons mean
        return page(self.contents)

    def save(self, path: str | PathLike[str], *, force: bool = False) -> Path:
        """Write the page to a file, all of it or nothing.

        Args:
            path: where to write it.
            force: whether to replace a file that exists.

        Returns:
            The path.

        Raises:
            PreconditionError: The file exists, or the folder does not.
        """
        target = Path(path)
        if target.is_dir() or (target.exists() and not force):
            raise PreconditionError(f"{target} exists, expected a new file: give another path, or force=True")
        if not target.parent.is_dir():
            raise PreconditionError(f"there is no folder {target.parent} to write {target.name} into: make it first")
        beside = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            beside.write_text(self.html, encoding="utf-8", newline="\n")
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
        return target

    def __str__(self) -> str:
        """Return a summary in a few lines."""
        seen, contents = self.picture, self.contents
        lines = [f"{contents.title}: {counted(len(seen.rewritten), 'site')} rewritten, {len(seen.refused)} refused"]
        before = "?" if seen.before is None else str(len(seen.before.nodes))
        lines.append(f"operations: {kinds_text(seen.kinds)}; nodes: {before} -> {len(seen.after.nodes)}")
        if contents.verification is not None:
            lines.append(str(contents.verification).partition("\n")[0])
        return "\n".join([*lines, *(f"note: {note}" for note in seen.notes)])

    def __repr__(self) -> str:
        """Return the title and what it is a report on."""
        return f"<report {self.contents.title!r} on {self.picture!r}>"

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a frame of its own that isolates its styles and scripts."""
        return (
            f'<iframe sandbox="allow-scripts allow-downloads" title="{html.escape(self.contents.title)}" width="100%" '
            f'height="{_FRAME_HEIGHT}" style="border:1px solid #8885;border-radius:6px" '
            f'srcdoc="{html.escape(self.html)}"></iframe>'
        )


def report(
    original: nn.Module | None,
    transformed: GraphModule,
    *,
    title: str | None = None,
    verification: VerificationReport | None = None,
    speed: Mapping[str, Sequence[float]] | None = None,
    before: DrawnGraph | None = None,
) -> Report:
    """Report what passes did to a model: graphs before and after, rewrites, refusals, numbers, time and memory.

    Nothing is run and nothing is changed.

    Args:
        original: the module before the passes, or None. If it is a graph module, its graph is the graph before;
            otherwise that is read from the ledger, as far as the ledger knows it.
        transformed: the graph module that the passes ran on.
        title: the heading; by default that of the original's class, or of the transformed module.
        verification: what `verify` returned.
        before: the graph before, kept by `DrawnGraph.of`, where passes change it in place; it holds no tensors.
        speed: seconds of calls, by what was called: ``{"original": [...], "transformed": [...]}``, original first.

    Raises:
        PreconditionError: ``transformed`` is not a graph module, or nothing was measured under a name of ``speed``.
        FxoptError: A newer version of fxopt wrote the ledger.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile
    >>> graph_module = LintAndRecompile()(torch.fx.symbolic_trace(torch.nn.ReLU()))
    >>> print(report(None, graph_module, title="A model"))
    A model: 0 sites rewritten, 0 refused
    operations: unchanged; nodes: 3 -> 3
    """
    if isinstance(original, GraphModule) and original is transformed:
        original = None  # it was edited in place
    for name, seconds in (speed or {}).items():
        if not len(seconds):
            raise PreconditionError(f"speed[{name!r}] is empty, expected the seconds of at least one call")
    seen = picture(transformed, original if before is None else before)
    contents = Contents(
        title=f"{type(transformed if original is None else original).__name__} after fxopt" if title is None else title,
        picture=seen,
        records=ledger_of(transformed).records,
        after=Size.of(transformed),
        before=_size_before(original, seen),
        verification=verification,
        speed={name: tuple(map(float, seconds)) for name, seconds in (speed or {}).items()},
    )
    return Report(contents)


def _size_before(original: nn.Module | None, seen: Picture) -> Size | None:
    if isinstance(original, GraphModule):
        return Size.of(original)
    if original is None or seen.before is None:
        return None
    parameters = list(original.parameters())
    modules = sum(1 for _ in original.modules()) - 1
    size = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return Size(len(seen.before.nodes), modules, len(parameters), size)
