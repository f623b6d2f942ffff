"""`reproduce`: run a reproducer, and say whether the pass still fails."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from torch.fx import GraphModule

from fxopt_core import (
    Instrument,
    InstrumentProtocol,
    PassError,
    PassRun,
    PreconditionError,
    Transformation,
    instrumented,
    registry,
)
from fxopt_tools.data_values import DataReader
from fxopt_tools.inputs import Inputs
from fxopt_tools.instrument import Verify
from fxopt_tools.module_data import read_modules
from fxopt_tools.reproducer_files import read_file
from fxopt_tools.reproducers import failure_of

Verdict = Literal["reproduced", "another-failure", "no-failure"]


@dataclass(frozen=True)
class Reproduction:
    """What running a reproducer gave; true if the failure is still there.

    Attributes:
        verdict: "reproduced", where the pass fails in the same way; "another-failure", or "no-failure".
        pass_name: the pass.
        expected: the failure that the file is about, as kind and message.
        found: the failure that happened now, or None.
        notes: what the file says that it lacks.
        graph_module: the graph module: as it was before the pass where that failed, and what became of it otherwise.
    """

    verdict: Verdict
    pass_name: str
    expected: str
    found: str | None
    notes: tuple[str, ...]
    graph_module: GraphModule

    def __bool__(self) -> bool:
        """Return whether the failure is still there."""
        return self.verdict == "reproduced"

    def __str__(self) -> str:
        """Return the verdict, with both failures."""
        lines = [f"{self.pass_name}: {self.verdict}", f"  expected: {self.expected}", f"  found: {self.found or '-'}"]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def reproduce(
    path: str | PathLike[str], *, transformation: Transformation | None = None, trusted: bool = False
) -> Reproduction:
    """Run the pass of a reproducer on its graph once more.

    Args:
        path: a file that `Reproducers` or `write_reproducer` wrote.
        transformation: the pass to run in place of the one in the file: one that is mended, or that cannot be imported.
        trusted: whether to import what the file names, and to open what it has pickled. That can run any code: do so
            only if you trust whoever wrote it. Without, only passes of installed families, modules of torch.nn and
            functions of torch are used.

    Raises:
        PreconditionError: The file cannot be read, or is not to be trusted, or holds no graph.
        RegistryError: Its pass is not installed here.
    """
    data, reader = read_file(Path(path), trusted=trusted)
    try:
        notes, name = tuple(map(str, data["notes"])), str(data["pass"]["name"])
        if data["modules"] is None:
            raise PreconditionError(f"{path} holds no graph, but only its text: {'; '.join(notes)}")
        graph_module = read_modules(data["modules"], reader)
        inputs = [Inputs(*reader.read(values)) for values in data["inputs"]]
        expected, tolerances = data["failure"], data["tolerances"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PreconditionError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    transformation = transformation or _transformation(data["pass"], reader)
    result, failure = _run(transformation, graph_module, inputs, tolerances)
    verdict: Verdict = "no-failure"
    if failure is not None:
        verdict = "reproduced" if failure["kind"] == expected["kind"] else "another-failure"
    return Reproduction(verdict, name, _text(expected), None if failure is None else _text(failure), notes, result)


def _transformation(data: Any, reader: DataReader) -> Transformation:
    if data["text"] is not None:
        return registry().pipeline(data["text"])
    remedy = f"give it as reproduce(..., transformation=...): pass `{data['name']}`"
    if data["class"] is None:
        raise PreconditionError(f"the file does not say how to make its pass; {remedy}")
    if not reader.trusted:
        raise PreconditionError(
            f"the pass of the file is {data['class']}, which is not registered. To import it, whatever it does, say "
            f"trusted=True, if you trust whoever wrote the file; or {remedy}"
        )
    made = reader.named(data["class"])(**reader.read(data["options"]))
    if not isinstance(made, Transformation):
        raise PreconditionError(f"{data['class']} of the file is no pass; {remedy}")
    return made


class _Catch(Instrument):
    """Keeps the first failure as it was raised."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        self.error = self.error or error


def _run(
    transformation: Transformation, graph_module: GraphModule, inputs: list[Inputs], tolerances: list[float | None]
) -> tuple[GraphModule, dict[str, str] | None]:
    """Return what became of a graph module, and the failure."""
    catch, rtol, atol = _Catch(), *tolerances
    instruments: list[InstrumentProtocol] = [catch]
    if inputs:
        instruments.append(Verify([*inputs], rtol=rtol, atol=atol))
    try:
        with instrumented(*instruments):
            return transformation(graph_module), None
    except PassError as error:
        return graph_module, failure_of(catch.error or error)


def _text(failure: dict[str, str]) -> str:
    return f"{failure['kind']}: {failure['message']}"
