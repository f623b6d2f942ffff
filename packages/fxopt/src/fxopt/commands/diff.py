"""`fxopt diff`: what changed between two models, or what was done to one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fxopt.commands.answering import Answer, answer
from fxopt.commands.exit_codes import ExitCode
from fxopt.commands.failures import CommandError
from fxopt.commands.parameters import JsonOption, PickleOption
from fxopt.commands.terminal import Terminal
from fxopt.commands.undo import take_back

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from fxopt.commands.differences import Difference

BeforeArgument = Annotated[str, typer.Argument(metavar="BEFORE", help="A .pt2 archive.")]
AfterArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="AFTER", help="The archive to compare it with. Without it, BEFORE with all its passes undone."
    ),
]
ExitCodeOption = Annotated[bool, typer.Option("--exit-code", help="Exit with 7 where there is a difference.")]
FormOption = Annotated[
    Literal["text", "mermaid", "dot", "svg"],
    typer.Option(
        "--as", help="Lines, or a picture of the changes: for GitHub's Markdown, for Graphviz, or to look at."
    ),
]
_STEPS = {"loading torch": 3.0, "reading the first": 4.0, "reading the second": 4.0, "comparing": 1.0}


def diff(
    before: BeforeArgument,
    after: AfterArgument = None,
    form: FormOption = "text",
    exit_code: ExitCodeOption = False,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show which nodes and tensors changed: from one archive to another, or what the passes did to one archive."""

    def work(terminal: Terminal) -> Answer:
        found = _difference(terminal, before, after, run_pickled_code)
        code = ExitCode.DIFFERS if exit_code and not found.same else ExitCode.DONE
        data = found.data() | ({} if form == "text" else {form: found.picture(form)})
        return Answer(data, lambda terminal: _show(terminal, found, form), code)

    answer(work, as_json=as_json)


def _difference(terminal: Terminal, before: str, after: str | None, run_pickled_code: bool) -> Difference:
    with terminal.steps(_STEPS) as step:
        step("loading torch")
        from fxopt.commands.differences import difference
        from fxopt.commands.sources import read_archive

        step("reading the first")
        first = read_archive(before, run_pickled_code=run_pickled_code)
        step("reading the second")
        if after is None:
            one, other = (f"{before}, undone", _undone(before, first)), (before, first)
        else:
            one, other = (before, first), (after, read_archive(after, run_pickled_code=run_pickled_code))
        step("comparing")
        return difference(one, other)


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
        message = f"{error}. Give the archive from before too: fxopt diff BEFORE {name}"
        raise CommandError(message, error.code, kind=error.kind) from error
    return copy
