"""Pipeline text: passes by name, with options, as one line.

    merge-linears{min-group=3 where="layer.*"},fuse-batch-norm2d-in-conv2d

Grammar, with whitespace allowed around names, commas and braces::

    pipeline = [ item { "," item } ]          the empty text is the pipeline of no passes
    item     = NAME [ "{" { option } "}" ]    a pass with options, or a named pipeline, which takes none
    option   = OPTION "=" LITERAL             options are separated by spaces

``OPTION`` is a constructor's parameter with dashes for underscores, ``LITERAL`` a Python literal: a number, quoted text
(in which commas, braces and spaces mean nothing), True, False, None, or a list or tuple of these.
Values are checked against the parameter's annotation, and fitted to it (see `fxopt_core.passes.options`).

Canonical text, as `format_pipeline` writes it, has no needless space, names only the options that differ from their
defaults, in the constructor's order, and uses double quotes. Parsing and formatting returns it unchanged.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import NamedTuple

from fxopt_core.errors import PassOptionError, PipelineOptionError, PipelineSyntaxError, RegistryError
from fxopt_core.names import describe
from fxopt_core.naming import NAME, option_text
from fxopt_core.passes.compose import Composition
from fxopt_core.passes.options import PLAIN_VALUES, is_plain
from fxopt_core.passes.signature import same_value
from fxopt_core.passes.transformation import Transformation
from fxopt_core.registry.pass_info import PassInfo

_OPTION = re.compile(r"([\w-]+)=")
_STRING = re.compile(r""""(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*'""", re.DOTALL)


class PipelineItem(NamedTuple):
    """One pass or named pipeline as it is written; columns are counted from 0."""

    name: str
    options: Mapping[str, tuple[object, int]]  # by name: its value, not yet checked against the pass, and its column
    column: int


Lookup = Callable[[str], PassInfo | str]  # the pass of a name, or the text of the pipeline of that name


def parse_pipeline(text: str) -> tuple[PipelineItem, ...]:
    """Return the items of a pipeline's text; names and values are not looked up yet.

    Raises:
        PipelineSyntaxError: the text does not follow the grammar; the error says where.

    >>> [item] = parse_pipeline("merge-linears{min-group=3}")
    >>> item.name, item.options
    ('merge-linears', {'min-group': (3, 14)})
    """
    items: list[PipelineItem] = []
    at = _after_space(text, 0)
    # After the first item, only a comma leads here, and a comma must be followed by an item.
    while items or at < len(text):
        name = _match(NAME, text, at, "the name of a pass")
        options, end = _options(text, _after_space(text, name.end()))
        items.append(PipelineItem(name.group(), options, at))
        if end == len(text):
            break
        if text[end] != ",":
            raise _error(text, end, "a comma or an opening brace")
        at = _after_space(text, end + 1)
    return tuple(items)


def _options(text: str, opening: int) -> tuple[dict[str, tuple[object, int]], int]:
    """Return the options in the braces that open at a place, if any, and the place after them."""
    options: dict[str, tuple[object, int]] = {}
    if not text.startswith("{", opening):
        return options, opening
    at = _after_space(text, opening + 1)
    while not text.startswith("}", at):
        name = _match(_OPTION, text, at, "'}', or an option and its value, as in {min-group=3 strict=True}")
        key = option_text(name[1])
        if key in options:
            raise PipelineOptionError(f"option {key!r} is given twice", text=text, column=at)
        end = _value_end(text, name.end())
        options[key] = _value(text, name.end(), end), at
        at = _after_space(text, end)
    return options, _after_space(text, at + 1)


def _value_end(text: str, at: int) -> int:
    """Return where a value ends: at a space, comma or closing brace outside of quotes and brackets."""
    depth = 0
    while at < len(text) and (depth > 0 or not (text[at] in ",}" or text[at].isspace())):
        depth += (text[at] in "([") - (text[at] in ")]")
        string = _STRING.match(text, at)
        at = at + 1 if string is None else string.end()
    return at


def _value(text: str, start: int, end: int) -> object:
    try:
        with warnings.catch_warnings():
            # A regular expression is often written with a backslash that Python would keep, but warn about.
            warnings.simplefilter("ignore")
            if is_plain(value := ast.literal_eval(text[start:end])):
                return value
    # Python documents these five for malformed input of `literal_eval`.
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    raise _error(text, start, f'a value: {PLAIN_VALUES}; text is quoted ("...")', end)


def _after_space(text: str, at: int) -> int:
    return len(text) - len(text[at:].lstrip())


def _match(pattern: re.Pattern[str], text: str, at: int, expected: str) -> re.Match[str]:
    match = pattern.match(text, at)
    if match is None:
        raise _error(text, at, expected)
    return match


def _error(text: str, at: int, expected: str, end: int = 0) -> PipelineSyntaxError:
    found = repr(text[at : min(max(end, at + 1), at + 60)]) if at < len(text) else "the end of the text"
    return PipelineSyntaxError(f"found {found}, expected {expected}", text=text, column=at)


def pipeline_passes(text: str, lookup: Lookup, inside: tuple[str, ...] = ()) -> Iterator[Transformation]:
    """Yield the passes of a pipeline's text, with named pipelines expanded; ``inside`` names the enclosing ones."""
    within = f"in pipeline {inside[-1]!r}: " if inside else ""
    for item in parse_pipeline(text):
        column, given = item.column, dict[str, object]()
        try:
            found = lookup(item.name)
            for name, (value, place) in item.options.items():
                column = place
                if isinstance(found, str):
                    what = f"{item.name!r} is a named pipeline, which takes no options; write out its passes: {found}"
                    raise PassOptionError(what)
                given[name] = found.option(name).checked(value, pass_name=found.name)
            column = item.column
            made = () if isinstance(found, str) else (found.create(given),)
        except PassOptionError as error:
            raise PipelineOptionError(f"{within}{error}", text=text, column=column) from error.__cause__
        except RegistryError as error:
            raise type(error)(f"{within}{error} (column {column} of {text!r})") from error.__cause__
        if item.name in inside:
            raise RegistryError(f"pipeline {item.name!r} contains itself: {' -> '.join((*inside, item.name))}")
        yield from pipeline_passes(found, lookup, (*inside, item.name)) if isinstance(found, str) else made


def format_pipeline(transformation: Transformation, info_of: Callable[[type[Transformation]], PassInfo]) -> str:
    """Return the canonical text of a pass or composition; compositions inside of it are flattened."""
    if isinstance(transformation, Composition):
        if not transformation.inplace:
            raise PassOptionError("text cannot express compose(..., inplace=False); print one that works in place")
        texts = [format_pipeline(member, info_of) for member in transformation.transformations]
        return ",".join(filter(None, texts))
    info, texts = info_of(type(transformation)), []
    for name, value in transformation.options.items():
        option = info.options.get(name)  # None: what `*args` or `**kwargs` gathered, which text cannot name
        if same_value(value, option.default if option else type(value)()):
            continue
        text, read = "", object()
        with suppress(ValueError, SyntaxError):  # not plain, not a finite number, or of thousands of digits
            text = _literal(value)
            read = option and option.checked(ast.literal_eval(text), pass_name=info.name)
        if not same_value(read, value):  # reading the text has to give this very value
            found = f"option {option_text(name)!r} of pass {info.name!r}: text cannot express {describe(value)}"
            raise PassOptionError(f"{found}; give a named parameter {PLAIN_VALUES}, of the annotated type")
        texts.append(f"{option_text(name)}={text}")
    return f"{info.name}{{{' '.join(texts)}}}" if texts else info.name


def _literal(value: object) -> str:
    """Return the canonical literal of a plain value; text is in double quotes, as far as that needs no escapes."""
    if isinstance(value, (list, tuple)):
        items = ", ".join(map(_literal, value))
        return f"[{items}]" if isinstance(value, list) else f"({items},)" if len(value) == 1 else f"({items})"
    text = repr(value)
    return f'"{text[1:-1]}"' if text[0] == "'" and '"' not in text else text
