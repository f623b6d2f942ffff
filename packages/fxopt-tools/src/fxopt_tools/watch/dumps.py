"""`Dumps`: the graph module before and after passes, as numbered text files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase
from os import PathLike
from pathlib import Path
from typing import Literal, TypeAlias

from torch.fx import GraphModule

from fxopt_core import Instrument, PassRun, PreconditionError, Record
from fxopt_tools.output_directory import own_files, safe_name
from fxopt_tools.watch.graph_text import record_text, section, sections, without_addresses

Selection: TypeAlias = bool | str | Collection[str]
"""True for all passes, False for none, or names of passes, in which ``*`` and ``?`` match any characters."""
Content = Literal["graph", "code", "modules", "record"]
CONTENTS: tuple[Content, ...] = ("graph", "code", "modules", "record")

_FIRST_LINE = "# fxopt dump"
_FILE_NAME = re.compile(r"\d{3,}_[\w.-]+\.(before|after|failed)\.txt")


class Dumps(Instrument):
    """Writes the graph module before and after passes to files, and in the state in which a pass failed.

    The files of run 3 under this instrument, counted from 0 over all passes whether dumped or not, are
    ``003_merge-linears.before.txt``, ``003_merge-linears.after.txt`` and, if it raised or was vetoed,
    ``003_merge-linears.failed.txt``, which shows the state at the failure, before it is rolled back. Where a pass is
    undone, its name is preceded by ``undo-``. Each file has the nodes as a table, the code, the modules with their
    parameters, and what the pass rewrote and refused. It has no addresses and no times, so that the dumps of two
    processes can be compared.

    The directory is made with the first dump. It must be new or empty: nothing is ever written to a directory with
    other files, and no file is ever overwritten. A file that cannot be written is a `PreconditionError`.

    Attributes:
        directory: where the files are.
        files: the files that were written, in order.

    >>> import tempfile, torch
    >>> from fxopt_core import LintAndRecompile, instrumented
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     dumps = Dumps(directory, before="lint-*", changed_only=False)
    ...     with instrumented(dumps):
    ...         _ = LintAndRecompile()(torch.fx.symbolic_trace(torch.nn.ReLU()))
    >>> [file.name for file in dumps.files]
    ['000_lint-and-recompile.before.txt', '000_lint-and-recompile.after.txt']
    """

    may_veto = False

    def __init__(
        self,
        directory: str | PathLike[str],
        *,
        before: Selection = False,
        after: Selection = True,
        failed: Selection = True,
        changed_only: bool = True,
        contents: Collection[Content] = CONTENTS,
        replace: bool = False,
    ) -> None:
        """Prepare for dumping.

        Args:
            directory: where to write; it is made, with its parents, if missing.
            before: the passes before which to dump.
            after: the passes after which to dump.
            failed: the passes whose failures to dump.
            changed_only: whether to skip passes that changed nothing.
            contents: what a file contains, of "graph", "code", "modules" and "record".
            replace: whether to delete dumps of an earlier run in the directory when the first new one is written.

        Raises:
            PreconditionError: The directory is a file or holds other files, or an argument is invalid.
        """
        _check_contents(contents)
        if not isinstance(directory, str | PathLike) or not str(directory):  # type: ignore[redundant-expr]  # untyped
            raise PreconditionError(
                f"directory is {directory!r}, expected the path of a directory of its own for dumps"
            )
        self.directory = Path(directory)
        self.files: list[Path] = []
        self._before, self._after = _patterns("before", before), _patterns("after", after)
        self._failed = _patterns("failed", failed)
        self._changed_only, self._replace, self._contents = changed_only, replace, contents
        # By the run's id, since a pass may call another: its number, and the dump from before it if not yet written
        self._open: dict[int, tuple[int, str | None]] = {}
        self._runs = 0
        _check_directory(self.directory, replace)

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        """Dump the state before the pass."""
        number, self._runs = self._runs, self._runs + 1
        before = self._text(run, "before", graph_module) if _matches(run, self._before) else None
        if not self._changed_only:
            self._write(run, number, "before", before)
            before = None
        self._open[id(run)] = number, before

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
        """Dump the result, with the record."""
        number, before = self._open.pop(id(run))
        if record.changed or not self._changed_only:
            self._write(run, number, "before", before)
            if _matches(run, self._after):
                lines = section("record", lambda: record_text(record)) if "record" in self._contents else ()
                self._write(run, number, "after", self._text(run, "after", graph_module, last=lines))

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        """Dump the state at the failure, with the error."""
        number, before = self._open.pop(id(run))
        self._write(run, number, "before", before)
        if _matches(run, self._failed):
            lines = section("failure", lambda: _failure(error))
            self._write(run, number, "failed", self._text(run, "failed", graph_module, first=lines))

    def _text(
        self, run: PassRun, when: str, graph_module: GraphModule, first: Iterable[str] = (), last: Iterable[str] = ()
    ) -> str:
        title = f"{'undoing ' if run.reverse else ''}{run.name}"
        title += "" if run.index is None else f", pass {run.index} of a composition"
        head = f"{_FIRST_LINE}: {without_addresses(title)}, {when}"
        return "\n".join([head, "", *first, *sections(graph_module, self._contents), *last])

    def _write(self, run: PassRun, number: int, when: str, text: str | None) -> None:
        if text is None:
            return
        name = f"{'undo-' if run.reverse else ''}{run.name}"
        path = self.directory / f"{number:03}_{safe_name(name)}.{when}.txt"
        try:
            if not self.files:
                for earlier in _check_directory(self.directory, self._replace):
                    earlier.unlink()
                self.directory.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
                file.write(text)
        except OSError as error:
            raise PreconditionError(
                f"the dump {path} cannot be written: {type(error).__name__}: {error}. Expected a writable directory of "
                "its own: give Dumps another one, or run without it",
                pass_name=run.name,
                index=run.index,
            ) from error
        self.files.append(path)


def _check_contents(contents: object) -> None:
    expected = f"expected some of {', '.join(map(repr, CONTENTS))}"
    if isinstance(contents, str) or not isinstance(contents, Collection):
        raise PreconditionError(f"contents is {contents!r}, {expected}, in a list")
    unknown = [repr(name) for name in contents if name not in CONTENTS]
    if unknown or not contents:
        raise PreconditionError(f"contents has {', '.join(unknown) or 'nothing'}, {expected}")


def _patterns(option: str, selection: object) -> tuple[str, ...]:
    """Return the patterns of pass names that an option selects."""
    if isinstance(selection, bool):
        return ("*",) if selection else ()
    names = [selection] if isinstance(selection, str) else selection
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise PreconditionError(
            f"{option} is {selection!r}, expected True for all passes, False for none, a name, or a list of names"
        )
    return tuple(names)


def _matches(run: PassRun, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(run.name, pattern) for pattern in patterns)


def _failure(error: BaseException | None) -> Iterator[str]:
    while error is not None:
        yield from without_addresses(f"{type(error).__name__}: {error}").splitlines()
        error = error.__cause__
        if error is not None:
            yield "caused by"


def _is_dump(path: Path) -> bool:
    """Return whether a file is a dump, judging by its name and first line."""
    if not _FILE_NAME.fullmatch(path.name) or path.is_symlink() or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().startswith(_FIRST_LINE)


def _check_directory(directory: Path, replace: bool) -> list[Path]:
    """Return the dumps of an earlier run; refuse other files, and dumps that are not to be replaced."""
    dumps = own_files(directory, "a new or empty directory for dumps", _is_dump)
    if dumps and not replace:
        raise PreconditionError(
            f"{directory} holds {len(dumps)} dumps of an earlier run, expected a new or empty directory: give another "
            "path, delete them, or let Dumps delete them by replace=True"
        )
    return dumps
