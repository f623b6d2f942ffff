"""`Dumps`: the graph module before and after passes, as numbered text files."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Literal, TypeAlias

from torch.fx import GraphModule

from fxopt_core import Instrument, PassRun, PreconditionError, Record
from fxopt_tools.rendering import graph_code, graph_table, module_tree, record_text, section, without_addresses

Selection: TypeAlias = bool | str | Collection[str]
"""True for all passes, False for none, or names of passes; ``*`` and ``?`` in a name stand for any letters."""
Content = Literal["graph", "code", "modules", "record"]
CONTENTS: tuple[Content, ...] = ("graph", "code", "modules", "record")

_FIRST_LINE = "# fxopt dump"
_FILE_NAME = re.compile(r"\d{3,}_[\w.-]+\.(before|after|failed)\.txt")
_LONGEST_NAME = 80
_LISTED = 5


@dataclass
class _Open:
    """A run that is under way: its number, and the dump from before it, where that may have to be written yet."""

    number: int
    before: str | None


class Dumps(Instrument):
    """Writes the graph module before and after passes into files, and what was left of it where a pass failed.

    The files of the run number 3 under this instrument, counted from 0 over all passes whether dumped or not, are
    ``003_merge-linears.before.txt``, ``003_merge-linears.after.txt`` and, where it raised or was vetoed,
    ``003_merge-linears.failed.txt``, which shows the state at the failure, before it is rolled back. Where a pass is
    being undone, ``undo-`` stands before its name. Each file has the nodes as a table, the code, the modules with their
    parameters, and what the pass rewrote and refused. It holds no addresses and no times, so that the dumps of two
    processes can be compared.

    The directory is made with the first dump. It has to be new or empty: nothing is ever written into a directory that
    holds other files, and no file is ever overwritten.

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
        """Prepare to dump.

        Args:
            directory: where to; it is made, with its parents, where it is missing.
            before: the passes before which to dump.
            after: the passes after which to dump.
            failed: the passes of which to dump a failure.
            changed_only: whether to leave out passes that changed nothing.
            contents: what a file holds, of "graph", "code", "modules" and "record".
            replace: whether dumps of an earlier run that lie in the directory are deleted with the first new one.

        Raises:
            PreconditionError: The directory is a file or holds other files, or an argument makes no sense.
        """
        _check_contents(contents)
        for option, selection in (("before", before), ("after", after), ("failed", failed)):
            _check_selection(option, selection)
        self.directory = _path(directory)
        self.files: list[Path] = []
        self._before, self._after, self._failed = before, after, failed
        self._changed_only, self._replace = changed_only, replace
        self._contents = tuple(name for name in CONTENTS if name in contents)
        self._open: dict[int, _Open] = {}  # by the run's id: a pass may call another one
        self._next = 0
        _check_directory(self.directory, replace)

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        """Dump what is there.

        Raises:
            PreconditionError: The file cannot be written.
        """
        opened = _Open(self._next, None)
        self._next += 1
        if _selected(run, self._before):
            opened.before = self._text(run, "before", graph_module)
            if not self._changed_only:
                self._write_before(run, opened)
        self._open[id(run)] = opened

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
        """Dump what came out, with the record.

        Raises:
            PreconditionError: The file cannot be written.
        """
        opened = self._open.pop(id(run))
        if record.changed or not self._changed_only:
            self._write_before(run, opened)
            if _selected(run, self._after):
                self._write(run, opened, "after", self._text(run, "after", graph_module, record))

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        """Dump what is there, with the error.

        Raises:
            PreconditionError: The file cannot be written.
        """
        opened = self._open.pop(id(run))
        self._write_before(run, opened)
        if _selected(run, self._failed):
            self._write(run, opened, "failed", self._text(run, "failed", graph_module, error=error))

    def _text(
        self,
        run: PassRun,
        when: str,
        graph_module: GraphModule,
        record: Record | None = None,
        error: BaseException | None = None,
    ) -> str:
        lines = [f"{_FIRST_LINE}: {_title(run)}, {when}", ""]
        if error is not None:
            lines += section("failure", lambda: _failure(error))
        if "graph" in self._contents:
            lines += section(f"graph: {len(graph_module.graph.nodes)} nodes", partial(graph_table, graph_module))
        if "code" in self._contents:
            lines += section("code", partial(graph_code, graph_module))
        if "modules" in self._contents:
            lines += section("modules", partial(module_tree, graph_module))
        if "record" in self._contents and record is not None:
            lines += section("record", partial(record_text, record))
        return "\n".join(lines)

    def _write_before(self, run: PassRun, opened: _Open) -> None:
        if opened.before is not None:
            text, opened.before = opened.before, None
            self._write(run, opened, "before", text)

    def _write(self, run: PassRun, opened: _Open, when: str, text: str) -> None:
        name = f"{'undo-' if run.reverse else ''}{run.name}"
        path = self.directory / f"{opened.number:03}_{safe_name(name)}.{when}.txt"
        try:
            if not self.files:
                _prepare(self.directory, self._replace)
            with path.open("x", encoding="utf-8", errors="backslashreplace", newline="\n") as file:
                file.write(text)
        except OSError as error:
            raise PreconditionError(
                f"the dump {path} cannot be written: {type(error).__name__}: {error}. Expected a directory of its own "
                "that can be written to: give Dumps another one, or run without it",
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


def _check_selection(option: str, selection: object) -> None:
    names = [selection] if isinstance(selection, bool | str) else selection
    if not isinstance(names, Collection) or not all(isinstance(name, bool | str) for name in names):
        raise PreconditionError(
            f"{option} is {selection!r}, expected True for all passes, False for none, a name, or a list of names"
        )


def _path(directory: object) -> Path:
    if isinstance(directory, str | PathLike) and str(directory):
        return Path(directory)
    raise PreconditionError(f"directory is {directory!r}, expected the path of a directory of its own for dumps")


def _selected(run: PassRun, selection: Selection) -> bool:
    if isinstance(selection, bool):
        return selection
    names = [selection] if isinstance(selection, str) else selection
    return any(fnmatchcase(run.name, name) for name in names)


def _title(run: PassRun) -> str:
    what = f"undoing {run.name}" if run.reverse else run.name
    place = "" if run.index is None else f", pass {run.index} of a composition"
    return without_addresses(f"{what}{place}")


def _failure(error: BaseException) -> Iterator[str]:
    while True:
        yield from without_addresses(f"{type(error).__name__}: {error}").splitlines()
        if error.__cause__ is None:
            return
        error = error.__cause__
        yield "caused by"


def safe_name(name: str) -> str:
    """Return what is left of a name in letters, digits, dots and dashes; others stand as dashes."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "replace").decode()
    return re.sub(r"[^A-Za-z0-9._-]+", "-", plain)[:_LONGEST_NAME] or "pass"


def _is_dump(path: Path) -> bool:
    """Return whether a file is a dump, by its name and its first line."""
    if not _FILE_NAME.fullmatch(path.name) or path.is_symlink() or not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return file.readline().startswith(_FIRST_LINE)


def _check_directory(directory: Path, replace: bool) -> list[Path]:
    """Return the dumps of an earlier run in a directory.

    Raises:
        PreconditionError: It is a file, or holds anything else, or such dumps and they are not to be replaced.
    """
    if not directory.is_dir():
        if directory.exists() or directory.is_symlink():
            raise PreconditionError(f"{directory} is a file, expected a directory for dumps: give another path")
        return []
    found = sorted(directory.iterdir())
    dumps = [path for path in found if _is_dump(path)]
    if len(dumps) < len(found):
        others = _listed(path.name for path in found if path not in set(dumps))
        raise PreconditionError(
            f"{directory} holds other files ({others}), expected a new or empty directory for dumps: give another path"
        )
    if dumps and not replace:
        raise PreconditionError(
            f"{directory} holds {len(dumps)} dumps of an earlier run, expected a new or empty directory: give another "
            "path, delete them, or let Dumps delete them by replace=True"
        )
    return dumps


def _prepare(directory: Path, replace: bool) -> None:
    for path in _check_directory(directory, replace):
        path.unlink()
    directory.mkdir(parents=True, exist_ok=True)


def _listed(names: Iterable[str]) -> str:
    shown = list(names)
    return ", ".join(shown[:_LISTED]) + (", ..." if len(shown) > _LISTED else "")
