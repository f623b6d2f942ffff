"""`fxopt history ARCHIVE`: what was done to a model, and what was refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import check_archives
from fxopt.commands.failures import ExitCode, blaming
from fxopt.commands.parameters import ArchiveArgument, JsonOption, PickleOption
from fxopt.commands.terminal import Terminal

_HEADINGS = ("run", "pass", "options", "state", "rewritten", "refused", "ms")
_NUMBERS = (4, 5, 6)
_INDENT = "     "

VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="List every site, and passes that found none.")]


def show_history(
    archive: ArchiveArgument,
    verbose: VerboseOption = False,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show what passes rewrote in an archive, and what they refused."""

    def work(terminal: Terminal) -> Answer:
        check_archives(archive)
        with terminal.steps(2) as step:
            from fxopt.commands.models.sources import read_archive
            from fxopt_core import history

            step("reading")
            graph_module = read_archive(archive, run_pickled_code=run_pickled_code)
        with blaming(ExitCode.FILE):
            data = json.loads(history(graph_module).to_json())
        return Answer(data, lambda terminal: terminal.raw("\n".join(history_lines(data["passes"], verbose))))

    answer(work, as_json=as_json)


def history_lines(entries: Sequence[Mapping[str, Any]], verbose: bool) -> Iterator[str]:
    """Yield a history as lines of text.

    Args:
        entries: its passes, as `History.to_json` has them.
        verbose: whether to list every site, and passes that did nothing; else the first site of each kind.
    """
    from fxopt_core import text_table

    shown = [entry for entry in entries if verbose or _did_something(entry)]
    if shown:
        heading, *rows = text_table([_HEADINGS, *map(_cells, shown)], right=_NUMBERS)
        yield heading
        for row, entry in zip(rows, shown, strict=True):
            yield row
            yield from (f"{_INDENT}{line}" for line in (_all_sites if verbose else _summary)(entry))
    idle = [entry["pass"] for entry in entries if not _did_something(entry)]
    if idle and not verbose:
        yield f"{_counted(len(idle), 'pass', 'passes')} found nothing to do: {', '.join(dict.fromkeys(idle))}"
    elif not shown:
        yield "nothing was applied"


def _did_something(entry: Mapping[str, Any]) -> bool:
    something = entry["changed"] or entry["rewritten"] or entry["refused"]
    return bool(something or entry["state"] != "applied")


def _cells(entry: Mapping[str, Any]) -> tuple[str, ...]:
    run = str(entry["run"]) if entry["index"] is None else f"{entry['run']}.{entry['index']}"
    options = " ".join(", ".join(f"{name}={value!r}" for name, value in entry["options"].items()).split())
    shortened = options if len(options) <= 40 else f"{options[:37]}..."
    counts = str(len(entry["rewritten"])), str(len(entry["refused"])), f"{entry['seconds'] * 1e3:.1f}"
    return run, entry["pass"], shortened, entry["state"], *counts


def _summary(entry: Mapping[str, Any]) -> Iterator[str]:
    """Yield the first site of each kind, and how many there are beside it."""
    for site in entry["rewritten"][:1]:
        more = len(entry["rewritten"]) - 1
        yield _rewritten(site) + (f", and {_counted(more, 'more site')}" if more else "")
    counts = Counter(site["reason"] for site in entry["refused"])
    for site in entry["refused"]:
        more = counts.pop(site["reason"], 0) - 1
        if more >= 0:
            yield _refused(site) + (f" (and {_counted(more, 'more site')})" if more else "")


def _all_sites(entry: Mapping[str, Any]) -> Iterator[str]:
    yield from map(_rewritten, entry["rewritten"])
    yield from map(_refused, entry["refused"])


def _rewritten(site: Mapping[str, Any]) -> str:
    before = site["modules_before"] or site["nodes_before"]
    after = site["modules_after"] or site["nodes_after"]
    note = f" ({site['note']})" if site["note"] else ""
    if before == after:
        return f"+ {site['site']}: changed in place{note}"
    parents = {name.rpartition(".")[0] for name in (*before, *after)}
    parent = f"{parents.pop()}." if len(parents) == 1 else ""
    return f"+ {site['site']} -> {', '.join(name.removeprefix(parent) for name in after) or 'nothing'}{note}"


def _refused(site: Mapping[str, Any]) -> str:
    return f"- {site['site']}: {site['reason']}: {site['message']}"


def _counted(number: int, one: str, many: str = "") -> str:
    return f"{number} {one if number == 1 else many or f'{one}s'}"
