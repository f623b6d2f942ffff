"""A rewrite step: one site of one pass, or one pass that has no sites."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import Node

from fxopt_core import PassRun

_FRAME = re.compile(r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in [^\n]*(?:\n[ \t]+(?P<code>[^\n]+))?')
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class RewriteStep:
    """What a pass does at one site, or as a whole where it is no site pass.

    Attributes:
        number: its place among all steps of a run, counted from 1; None where that is not known.
        pass_name: the pass.
        index: position of the pass in the composition, or None outside one.
        site: readable name of the site; None for a pass as a whole.
        nodes: names of the nodes of the site.
        sources: lines of the model's source where these nodes come from, as ``"file:line: code"``.
    """

    number: int | None
    pass_name: str
    index: int | None = None
    site: str | None = None
    nodes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @classmethod
    def of(cls, number: int | None, run: PassRun, site: str | None = None, nodes: Iterable[Node] = ()) -> RewriteStep:
        """Return the step that a run is about to take."""
        nodes = tuple(nodes)
        return cls(number, run.name, run.index, site, tuple(node.name for node in nodes), source_lines(nodes))

    @property
    def place(self) -> tuple[str, int | None, str | None]:
        """What tells it from other steps, whichever of them are taken: pass, position of the pass, and site."""
        return self.pass_name, self.index, self.site

    def __str__(self) -> str:
        """Return pass and site, as ``pass (3) merge-linears on q + k``."""
        number = "" if self.number is None else f"({self.number}) "
        return f"pass {number}{self.pass_name}{f' on {self.site}' if self.site is not None else ''}"


def source_lines(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Return the lines of source that nodes come from, each once: for each node the innermost one outside of torch.

    Only graphs that were captured with stack traces know them: those of ``torch.export``, and of tracers that are told
    to record them.

    >>> graph = torch.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["stack_trace"] = 'File "model.py", line 3, in forward\\n    return self.q(x)'
    >>> source_lines([x, x])
    ('model.py:3: return self.q(x)',)
    """
    found = (_source_line(str(node.meta.get("stack_trace") or "")) for node in nodes)
    return tuple(dict.fromkeys(line for line in found if line is not None))


def _source_line(trace: str) -> str | None:
    frames = [match for match in _FRAME.finditer(trace) if not match["file"].startswith(_TORCH)]
    if not frames:
        return None
    last = frames[-1]
    return f"{last['file']}:{last['line']}{': ' + last['code'].strip() if last['code'] else ''}"
