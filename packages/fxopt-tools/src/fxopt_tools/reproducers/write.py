"""`Reproducers`: a file for each pass that fails, with everything needed to see it fail again."""

from __future__ import annotations

import importlib.metadata
import pickle
import platform
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from torch.fx import GraphModule

from fxopt_core import FxoptError, Instrument, PassError, PassRun, PreconditionError, Record, Transformation, registry
from fxopt_core.errors import VetoError
from fxopt_core.values.names import describe
from fxopt_tools.inputs import Inputs, OneInput, read_inputs, version_of
from fxopt_tools.output_directory import safe_name
from fxopt_tools.reproducers.module_data import DataWriter, function_name, module_data, placeholder_values
from fxopt_tools.reproducers.zip_files import check_directory, write_file
from fxopt_tools.verification.bounds import check_tolerances
from fxopt_tools.watch.graph_text import sections, without_addresses


class _Before:
    """A graph module before a pass: as text, and as data if it has such a form; the notes say why not."""

    def __init__(self, graph_module: GraphModule, inputs: Sequence[Inputs]) -> None:
        self._text = "\n".join(sections(graph_module))
        self._notes: list[str] = []
        self._writer = DataWriter()
        self._modules: list[Any] | None = None
        try:
            self._modules = module_data(graph_module, self._writer, self._notes)
            for item in self._writer.objects:
                _check_pickling(item)
        except FxoptError as error:
            self._modules, self._writer = None, DataWriter()
            self._notes.append(f"the graph cannot be built again: {error}")
        self._inputs: list[Any] = []
        for item in inputs:
            try:
                self._inputs.append(self._writer.write(placeholder_values(graph_module, item)))
            except FxoptError as error:  # for example of an inner pass on another graph module
                self._notes.append(f"inputs are left out: {error}")
        self._versions = [(tensor, version_of(tensor)) for tensor in self._writer.tensors]

    def write(
        self,
        directory: Path,
        transformation: Transformation,
        error: Exception,
        tolerances: tuple[float | None, float | None],
        index: int | None = None,
    ) -> Path:
        """Write a file about a failure."""
        name, failure, notes = transformation.name, failure_of(error), list(self._notes)
        if any(version_of(tensor) != version for tensor, version in self._versions):
            notes.append("the pass wrote to tensors in place before it failed: the file has the new values")
        described = self._described(transformation)
        if described["text"] is None and described["class"] is None:
            notes.append("the pass cannot be imported by its name: give it to reproduce() as transformation=")
        versions = {each: importlib.metadata.version(each) for each in ("torch", "fxopt-core", "fxopt-tools")}
        data = {
            "pass": {"name": name, "index": index, **described},
            "failure": failure,
            "modules": self._modules,
            "inputs": self._inputs,
            "tolerances": list(tolerances),
            "notes": notes,
            "versions": {"python": platform.python_version(), **versions},
        }
        first = [f"# fxopt reproducer: {name}", f"{failure['kind']}: {failure['message']}"]
        text = "\n".join([*first, *(f"note: {note}" for note in notes), "", self._text])
        return self._write_numbered(directory, name, data, text)

    def _described(self, transformation: Transformation) -> dict[str, Any]:
        """Return how to make a pass again: by its pipeline text if it is registered, or else by its class."""
        try:
            return {"text": registry().pipeline_text(transformation), "class": None, "options": None}
        except FxoptError:
            options = self._writer.write(dict(transformation.options))
            return {"text": None, "class": function_name(type(transformation)), "options": options}

    def _write_numbered(self, directory: Path, name: str, data: dict[str, Any], text: str) -> Path:
        """Write a file under the next free number."""
        number = check_directory(directory)
        while True:
            path = directory / f"{number:03}_{safe_name(name)}.reproducer.zip"
            try:
                directory.mkdir(parents=True, exist_ok=True)
                write_file(path, data, self._writer, text)
            except FileExistsError:  # another process has taken the number
                number += 1
            except Exception as error:  # of the file system, or of pickling an object
                raise PreconditionError(
                    f"the reproducer {path} cannot be written: {type(error).__name__}: {error}. Expected a writable "
                    "directory, and a graph of values that can be pickled"
                ) from error
            else:
                return path


def _check_pickling(value: object) -> None:
    try:
        pickle.dumps(value)
    except Exception as error:
        raise PreconditionError(f"{describe(value)} can be neither named nor pickled: {error}") from error


class Reproducers(Instrument):
    """Writes a file for each pass that fails, with everything needed to see it fail again.

    A pass fails if it raises, or if an instrument entered after this one, usually `Verify`, vetoes it or raises. File 3
    of a directory is ``003_merge-linears.reproducer.zip``. It holds the graph right before the pass with its modules
    and tensors, the pass with its options, the inputs, and the failure. Run it again with `reproduce`, or with
    ``python 003_merge-linears.reproducer.zip``. Undoing has no reproducer, since it depends on records, which are left
    out, as are marks of earlier passes, hooks, and guards of ``torch.export``.

    The directory is made with the first file. It may contain only reproducers; no file is ever overwritten, and none is
    left unfinished. Tensors before a pass stay in memory while it runs.

    Attributes:
        directory: where the files are.
        files: the files that were written, in order.

    >>> import tempfile, torch
    >>> from fxopt_core import PassError, instrumented
    >>> class Fails(Transformation):
    ...     def transform(self, graph_module):
    ...         raise ValueError("no luck")
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     reproducers = Reproducers(directory)
    ...     try:
    ...         with instrumented(reproducers):
    ...             _ = Fails()(torch.fx.symbolic_trace(torch.nn.ReLU()))
    ...     except PassError:
    ...         print([file.name for file in reproducers.files])
    ['000_fails.reproducer.zip']
    """

    may_veto = False

    def __init__(
        self,
        directory: str | PathLike[str],
        *,
        inputs: OneInput | Sequence[OneInput] | None = None,
        rtol: float | None = None,
        atol: float | None = None,
    ) -> None:
        """Prepare for writing.

        Args:
            directory: where to write; it is made, with its parents, if missing.
            inputs: those of `Verify`, so that a failed verification can be reproduced.
            rtol: that of `Verify`.
            atol: that of `Verify`.

        Raises:
            PreconditionError: The directory is a file or holds other files, or an argument is invalid.
        """
        check_tolerances(rtol, atol)
        self.directory = Path(directory)
        self.files: list[Path] = []
        self._inputs = [] if inputs is None else read_inputs(inputs)
        self._tolerances = rtol, atol
        self._open: dict[int, _Before] = {}  # by the run's id: a pass may call another one
        check_directory(self.directory)

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        """Record the graph."""
        if not run.reverse:
            self._open[id(run)] = _Before(graph_module, self._inputs)

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
        """Forget the graph: nothing failed."""
        self._open.pop(id(run), None)

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        """Write the file; it is a `PreconditionError` if that cannot be done."""
        before = self._open.pop(id(run), None)
        if before is not None and isinstance(error, Exception):  # an interrupt is no failure of the pass
            assert isinstance(run.transformation, Transformation)  # a call knows it by its protocol alone
            self.files.append(before.write(self.directory, run.transformation, error, self._tolerances, run.index))


def write_reproducer(
    directory: str | PathLike[str],
    graph_module: GraphModule,
    transformation: Transformation,
    error: Exception,
    *,
    inputs: OneInput | Sequence[OneInput] | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Path:
    """Write a reproducer for a pass, or a composition, that failed on a graph module.

    Args:
        directory: where to write, as for `Reproducers`.
        graph_module: the graph module in its state before the pass; if the pass raised, it has been rolled back.
        transformation: the pass.
        error: what it raised, or a `VerificationError` that says what was wrong with its result.
        inputs: what the result was verified on.
        rtol: the relative tolerance of that verification.
        atol: the absolute tolerance of that verification.

    Returns:
        The file.

    Raises:
        PreconditionError: The file cannot be written, or an argument is invalid.
    """
    check_tolerances(rtol, atol)
    path = Path(directory)
    check_directory(path)
    before = _Before(graph_module, [] if inputs is None else read_inputs(inputs))
    return before.write(path, transformation, error, (rtol, atol))


def failure_of(error: BaseException) -> dict[str, str]:
    """Return kind and message of a failure: those of the cause, if core wrapped what a pass raised into a `PassError`.

    A veto counts as a failed verification, which is what a reproducer finds when it runs `Verify`.
    """
    cause = error.__cause__ if type(error) is PassError and error.__cause__ is not None else error
    kind = "VerificationError" if isinstance(cause, VetoError) else type(cause).__name__
    return {"kind": kind, "message": "\n".join(without_addresses(str(cause)).splitlines()[:20])}
