"""A picture in the language of Graphviz."""

from __future__ import annotations

from fxopt.reporting.comparison import Comparison

_STYLES = {
    "kept": "",
    "removed": ', color="#cf222e", fillcolor="#ffebe9", fontcolor="#82071e", style="rounded,filled,dashed"',
    "added": ', color="#1a7f37", fillcolor="#dafbe1", fontcolor="#0f4d22"',
    "changed": ', color="#9a6700", fillcolor="#fff8c5", fontcolor="#4d2d00"',
}
_EDGES = {
    "both": "",
    "before": ' [color="#cf222e", style=dashed]',
    "after": ' [color="#1a7f37", penwidth=1.6]',
}
_HEAD = (
    "digraph fxopt {",
    '  graph [rankdir=TB, nodesep=0.25, ranksep=0.35, fontname="Helvetica"];',
    '  node [shape=box, style="rounded,filled", fillcolor="#f6f8fa", color="#8c959f", fontname="Helvetica", '
    "fontsize=10];",
    '  edge [color="#8c959f", arrowsize=0.6];',
)


def picture_dot(picture: Comparison, context: int | None) -> str:
    """Return the graph; removed nodes are red and dashed, new ones are green."""
    shown = picture.near(context)
    refused = picture.changes.refused
    lines = list(_HEAD)
    for name in shown:
        node, status = picture.node(name), picture.status(name)
        label = _quoted(node.label if node.caption == node.label else f"{node.label}\n{node.caption}")
        mark = ', color="#8250df", penwidth=2' if status == "kept" and name in refused else _STYLES[status]
        lines.append(f"  {_quoted(name)} [label={label}, tooltip={_quoted(node.module or node.target)}{mark}];")
    lines += [f"  {_quoted(one)} -> {_quoted(other)}{_EDGES[side]};" for one, other, side in picture.edges_among(shown)]
    return "\n".join([*lines, "}"])


def _quoted(text: str) -> str:
    r"""Return text as a string of the language, in which a backslash begins an escape.

    >>> print(_quoted('a\\b"c'))
    "a\\b\"c"
    """
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\r", " ").replace("\n", "\\n")
    return f'"{escaped}"'
