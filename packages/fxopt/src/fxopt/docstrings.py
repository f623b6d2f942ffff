"""The parts of the docstring of a pass."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass
from textwrap import dedent

# A heading at the margin, with the indented and empty lines below it.
_SECTION = re.compile(r"^(Args|Attributes|Cost|Examples?|Raises|Returns|Source|Yields):\n((?: .*\n|\n)*)", re.MULTILINE)
# `name: meaning` or `*name (type): meaning`, with the indented lines that continue it.
_PARAMETER = re.compile(r"^\*{0,2}(\w+)(?: \([^)]*\))?: (.*(?:\n .*)*)", re.MULTILINE)
# From a prompt to the next empty line, so that output belongs to it.
_SESSION = re.compile(r"^ *>>>.*(?:\n.*\S.*)*", re.MULTILINE)


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
    parameters: Mapping[str, str]
    source: str
    cost: str
    example: str


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
    text = _text(cls)
    summary, _, rest = text.partition("\n")
    arguments = dict(_SECTION.findall(text)).get("Args", "")
    parameters = {name: " ".join(meaning.split()) for name, meaning in _PARAMETER.findall(dedent(arguments))}
    source, cost = (_inherited(cls, name) for name in ("Source", "Cost"))
    body = _SESSION.split(_SECTION.split(rest)[0])[0].strip()
    return Documented(summary, body, parameters, source, cost, dedent("\n".join(_SESSION.findall(text))))


def _text(cls: type) -> str:
    return f"{inspect.cleandoc(vars(cls).get('__doc__') or '')}\n"


def _inherited(cls: type, section: str) -> str:
    texts = (" ".join(dict(_SECTION.findall(_text(base))).get(section, "").split()) for base in cls.__mro__)
    return next(filter(None, texts), "")
