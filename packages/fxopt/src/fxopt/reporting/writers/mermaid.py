"""A picture as a Mermaid flowchart."""

from __future__ import annotations

from collections.abc import Iterator

from fxopt.reporting.comparison import Comparison
from fxopt_tools.verification.report import counted

_SAFE = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789 .,_+-=/[]()")
_LONGEST = 60
_STYLES = {
    "removed": "fill:#ffebe9,stroke:#cf222e,color:#82071e,stroke-dasharray:4 3",
    "added": "fill:#dafbe1,stroke:#1a7f37,color:#0f4d22",
    "changed": "fill:#fff8c5,stroke:#9a6700,color:#4d2d00",
    "refused": "stroke:#8250df,stroke-width:2px,stroke-dasharray:2 3",
}
_ARROWS = {"both": "-->", "before": "-.->", "after": "==>"}
_SHAPES = {"input": ('(["', '"])'), "output": ('(["', '"])'), "tensor": ('[/"', '"/]')}


def picture_mermaid(picture: Comparison, context: int | None, most_edges: int) -> str:
    """Return the chart; edges that are gone are dotted, new ones are thick."""
    shown = _within(picture, picture.near(context), most_edges)
    ids = {name: f"n{place}" for place, name in enumerate(shown)}
    lines = ["flowchart TD", *(f"  {line}" for line in _nodes(picture, ids))]
    lines += [f"  {ids[one]} {_ARROWS[side]} {ids[other]}" for one, other, side in picture.edges_among(ids)]
    left_out = len(picture.order) - len(shown)
    if left_out:
        lines.append(f'  rest["and {counted(left_out, "more node")}"]:::rest')
    return "\n".join([*lines, *(f"  {line}" for line in _classes(picture, ids, left_out))])


def _within(picture: Comparison, names: tuple[str, ...], most_edges: int) -> tuple[str, ...]:
    """Return as many of the first nodes as have no more than so many edges among them."""
    inputs: dict[str, list[str]] = {}
    for one, other, _ in picture.edges_among(names):
        inputs.setdefault(other, []).append(one)
        inputs.setdefault(one, []).append(other)
    inside: set[str] = set()
    count = 0
    for place, name in enumerate(names):
        count += sum(each in inside for each in inputs.get(name, ()))
        if count > most_edges:
            return names[:place]
        inside.add(name)
    return names


def _nodes(picture: Comparison, ids: dict[str, str]) -> Iterator[str]:
    for name, number in ids.items():
        node = picture.node(name)
        opening, closing = _SHAPES.get(node.category, ('["', '"]'))
        caption = "" if node.caption == node.label else f"<br/>{_escaped(node.caption)}"
        yield f"{number}{opening}{_escaped(node.label)}{caption}{closing}"


def _classes(picture: Comparison, ids: dict[str, str], left_out: int) -> Iterator[str]:
    groups: dict[str, list[str]] = {}
    refused = picture.changes.refused
    for name, number in ids.items():
        status = picture.status(name)
        if status != "kept":
            groups.setdefault(status, []).append(number)
        elif name in refused:
            groups.setdefault("refused", []).append(number)
    for group, numbers in groups.items():
        yield f"classDef {group} {_STYLES[group]}"
        yield f"class {','.join(numbers)} {group}"
    if left_out:
        yield "classDef rest fill:none,stroke:none,color:#6e7781"


def _escaped(text: str) -> str:
    """Return text for a label, with numbers for characters that could end it or be read as markup.

    >>> _escaped('a"] --> <b>')
    'a#34;] --#62; #60;b#62;'
    """
    short = text if len(text) <= _LONGEST else f"...{text[3 - _LONGEST :]}"
    return "".join(char if char in _SAFE else f"#{ord(char)};" for char in short)
