"""`fxopt history ARCHIVE`: what was done to a model, and what was refused."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import check_archive
from fxopt.commands.parameters import ArchiveArgument, JsonOption
from fxopt.commands.terminal import Terminal

if TYPE_CHECKING:
    from fxopt_core import Record

VerboseOption = Annotated[bool, typer.Option("--verbose", "-v", help="List every site, and passes that found none.")]


def show_history(archive: ArchiveArgument, verbose: VerboseOption = False, as_json: JsonOption = False) -> None:
    """Show what passes rewrote in an archive, and what they refused."""

    def work(terminal: Terminal) -> Answer:
        check_archive(archive)
        with terminal.steps() as step:
            from fxopt.commands.models.sources import read_archive
            from fxopt_core import history

            step("reading")
            records = history(read_archive(archive))
        return Answer(json.loads(records.to_json()), lambda terminal: terminal.raw(history_text(records, verbose)))

    answer(work, as_json=as_json)


def history_text(records: Sequence[Record], verbose: bool) -> str:
    """Return a history as lines of text.

    Args:
        records: its passes.
        verbose: whether to list every site, and passes that did nothing; else the first site of each kind.
    """
    from fxopt_core import History

    if verbose:
        return str(History(records))
    busy = History(record for record in records if _did_something(record))
    idle = dict.fromkeys(record.pass_name for record in records if not _did_something(record))
    lines = [busy.table(_summary)] if busy or not idle else []
    return "\n".join([*lines, f"nothing to do for {', '.join(idle)}"] if idle else lines)


def _did_something(record: Record) -> bool:
    return bool(record.changed or record.rewrites or record.refusals or record.state != "applied")


def _summary(record: Record) -> Iterator[str]:
    """Yield the first site of each kind, and how many there are beside it."""
    from fxopt_core import site_text
    from fxopt_tools.verification.report import counted

    for rewrite in record.rewrites[:1]:
        more = len(record.rewrites) - 1
        yield site_text(rewrite) + (f", and {counted(more, 'more site')}" if more else "")
    counts = Counter(refusal.reason for refusal in record.refusals)
    for refusal in record.refusals:
        more = counts.pop(refusal.reason, 0) - 1
        if more >= 0:
            yield site_text(refusal) + (f" (and {counted(more, 'more site')})" if more else "")
