"""The stack traces of nodes: which line of the model a node comes from."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache

_FRAME = re.compile(r'^\s*File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>.+)$')
_PACKAGES = re.compile(r"^.*[/\\](?:site|dist)-packages[/\\]")
_OWN_PACKAGE = re.compile(r"[/\\](?:site|dist)-packages[/\\](?:torch|fxopt(?:_[a-z]+)?)[/\\]")
_OWN = re.compile(r"torch|fxopt(_[a-z]+)?")


@dataclass(frozen=True)
class Frame:
    """A line of source in a stack trace.

    Attributes:
        file: the path below site-packages or the working directory, without anything of a home directory.
        line: number of the line.
        function: the function around it.
        code: the line itself, as the trace has it; "" where it has none.
        internal: whether it belongs to torch or fxopt rather than to a model.
    """

    file: str
    line: int
    function: str
    code: str = ""
    internal: bool = False

    @property
    def place(self) -> str:
        """File and line."""
        return f"{self.file}:{self.line}"

    def __str__(self) -> str:
        """Return place and code in a line."""
        return f"{self.place}: {self.code}" if self.code else self.place


@lru_cache(maxsize=4096)
def frames_of(trace: str) -> tuple[Frame, ...]:
    r"""Return the frames of a stack trace, outermost first.

    >>> frames_of('File "model.py", line 3, in forward\n    return self.q(x)')
    (Frame(file='model.py', line=3, function='forward', code='return self.q(x)', internal=False),)
    """
    return tuple(_frames(trace.splitlines()))


def model_frame(trace: str | None) -> Frame | None:
    """Return the innermost frame of a trace that is the model's own; None where there is none."""
    own = (frame for frame in reversed(frames_of(trace or "")) if not frame.internal)
    return next(own, None)


def _frames(lines: list[str]) -> Iterator[Frame]:
    for place, line in enumerate(lines):
        found = _FRAME.match(line)
        if found is None:
            continue
        following = lines[place + 1].strip() if place + 1 < len(lines) else ""
        code = "" if _FRAME.match(following) else following
        file = found["file"]
        internal = file.startswith((*_own_folders(), "torch/", "<")) or _OWN_PACKAGE.search(file) is not None
        yield Frame(_short(file), int(found["line"]), found["function"].strip(), code, internal)


@cache
def _own_folders() -> tuple[str, ...]:
    """Return the folders of torch and fxopt, as far as they are imported."""
    places = [
        place
        for name, module in [*sys.modules.items()]
        if _OWN.fullmatch(name)
        for place in getattr(module, "__path__", ())
    ]
    return tuple(os.path.join(place, "") for place in places)


def _short(file: str) -> str:
    inside = _PACKAGES.sub("", file)
    if inside != file or not os.path.isabs(file):
        return inside
    here = os.path.join(os.getcwd(), "")
    if file.startswith(here):
        return file[len(here) :]
    return "/".join(re.split(r"[/\\]", file)[-2:])
