"""A picture as data for the script of a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fxopt_report.changes import DrawnSite
from fxopt_report.drawn import DrawnGraph
from fxopt_report.frames import Frame
from fxopt_report.markup import Html, printable
from fxopt_report.pictures import Picture
from fxopt_report.places import FURTHEST, NODE_HEIGHT, ROW_HEIGHT, Layout, lay_out
from fxopt_report.rows import shared_rows


def drawing_json(picture: Picture) -> Html:
    """Return everything that the script needs, as JSON that is safe inside a ``script`` element."""
    text = json.dumps(_drawing(picture), separators=(",", ":"), ensure_ascii=True)
    # `</script>` or `<!--` in a name would end the element; to JSON, the escapes are the same characters.
    return Html(text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026"))


def _layouts(picture: Picture) -> list[tuple[str, DrawnGraph, Layout]]:
    """Return the graphs of a picture, before and after, each with its layout; their rows are the same."""
    graphs = [("before", picture.before)] if picture.before is not None else []
    graphs.append(("after", picture.after))
    tensors = frozenset(name for name in picture.order if picture.node(name).is_tensor)
    rows = shared_rows(picture.order, list(picture.edges), tensors, [graph.nodes for _, graph in graphs])
    found = []
    for (word, graph), each in zip(graphs, rows, strict=True):
        widths = {name: graph.nodes[name].width for name in each}
        found.append((word, graph, lay_out(each, list(graph.edges()), widths)))
    return found


def _drawing(picture: Picture) -> dict[str, Any]:
    numbers = {name: number for number, name in enumerate(picture.order)}
    layouts = _layouts(picture)
    # The number of each frame, -1 for none; nodes and sites fill it, so that "frames" comes last below.
    frames: dict[Frame | None, int] = {None: -1}
    return {
        "height": NODE_HEIGHT,
        # How far above the view an edge may begin and still reach into it.
        "reach": (FURTHEST + 1) * ROW_HEIGHT,
        "total": max(layout.height for _, _, layout in layouts),
        "nodes": _nodes(picture, numbers, frames),
        "panes": [_pane(word, graph, layout, numbers) for word, graph, layout in layouts],
        "sites": [_site(site, numbers, frames) for site in picture.changes.sites],
        "stops": _stops(picture, numbers),
        "frames": [(frame.place, frame.function, frame.code) for frame in frames if frame is not None],
    }


def _nodes(picture: Picture, numbers: Mapping[str, int], frames: dict[Frame | None, int]) -> dict[str, list[Any]]:
    nodes = [picture.node(name) for name in picture.order]
    changes, refused = picture.changes, picture.changes.refused
    former = picture.former
    sites: list[list[int]] = [[] for _ in nodes]
    for place, site in enumerate(changes.sites):
        for name in site.nodes:
            sites[numbers[name]].append(place)
    texts = ("name", "op", "category", "target", "module", "value", "arguments")
    return {key: [printable(getattr(node, key)) for node in nodes] for key in texts} | {
        "label": [node.lines[0] for node in nodes],
        "caption": [node.lines[1] for node in nodes],
        "former": [
            printable(was.arguments) if (was := former.get(node.name)) and was.arguments != node.arguments else ""
            for node in nodes
        ],
        "status": [picture.status(node.name) for node in nodes],
        "refused": [int(node.name in refused) for node in nodes],
        "links": [[numbers[name] for name in changes.linked(node.name)] for node in nodes],
        "sites": sites,
        "frame": [frames.setdefault(node.frame, len(frames) - 1) for node in nodes],
    }


def _pane(word: str, graph: DrawnGraph, layout: Layout, numbers: Mapping[str, int]) -> dict[str, Any]:
    # Nodes and edges from top to bottom, because the script finds those in view by bisection.
    names = sorted(graph.nodes, key=lambda name: (layout.places[name][1], layout.places[name][0]))
    paths = sorted(layout.paths.items(), key=lambda path: path[1][0][1])
    return {
        "id": f"pane-{word}",
        "word": word,
        "width": round(layout.width, 1),
        "nodes": [numbers[name] for name in names],
        "xs": [round(layout.places[name][0], 1) for name in names],
        "ys": [round(layout.places[name][1], 1) for name in names],
        "widths": [graph.nodes[name].width for name in names],
        "inputs": [[numbers[each] for each in graph.nodes[name].inputs] for name in names],
        "tops": [round(points[0][1], 1) for _, points in paths],
        "edges": [
            [numbers[one], numbers[other], [round(number, 1) for point in points for number in point]]
            for (one, other), points in paths
        ],
        "far_edges": [[numbers[one], numbers[other]] for one, other in layout.far],
    }


def _site(site: DrawnSite, numbers: Mapping[str, int], frames: dict[Frame | None, int]) -> dict[str, Any]:
    return {
        "pass": printable(site.record.pass_name),
        "site": printable(site.site),
        "rewritten": site.rewritten,
        "reason": printable(site.reason),
        "message": printable(site.message),
        "nodes": [numbers[name] for name in site.nodes],
        "frame": frames.setdefault(site.frame, len(frames) - 1),
    }


def _stops(picture: Picture, numbers: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return groups of changed nodes to step through: the nodes of a site, and runs of others that no site names."""
    sites = [(place, site) for place, site in enumerate(picture.changes.sites) if site.rewritten]
    where = {name: (place, 0) for place, site in sites for name in site.nodes}
    # By the place of the site; by -1 and the number of unchanged nodes before, where no site names the node.
    groups: dict[tuple[int, int], list[int]] = {}
    run = 0
    for name in picture.order:
        if picture.status(name) == "kept":
            run += 1
        else:
            groups.setdefault(where.get(name, (-1, run)), []).append(numbers[name])
    return [{"site": site, "nodes": nodes} for (site, _), nodes in groups.items()]
