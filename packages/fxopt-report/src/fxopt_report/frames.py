"""The line of a model's source that a node comes from."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache

from fxopt_tools.rewrite_steps import own_frame

_PACKAGES = re.compile(r"^.*[/\\](?:site|dist)-packages[/\\]")


@dataclass(frozen=True)
class Frame:
    """A line of source in a stack trace.

    Attributes:
        place: the line's number after the path of its file, which begins below site-packages or the working directory,
            and names nothing of a home directory.
        function: the function around it.
        code: the line itself, as the trace has it; "" where it has none.
    """

    place: str
    function: str
    code: str = ""


@lru_cache(maxsize=4096)
def model_frame(trace: str) -> Frame | None:
    r"""Return the innermost frame of a stack trace that is not torch's own; None where there is none.

    >>> model_frame('File "model.py", line 3, in forward\n    return self.q(x)')
    Frame(place='model.py:3', function='forward', code='return self.q(x)')
    """
    found = own_frame(trace)
    if found is None:
        return None
    file, line, function, code = found.group("file", "line", "function", "code")
    return Frame(f"{_short(file)}:{line}", function.strip(), (code or "").strip())


def _short(file: str) -> str:
    inside = _PACKAGES.sub("", file)
    if inside != file or not os.path.isabs(file):
        return inside
    # Of other paths only the end: reports are passed on, and should not name the author's folders.
    here = os.path.join(os.getcwd(), "")
    return file.removeprefix(here) if file.startswith(here) else "/".join(re.split(r"[/\\]", file)[-2:])
