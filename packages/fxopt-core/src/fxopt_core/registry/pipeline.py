"""Pipeline text: passes by name, with options, as one line.

    merge-linears{min-group=3 where="layer.*"},fuse-batch-norm2d-in-conv2d

Grammar, with whitespace allowed around names, commas and braces::

    pipeline = [ item { "," item } ]          the empty text is the pipeline of no passes
    item     = NAME [ "{" { option } "}" ]    a pass with options, or a named pipeline, which takes none
    option   = OPTION "=" LITERAL             options are separated by spaces

``OPTION`` is a constructor's parameter with dashes for underscores, ``LITERAL`` a Python literal: a number, quoted text
(in which commas, braces and spaces mean nothing), True, False, None, or a list or tuple of such.
Values are checked against the parameter's annotation, and fitted to it (see `fxopt_core.values.coercion`).

Canonical text has no needless space, names the options that differ from their defaults in the constructor's order, and
writes their values in one way (double quotes). It is what `format_pipeline` gives, and
reading and printing gives it back as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fxopt_core.errors import PassOptionError, PipelineOptionError, PipelineSyntaxError, RegistryError
from fxopt_core.naming import NAME, option_text
from fxopt_core.passes.compose import Composition, compose
from fxopt_core.passes.options import OptionInfo, find_option
from fxopt_core.passes.signature import same_value
from fxopt_core.passes.transformation import Transformation
from fxopt_core.registry.pass_info import PassInfo
from fxopt_core.values.literals import LiteralError, literal_end, literal_text, read_literal

_OPTION = re.compile(r"[\w-]+")


@dataclass(frozen=True)
class OptionText:
    """One option as it is written; columns are counted from 0."""

    name: str
    value: object  # not yet checked against the pass
    column: int  # of the name
    value_column: int


@dataclass(frozen=True)
class PipelineItem:
    """One pass or named pipeline as it is written, with its options."""

    name: str
    options: tuple[OptionText, ...]
    column: int


Lookup = Callable[[str], PassInfo | str]  # the pass of a name, or the text of the pipeline of that name


def parse_pipeline(text: str) -> tuple[PipelineItem, ...]:
    """Return the items of a pipeline's text; names and values are not looked up yet.

    Raises:
        PipelineSyntaxError: the text does not follow the grammar; the error says where.

    >>> [item] = parse_pipeline("merge-linears{min-group=3}")
    >>> item.name, item.options[0].name, item.options[0].value, item.options[0].value_column
    ('merge-linears', 'min-group', 3, 24)
    """
    return tuple(_Reader(text).items())


def build_pipeline(text: str, lookup: Lookup) -> Transformation:
    """Return the composition that a pipeline's text describes; named pipelines are replaced by what they stand for."""
    return compose(*_expand(text, lookup, ()))


def format_pipeline(transformation: Transformation, info_of: Callable[[type[Transformation]], PassInfo]) -> str:
    """Return the canonical text of a composition; compositions inside of it are flattened."""
    return ",".join(_pass_text(member, info_of(type(member))) for member in _members(transformation))


class _Reader:
    """Reads a pipeline's text from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def items(self) -> Iterator[PipelineItem]:
        self._skip_space()
        if self._at == len(self._text):
            return
        yield self._item()
        while self._take(","):
            yield self._item()
        if self._at < len(self._text):
            raise self._error(f"found {self._found()}, expected a comma or an opening brace")

    def _item(self) -> PipelineItem:
        column = self._skip_space()
        name = self._match(NAME, "the name of a pass")
        self._skip_space()
        options = tuple(self._options()) if self._take("{") else ()
        self._skip_space()
        return PipelineItem(name, options, column)

    def _options(self) -> Iterator[OptionText]:
        opening = self._at - 1
        names: set[str] = set()
        self._skip_space()
        while not self._take("}"):
            if self._at == len(self._text):
                raise self._error("the brace is never closed; expected '}'", opening)
            option = self._option()
            key = option_text(option.name)
            if key in names:
                raise PipelineOptionError(f"option {key!r} is given twice", text=self._text, column=option.column)
            names.add(key)
            yield option
            self._skip_space()
            if self._text.startswith(",", self._at):
                raise self._error("found a comma; options are separated by spaces")

    def _option(self) -> OptionText:
        column = self._at
        name = self._match(_OPTION, "the name of an option")
        if not self._take("="):
            raise self._error(f"found {self._found()}, expected '=' and a value right after option {name!r}")
        start = self._at
        try:
            self._at = literal_end(self._text, start)
            if self._at == start:
                raise self._error(f"found {self._found()}, expected a value right after '{name}='")
            return OptionText(name, read_literal(self._text[start : self._at]), column, start)
        except LiteralError as error:
            raise self._error(str(error), error.column or start) from None

    def _skip_space(self) -> int:
        while self._at < len(self._text) and self._text[self._at].isspace():
            self._at += 1
        return self._at

    def _take(self, char: str) -> bool:
        taken = self._text.startswith(char, self._at)
        self._at += taken
        return taken

    def _match(self, pattern: re.Pattern[str], expected: str) -> str:
        match = pattern.match(self._text, self._at)
        if match is None:
            raise self._error(f"found {self._found()}, expected {expected}")
        self._at = match.end()
        return match.group()

    def _found(self) -> str:
        return repr(self._text[self._at]) if self._at < len(self._text) else "the end of the text"

    def _error(self, message: str, column: int | None = None) -> PipelineSyntaxError:
        return PipelineSyntaxError(message, text=self._text, column=self._at if column is None else column)


def _expand(text: str, lookup: Lookup, inside: tuple[str, ...]) -> list[Transformation]:
    """Return the passes of a text; ``inside`` names the named pipelines that it stands in."""
    passes: list[Transformation] = []
    within = f"in pipeline {inside[-1]!r}: " if inside else ""
    for item in parse_pipeline(text):
        column = item.column
        try:
            found = lookup(item.name)
            if isinstance(found, str) and item.options:
                column = item.options[0].column
                what = f"{item.name!r} is a named pipeline, which takes no options; write out its passes: {found}"
                raise PassOptionError(what)
            if not isinstance(found, str):
                given: dict[str, object] = {}
                for option in item.options:
                    column = option.column
                    parameter = find_option(found.name, found.options, option.name)
                    column = option.value_column
                    given[parameter.name] = parameter.checked(option.value, pass_name=found.name)
                column = item.column
                passes.append(found.create(given))
        except PassOptionError as error:
            raise PipelineOptionError(f"{within}{error}", text=text, column=column) from error.__cause__
        except RegistryError as error:
            raise type(error)(f"{within}{error} (column {column} of {text!r})") from error.__cause__
        if item.name in inside:
            raise RegistryError(f"pipeline {item.name!r} contains itself: {' -> '.join((*inside, item.name))}")
        passes += _expand(found, lookup, (*inside, item.name)) if isinstance(found, str) else []
    return passes


def _members(transformation: Transformation) -> Iterator[Transformation]:
    if not isinstance(transformation, Composition):
        yield transformation
        return
    if not transformation.inplace:
        raise PassOptionError("text cannot express compose(..., inplace=False); print one that works in place")
    for member in transformation.transformations:
        yield from _members(member)


def _pass_text(transformation: Transformation, info: PassInfo) -> str:
    values = transformation.options
    for name, value in values.items():
        if name not in info.options and value != ():
            what = f"{name!r} of pass {info.name!r}, which is no named parameter of its constructor"
            raise PassOptionError(f"text cannot express {what}")
    texts = [
        f"{option_text(option.name)}={_value_text(info, option, values[option.name])}"
        for option in info.options.values()
        if option.name in values and not same_value(values[option.name], option.default)
    ]
    return f"{info.name}{{{' '.join(texts)}}}" if texts else info.name


def _value_text(info: PassInfo, option: OptionInfo, value: object) -> str:
    where = f"option {option_text(option.name)!r} of pass {info.name!r}"
    try:
        text = literal_text(value)
        read = option.checked(read_literal(text), pass_name=info.name)
    except LiteralError as error:
        raise PassOptionError(
            f"{where}: {error}; numbers, text, True, False, None, lists and tuples can stand in pipeline text"
        ) from None
    if not same_value(read, value):  # reading the text has to give this very value
        found = f"text cannot express this {type(value).__qualname__}, it would be read as {read!r}"
        raise PassOptionError(f"{where}: {found}; construct the pass with a value of its annotated type")
    return text
