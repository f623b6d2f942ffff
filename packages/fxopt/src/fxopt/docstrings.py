"""The parts of the docstring of a pass."""

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
        parameters: the meaning of each parameter, as one line.
        source: where the rewrite comes from, as one line.
        cost: what the pass costs and gains, as one line.
        example: the lines of a Python session, with their output.
    """

    summary: str
    body: str
    parameters: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    cost: str = ""
    example: str = ""


def parse_docstring(cls: type) -> Documented:
    """Return the parts of a class's own docstring, whose sections are in Google's style.

    Source and cost are inherited from the nearest base class that states them.

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
    sections = _sections(cls)
    lines = sections[""]
    examples = next((place for place, line in enumerate(lines) if line.lstrip().startswith(">>>")), len(lines))
    return Documented(
        summary="".join(lines[:1]),
        body="\n".join(lines[1:examples]).strip(),
        parameters=_parameters(sections.get("Args", [])),
        source=_inherited(cls, "Source"),
        cost=_inherited(cls, "Cost"),
        example=dedent("\n".join(_example(inspect.cleandoc(vars(cls).get("__doc__") or "").splitlines()))),
    )


def _sections(cls: type) -> dict[str, list[str]]:
    """Return the lines of a class's own docstring by section: "" before all, and "after" for text that follows them."""
    sections: dict[str, list[str]] = {"": []}
    name = ""
    for line in inspect.cleandoc(vars(cls).get("__doc__") or "").splitlines():
        if title := _SECTION.fullmatch(line):
            name = title[1]
            continue
        if name and line.strip() and not line.startswith("    "):
            name = "after"
        sections.setdefault(name, []).append(line)
    return sections


def _inherited(cls: type, name: str) -> str:
    texts = (" ".join(" ".join(_sections(base).get(name, [])).split()) for base in cls.__mro__)
    return next(filter(None, texts), "")


def _parameters(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    name = ""
    for line in lines:
        if match := _PARAMETER.fullmatch(line):
            name, found[match[1]] = match[1], match[2]
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
