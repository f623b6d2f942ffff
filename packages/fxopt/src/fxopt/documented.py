"""What the docstring of a pass says, in parts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

_SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields):")
_PARAMETER = re.compile(r" {4}(\w+)(?: \([^)]*\))?: (.*)")


@dataclass(frozen=True)
class Documented:
    """The parts of a docstring.

    Attributes:
        summary: its first line.
        body: the paragraphs between the first line and the sections, without examples.
        parameters: what it says of each parameter, as one line.
    """

    summary: str
    body: str
    parameters: Mapping[str, str] = field(default_factory=dict)


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
    ...     '''
    >>> parse_docstring(Fold)
    Documented(summary='``f(x)`` -> ``g(x)``.', body='Where it is legal.', parameters={'depth': 'how deep, at most.'})
    """
    lines = inspect.cleandoc(vars(cls).get("__doc__") or "").splitlines()
    starts = [place for place, line in enumerate(lines) if _SECTION.fullmatch(line)]
    examples = next((place for place, line in enumerate(lines) if line.lstrip().startswith(">>>")), len(lines))
    body = lines[1 : min([*starts, examples])]
    return Documented("".join(lines[:1]), "\n".join(body).strip(), _parameters(lines))


def _parameters(lines: list[str]) -> dict[str, str]:
    if "Args:" not in lines:
        return {}
    found: dict[str, str] = {}
    name = ""
    for line in lines[lines.index("Args:") + 1 :]:
        if not line.startswith("    "):
            break
        if match := _PARAMETER.fullmatch(line):
            name = match.group(1)
            found[name] = match.group(2)
        elif name:
            found[name] += f" {line.strip()}"
    return found
