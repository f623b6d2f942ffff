"""`reproduce`: run a reproducer to see whether the pass still fails."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from torch.fx import GraphModule

from fxopt_core import PassError, PreconditionError, Transformation, instrumented, registry
from fxopt_tools.inputs import Inputs, OneInput
from fxopt_tools.reproducers.module_data import DataReader, read_graph_module
from fxopt_tools.reproducers.write import failure_of
from fxopt_tools.reproducers.zip_files import read_file
from fxopt_tools.verification.instrument import Verify

Verdict = Literal["reproduced", "another-failure", "no-failure"]


@dataclass(frozen=True)
class Reproduction:
    """The result of running a reproducer; true if the failure is still there.

    Attributes:
        verdict: "reproduced" if the pass fails in the same way; "another-failure", or "no-failure".
        pass_name: the pass.
        expected: the recorded failure, as kind and message.
        found: the failure that happened now, or None.
        notes: what the file lacks, according to its notes.
        graph_module: the result of the pass, or the graph module before it if the pass failed.
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
    """Run the pass of a reproducer on its graph again.

    Args:
        path: a file that `Reproducers` or `write_reproducer` wrote.
        transformation: the pass to run instead of the one in the file: one that is fixed, or that cannot be imported.
        trusted: whether to import what the file names and to unpickle its objects. That can run any code: do so only
            if you trust whoever wrote it. By default, only passes of installed families, modules of torch.nn and
            functions of torch are used.

    Raises:
        PreconditionError: The file cannot be read, or needs trust that was not given, or holds no graph.
        RegistryError: Its pass is not installed here.
    """
    data, reader = read_file(Path(path), trusted=trusted)
    try:
        notes, name = tuple(map(str, data["notes"])), str(data["pass"]["name"])
        if data["modules"] is None:
            raise PreconditionError(f"{path} holds no graph, but only its text: {'; '.join(notes)}")
        graph_module = read_graph_module(data["modules"], reader)
        inputs: list[OneInput] = [Inputs(*reader.read(values)) for values in data["inputs"]]
        expected, tolerances = data["failure"], data["tolerances"]
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise PreconditionError(f"{path} is damaged: {type(error).__name__}: {error}") from error
    transformation, failure = transformation or _transformation(data["pass"], reader), None
    verdict: Verdict = "no-failure"
    try:
        with instrumented(*([Verify(inputs, rtol=tolerances[0], atol=tolerances[1])] if inputs else [])):
            graph_module = transformation(graph_module)
    except PassError as error:
        failure = failure_of(error)
        verdict = "reproduced" if failure["kind"] == expected["kind"] else "another-failure"
    found = None if failure is None else _text(failure)
    return Reproduction(verdict, name, _text(expected), found, notes, graph_module)


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
    made = reader.read({"name": data["class"]})(**reader.read(data["options"]))
    if not isinstance(made, Transformation):
        raise PreconditionError(f"{data['class']} of the file is not a pass; {remedy}")
    return made


def _text(failure: dict[str, str]) -> str:
    return f"{failure['kind']}: {failure['message']}"
