"""`fxopt diff`: what changed between two models, or what was done to one."""

from __future__ import annotations

from dataclasses import dataclass, field
from difflib import unified_diff
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import check_archives
from fxopt.commands.failures import CommandError, ExitCode
from fxopt.commands.parameters import JsonOption, PickleOption
from fxopt.commands.terminal import Terminal
from fxopt.commands.undo import take_back

if TYPE_CHECKING:
    import torch
    from torch.fx import GraphModule, Node


BeforeArgument = Annotated[str, typer.Argument(metavar="BEFORE", help="A .pt2 archive.")]
AfterArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="AFTER",
        help="The archive to compare it with; by default, BEFORE is compared with itself, undone.",
    ),
]
ExitCodeOption = Annotated[bool, typer.Option("--exit-code", help="Exit with 7 if there is a difference.")]
FormOption = Annotated[
    Literal["text", "mermaid", "dot", "svg"],
    typer.Option(
        "--as",
        help="Text, or a picture of the changes: mermaid for Markdown, dot for Graphviz, svg to look at.",
    ),
]


def diff(
    before: BeforeArgument,
    after: AfterArgument = None,
    form: FormOption = "text",
    exit_code: ExitCodeOption = False,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show which nodes and tensors differ between two archives.

    With one archive: what its passes changed.
    """

    def work(terminal: Terminal) -> Answer:
        check_archives(before, after, trusted=run_pickled_code)
        with terminal.steps(4) as step:
            from fxopt.commands.models.sources import read_archive

            step("reading the first")
            first = read_archive(before, run_pickled_code=run_pickled_code)
            step("reading the second")
            if after is None:
                found = (f"{before}, undone", _undone(before, first)), (before, first)
            else:
                found = (before, first), (after, read_archive(after, run_pickled_code=run_pickled_code))
            step("comparing")
            changes = difference(*found)
        code = ExitCode.DIFFERS if exit_code and not changes.same else ExitCode.DONE
        data = changes.data() | ({} if form == "text" else {form: changes.picture(form)})
        return Answer(data, lambda terminal: _show(terminal, changes, form), code)

    answer(work, as_json=as_json)


def _show(terminal: Terminal, found: Difference, form: Literal["text", "mermaid", "dot", "svg"]) -> None:
    if form == "text":
        terminal.changes(found.lines())
    else:
        terminal.raw(found.picture(form))


def _undone(name: str, graph_module: GraphModule) -> GraphModule:
    from fxopt_core import faithful_copy

    copy = faithful_copy(graph_module)
    try:
        take_back(copy, everything=True)
    except CommandError as error:
        message = f"{error}. Give the earlier archive too: fxopt diff BEFORE {name}"
        raise CommandError(message, error.code, kind=error.kind) from error
    return copy


@dataclass(frozen=True)
class Difference:
    """The differences between two graph modules.

    Attributes:
        names: what they are called.
        sizes: numbers of nodes, modules and parameters of both.
        nodes: a unified diff of their nodes, one per line; empty if they are the same.
        removed: tensors that only the first one has, with dtypes and shapes.
        added: tensors that only the second one has.
        changed: keys that both have, with what differs.
        graphs: both graph modules.
    """

    names: tuple[str, str]
    sizes: tuple[dict[str, int], dict[str, int]]
    nodes: tuple[str, ...]
    removed: dict[str, str]
    added: dict[str, str]
    changed: dict[str, str]
    graphs: tuple[GraphModule, GraphModule] = field(repr=False)

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return not (self.nodes or self.removed or self.added or self.changed)

    def lines(self) -> list[str]:
        """Return them for readers; lines of the first begin with ``-``, those of the second with ``+``."""
        if self.same:
            return [f"{self.names[0]} and {self.names[1]} have the same nodes and the same tensors"]
        one, other = self.sizes
        counts = ", ".join(f"{one[name]} -> {other[name]} {name}" for name in ("nodes", "modules", "parameters"))
        tensors = [f"-{key}: {text}" for key, text in self.removed.items()]
        tensors += [f"+{key}: {text}" for key, text in self.added.items()]
        tensors += [f"!{key}: {text}" for key, text in self.changed.items()]
        return [*self.nodes, *(["@@ tensors @@", *tensors] if tensors else []), counts]

    def picture(self, form: Literal["mermaid", "dot", "svg"]) -> str:
        """Return a picture of the nodes that changed, and of their neighbours."""
        from fxopt.reporting import picture

        seen = picture(self.graphs[1], self.graphs[0])
        if form == "dot":
            return seen.to_dot(1)
        return seen.to_mermaid() if form == "mermaid" else seen.to_svg()

    def data(self) -> dict[str, Any]:
        """Return them for scripts."""
        return {
            "same": self.same,
            "before": {"name": self.names[0], **self.sizes[0]},
            "after": {"name": self.names[1], **self.sizes[1]},
            "nodes_removed": [line[1:] for line in self.nodes[2:] if line.startswith("-")],
            "nodes_added": [line[1:] for line in self.nodes[2:] if line.startswith("+")],
            "tensors_removed": self.removed,
            "tensors_added": self.added,
            "tensors_changed": self.changed,
        }


def difference(before: tuple[str, GraphModule], after: tuple[str, GraphModule]) -> Difference:
    """Compare two graph modules, each with its name."""
    from fxopt.commands.data import size_data
    from fxopt_core import iter_nodes
    from fxopt_tools.watch.graph_text import text_of

    names = before[0], after[0]
    one, other = (list(map(_line, iter_nodes(named[1].graph))) for named in (before, after))
    nodes = tuple(unified_diff(one, other, *names, n=1, lineterm=""))
    old, new = before[1].state_dict(), after[1].state_dict()
    changes = {key: _change(old[key], new[key]) for key in old if key in new}
    return Difference(
        names=names,
        sizes=(size_data(before[1]), size_data(after[1])),
        nodes=nodes,
        removed={key: text_of(value) for key, value in old.items() if key not in new},
        added={key: text_of(value) for key, value in new.items() if key not in old},
        changed={key: change for key, change in changes.items() if change},
        graphs=(before[1], after[1]),
    )


def _line(node: Node) -> str:
    from fxopt_tools.watch.graph_text import name_of, text_of

    arguments = [*map(text_of, node.args), *(f"{key}={text_of(value)}" for key, value in node.kwargs.items())]
    return f"{node.name} = {node.op} {name_of(node.target)}({', '.join(arguments)})"


def _change(old: torch.Tensor, new: torch.Tensor) -> str:
    """Return what differs between two tensors, or an empty text."""
    import torch

    from fxopt_tools.watch.graph_text import text_of

    if text_of(old) != text_of(new):
        return f"{text_of(old)} -> {text_of(new)}"
    return "" if torch.equal(old, new) else "different values"
