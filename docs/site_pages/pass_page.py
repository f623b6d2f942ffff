"""The page of a pass as Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import Parameter

from fxopt.docstrings import Documented, parse_docstring
from fxopt_core import PassInfo, PipelineSyntaxError, option_text, parse_pipeline, show_annotation
from fxopt_rewrite import REASONS
from site_pages.programs import session_of
from site_pages.public_names import public_module
from site_pages.showing import Shown, show, size_of

_WHOLE = 20
"""A graph of at most so many nodes is drawn as a whole, and a larger one near its changes."""
LEGEND = (
    "Red and dashed: nodes that are gone. Green: new nodes. Yellow: nodes that are kept, with other arguments. Purple: "
    "a site that was refused."
)


@dataclass(frozen=True)
class Page:
    """The page of a pass.

    Attributes:
        info: the pass.
        text: Markdown.
        drawing: an SVG image, shown by the page under ``NAME.svg``; "" for none.
        report: a page to look around in, linked under ``NAME-report.html``; "" for none.
    """

    info: PassInfo
    text: str
    drawing: str
    report: str


def page_of_pass(info: PassInfo) -> Page:
    """Return the page of a pass, an installed plugin's too."""
    documented = parse_docstring(info.transformation)
    session = session_of(info.transformation, documented.example)
    shown = show(info, session)
    parts = [
        f"# {info.name}",
        _prose(info.summary) or "Its docstring says nothing.",
        _facts(info),
        _prose(documented.body),
        f"**Source.** {_inline(documented.source)}" if documented.source else "",
        *_picture(info, shown),
        "## Options",
        *_options(info, documented),
        "## Why a site is left alone",
        *_refusals(info),
        "## Cost",
        *_cost(documented, shown),
        "## Example",
        *_example(documented, shown, None if session is None else session.text),
    ]
    text = "\n\n".join(part for part in parts if part) + "\n"
    if shown is None:
        return Page(info, text, "", "")
    drawn = shown.picture
    drawing = drawn.to_svg(context=None if len(drawn.order) <= _WHOLE else 2)
    return Page(info, text, drawing, shown.report(f"{info.name} on {shown.description}").html)


def _prose(text: str) -> str:
    """Return text of a docstring, which is reStructuredText, for MyST."""
    return f"```{{eval-rst}}\n{text}\n```" if text else ""


def _inline(text: str) -> str:
    """Return a line of a docstring as Markdown: its code is marked alike, and addresses become links."""
    return re.sub(r"(?<!<)(https?://[^\s,;)]+[^\s,;).])", r"<\1>", text).replace("|", "\\|")


def _facts(info: PassInfo) -> str:
    cls = info.transformation
    module = public_module(cls)
    name = f"{{py:class}}`{module}.{cls.__name__}`" if module else f"`{cls.__module__}.{cls.__qualname__}`"
    undo = "yes, exactly: see [undo](../undo.md)" if info.reversible else "no: keep a copy"
    same = "yes, up to rounding" if info.preserves_computation else "no"
    origin = f"`{info.distribution}` {info.version}" if info.distribution else f"the plugin `{info.family}`"
    rows = [("class", name), ("comes with", origin), ("can be undone", undo), ("computes the same", same)]
    return "\n".join(["| | |", "|---|---|", *(f"| {key} | {value} |" for key, value in rows)])


def _picture(info: PassInfo, shown: Shown | None) -> Iterator[str]:
    yield "## Before and after"
    if shown is None:
        yield "It changes no node of a graph, so that there is nothing to draw."
        return
    described = _inline(shown.description)
    yield f"On {described}:"
    yield f"![The graph before and after {info.name}, in one drawing]({info.name}.svg)"
    part = "" if len(shown.picture.order) <= _WHOLE else " This is the part around the change."
    link = f'<a href="{info.name}-report.html">The report</a>'
    yield f"{LEGEND}{part} {link} has both graphs side by side, to look around in."


def _options(info: PassInfo, documented: Documented) -> Iterator[str]:
    if not info.options:
        yield "None."
        return
    lines = ["| option | type | default | meaning |", "|---|---|---|---|"]
    for option in info.options.values():
        kind = "" if option.annotation is Parameter.empty else f"`{show_annotation(option.annotation)}`"
        meaning = _inline(documented.parameters.get(option.name, ""))
        cells = (f"`{option_text(option.name)}`", kind.replace("|", "\\|"), f"`{option.default!r}`", meaning)
        lines.append(f"| {' | '.join(cells)} |")
    yield "\n".join(lines)
    yield "In Python they are keyword arguments, in snake case. With their defaults, as pipeline text:"
    yield f"```text\n{_pipeline(info)}\n```"


def _pipeline(info: PassInfo) -> str:
    """Return a pass with all options as the text of a pipeline, as far as text can say them."""
    words = []
    for option in info.options.values():
        value = f'"{option.default}"' if isinstance(option.default, str) else repr(option.default)
        words.append(f"{option_text(option.name)}={value}")
    text = f"{info.name}{{{' '.join(words)}}}"
    try:
        parse_pipeline(text)
    except PipelineSyntaxError:  # a default that text cannot express
        return info.name
    return text


def _refusals(info: PassInfo) -> Iterator[str]:
    reasons = info.transformation.reasons
    if not reasons:
        yield "The pass declares no reasons."
        return
    yield (
        "Each refusal has a code and a sentence that names modules and nodes: see "
        "[Why was it not applied?](../refusals.md)."
    )
    own = sorted(reasons.keys() - REASONS)
    if own:
        yield "Codes of this pass:"
        rows = (f"| `{code}` | {_inline(reasons[code])} |" for code in own)
        yield "\n".join(["| code | meaning and remedy |", "|---|---|", *rows])
    general = (f"{{ref}}`{code} <reason-{code}>`" for code in sorted(reasons.keys() & REASONS))
    yield f"General codes: {', '.join(general)}."


def _cost(documented: Documented, shown: Shown | None) -> Iterator[str]:
    yield _inline(documented.cost) or "Its docstring does not say."
    if shown is None or shown.before is shown.after:
        return
    before, after = size_of(shown.before), size_of(shown.after)
    nodes = len(shown.before.graph.nodes), len(shown.after.graph.nodes)
    rows = [("nodes", *nodes)]
    rows += zip(("layers with parameters", "numbers in parameters"), before, after, strict=True)
    lines = ["| on the model above | before | after |", "|---|---|---|"]
    yield "\n".join([*lines, *(f"| {name} | {one:,} | {other:,} |" for name, one, other in rows)])


def _example(documented: Documented, shown: Shown | None, session: str | None) -> Iterator[str]:
    if shown is not None and shown.program[1]:
        yield "The model of the picture:"
        yield f"```python\n{shown.program[0]}\n```"
        yield "The pass on it:"
        yield f"```python\n{shown.program[1]}\n```"
        if shown.printed:
            yield f"```output\n{shown.printed.rstrip()}\n```"
    if session is not None:
        if shown is not None and shown.program[1]:
            yield "The example of the docstring:"
        yield f"```python\n{session}\n```"
    elif shown is None or not shown.program[1]:
        yield f"```python\n{documented.example}\n```" if documented.example else "Its docstring has none."
