"""What the docstring of a pass says, in parts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from textwrap import dedent

_SECTION = re.compile(r"(Args|Attributes|Cost|Examples?|Raises|Returns|Source|Yields):")
_PARAMETER = re.compile(r" {4}\*{0,2}(\w+)(?: \([^)]*\))?: (.*)")


@dataclass(frozen=True)
class Documented:
    """The parts of a docstring.

    Attributes:
        summary: its first line.
        body: the paragraphs between the first line and the sections, without examples.
        parameters: what it says of each parameter, as one line.
        source: where the rewrite comes from, as one line.
        cost: what the pass costs and what it brings, as one line.
        example: the lines of a Python session, what they print included.
    """

    summary: str
    body: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    cost: str = ""
    example: str = ""


def parse_docstring(cls: type) -> Documented:
    """Return the parts of a class's own docstring, of sections in the style of Google.

    >>> class Fold:
    ...     '''``f(x)`` -> ``g(x)``.
    ...
    ...     Where it is legal.
    ...
    ...     Args:
    ...         depth: how deep,
    ...             at most.
    ...
    ...     Cost:
    ...         Nothing.
    ...     '''
    >>> parse_docstring(Fold).summary, parse_docstring(Fold).body, parse_docstring(Fold).cost
    ('``f(x)`` -> ``g(x)``.', 'Where it is legal.', 'Nothing.')
    >>> parse_docstring(Fold).parameters
    {'depth': 'how deep, at most.'}
    """
    lines = inspect.cleandoc(vars(cls).get("__doc__") or "").splitlines()
    starts = [place for place, line in enumerate(lines) if _SECTION.fullmatch(line)]
    examples = next((place for place, line in enumerate(lines) if line.lstrip().startswith(">>>")), len(lines))
    return Documented(
        summary="".join(lines[:1]),
        body="\n".join(lines[1 : min([*starts, examples])]).strip(),
        parameters=_parameters(lines),
        source=_text(lines, "Source:"),
        cost=_text(lines, "Cost:"),
        example=dedent("\n".join(_example(lines))),
    )


def _section(lines: list[str], title: str) -> Iterator[str]:
    """Yield the lines of a section: those that are indented below its title."""
    if title in lines:
        for line in lines[lines.index(title) + 1 :]:
            if line.strip() and not line.startswith("    "):
                break
            yield line


def _text(lines: list[str], title: str) -> str:
    return " ".join(line.strip() for line in _section(lines, title) if line.strip())


def _parameters(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in _section(lines, "Args:"):
        if match := _PARAMETER.fullmatch(line):
            name = match.group(1)
            found[name] = match.group(2)
        elif name and line.strip():
            found[name] += f" {line.strip()}"
    return found


def _example(lines: list[str]) -> Iterator[str]:
    """Yield the lines of all Python sessions: from a prompt to the next empty line."""
    inside = False
    for line in lines:
        inside = bool(line.strip()) and (inside or line.lstrip().startswith(">>>"))
        if inside:
            yield line
