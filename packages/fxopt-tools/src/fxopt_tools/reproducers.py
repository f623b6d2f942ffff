"""`Reproducers`: a file for each pass that fails, with all that it takes to see it fail again."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxopt_core import FxoptError, Instrument, PassRun, PreconditionError, Record, Transformation, registry
from fxopt_tools.data_values import DataWriter, function_name
from fxopt_tools.dumps import safe_name
from fxopt_tools.graph_data import placeholder_values
from fxopt_tools.inputs import OneInput, read_inputs
from fxopt_tools.module_data import module_data
from fxopt_tools.rendering import graph_code, graph_table, module_tree, section, without_addresses
from fxopt_tools.reproducer_files import Contents, check_directory, write_file
from fxopt_tools.verification import check_tolerances


@dataclass
class _Before:
    """A graph module before a pass: as data, or why it cannot be; and its text."""

    writer: DataWriter
    modules: list[dict[str, Any]] | None
    inputs: list[Any]
    text: str
    notes: list[str] = field(default_factory=list)
    versions: list[tuple[Tensor, int]] = field(default_factory=list)


class Reproducers(Instrument):
    """Writes a file for each pass that fails, with all that it takes to see it fail again.

    A pass fails where it raises, and where an instrument that was entered after this one vetoes it or raises, `Verify`
    above all. The file number 3 of a directory is ``003_merge-linears.reproducer.zip``. It holds the graph right before
    the pass with its modules and tensors, the pass with its options, the inputs, and the failure; `reproduce` runs it
    again, and so does ``python 003_merge-linears.reproducer.zip``.

    What the graph consists of is noted before each pass, tensors by reference, so that they stay in memory as long as
    the pass runs. Left out are records and marks of earlier passes, hooks, and guards of ``torch.export``. Undoing has
    no reproducer, since it depends on the records.

    The directory is made with the first file. It may hold reproducers of earlier runs, and nothing else; no file is
    ever overwritten, and none is left unfinished.

    Attributes:
        directory: where the files are.
        files: the files that were written, in order.

    >>> import tempfile
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
        """Prepare to write.

        Args:
            directory: where to; it is made, with its parents, where it is missing.
            inputs: what `Verify` is given, so that a failed verification can be reproduced.
            rtol: the tolerance that it is given.
            atol: the tolerance that it is given.

        Raises:
            PreconditionError: The directory is a file or holds other files, or an argument makes no sense.
        """
        check_tolerances(rtol, atol)
        self.directory = Path(directory)
        self.files: list[Path] = []
        self._inputs = [] if inputs is None else read_inputs(inputs)
        self._tolerances = rtol, atol
        self._open: dict[int, _Before] = {}  # by the run's id: a pass may call another one
        check_directory(self.directory)

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        """Note what the graph consists of."""
        if not run.reverse:
            self._open[id(run)] = _before(graph_module, self._inputs)

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
        """Forget it."""
        self._open.pop(id(run), None)

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        """Write the file.

        Raises:
            PreconditionError: It cannot be written.
        """
        before = self._open.pop(id(run), None)
        if before is not None and isinstance(error, Exception):  # an interrupt is no failure of the pass
            contents = _contents(before, run.transformation, run.index, error, self._tolerances)
            self.files.append(_write(self.directory, run.name, contents))


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
    """Write a reproducer of what a pass, or a composition, made of a graph module.

    Args:
        directory: where to, as for `Reproducers`.
        graph_module: what it was called with, as it was before; an error of a pass has rolled it back.
        transformation: the pass.
        error: what it raised, or a `VerificationError` that says what was wrong with its result.
        inputs: what the result was verified on.
        rtol: the tolerance with which it was.
        atol: the tolerance with which it was.

    Returns:
        The file.

    Raises:
        PreconditionError: The file cannot be written, or an argument makes no sense.
    """
    check_tolerances(rtol, atol)
    path = Path(directory)
    check_directory(path)
    before = _before(graph_module, [] if inputs is None else read_inputs(inputs))
    return _write(path, transformation.name, _contents(before, transformation, None, error, (rtol, atol)))


def failure_of(error: BaseException) -> dict[str, str]:
    """Return kind and message of a failure; those of core's own that chain a cause are that cause."""
    cause = error.__cause__ if type(error).__name__ == "PassError" and error.__cause__ is not None else error
    kind = type(cause).__name__
    kind = "VerificationError" if kind == "VetoError" else kind
    return {"kind": kind, "message": "\n".join(without_addresses(str(cause)).splitlines()[:20])}


def _before(graph_module: GraphModule, inputs: Sequence[Any]) -> _Before:
    text = "\n".join(
        [
            *section(f"graph: {len(graph_module.graph.nodes)} nodes", lambda: graph_table(graph_module)),
            *section("code", lambda: graph_code(graph_module)),
            *section("modules", lambda: module_tree(graph_module)),
        ]
    )
    before = _Before(DataWriter(), None, [], text)
    try:
        before.modules = module_data(graph_module, before.writer, before.notes)
        before.writer.check_objects()
    except FxoptError as error:
        before.modules, before.writer = None, DataWriter()
        before.notes.append(f"the graph cannot be built again: {error}")
    for item in inputs:
        try:
            before.inputs.append(before.writer.write(placeholder_values(graph_module, item)))
        except FxoptError as error:  # of an inner pass on another graph module, say
            before.notes.append(f"inputs are left out: {error}")
    tensors = before.writer.tensors.items
    before.versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]
    return before


def _contents(
    before: _Before,
    transformation: Transformation,
    index: int | None,
    error: Exception,
    tolerances: tuple[float | None, float | None],
) -> Contents:
    failure, notes = failure_of(error), list(before.notes)
    if any(tensor._version != version for tensor, version in before.versions):
        notes.append("the pass wrote tensors in place before it failed: the file has what it wrote")
    data = {
        "pass": {"name": transformation.name, "index": index, **_described(transformation, before.writer, notes)},
        "failure": failure,
        "modules": before.modules,
        "inputs": before.inputs,
        "tolerances": list(tolerances),
        "notes": notes,
        "versions": _versions(),
    }
    title = f"# fxopt reproducer: {transformation.name}"
    lines = [title, f"{failure['kind']}: {failure['message']}", *(f"note: {note}" for note in notes), "", before.text]
    return Contents(data, before.writer, "\n".join(lines))


def _described(transformation: Transformation, writer: DataWriter, notes: list[str]) -> dict[str, Any]:
    """Return how to make a pass again: by pipeline text where it is registered, and by its class."""
    found: dict[str, Any] = {"text": None, "class": None, "options": None}
    try:
        found["text"] = registry().pipeline_text(transformation)
    except FxoptError:
        found["class"] = function_name(type(transformation))
        found["options"] = writer.write(dict(transformation.options))
    if found["text"] is None and found["class"] is None:
        notes.append("the pass cannot be imported by its name: give it to reproduce() as transformation=")
    return found


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": str(torch.__version__)}
    for name in ("fxopt-core", "fxopt-tools"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # it runs from its sources
            found[name] = "unknown"
    return found


def _write(directory: Path, name: str, contents: Contents) -> Path:
    """Write a file under the next free number.

    Raises:
        PreconditionError: It cannot be written.
    """
    number = check_directory(directory)
    while True:
        path = directory / f"{number:03}_{safe_name(name)}.reproducer.zip"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            write_file(path, contents)
        except FileExistsError:  # another process was faster
            number += 1
        except Exception as error:  # of the file system, or of pickling what has no other form
            raise PreconditionError(
                f"the reproducer {path} cannot be written: {type(error).__name__}: {error}. Expected a directory that "
                "can be written to, and a graph of values that can be pickled"
            ) from error
        else:
            return path
