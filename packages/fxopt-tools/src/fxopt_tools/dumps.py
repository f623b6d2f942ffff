"""`Dumps`: the graph before and after each pass, as text files."""

from __future__ import annotations

from os import PathLike
from pathlib import Path

from torch.fx import GraphModule

from fxopt_core import Instrument, PassRun, PreconditionError, Record


class Dumps(Instrument):
    """Writes the graph before and after each pass that changes it or fails, as numbered text files.

    Run 3 leaves ``003_merge-linears.before.txt`` and ``003_merge-linears.after.txt``, or ``.failed.txt`` with the state
    at the failure, before it is rolled back. Undoing is ``003_undo-merge-linears``.

    Attributes:
        directory: where the files are.
        files: the files that were written, in order.

    >>> import tempfile, torch
    >>> from fxopt_core import Transformation, instrumented
    >>> class DropRelu(Transformation):
    ...     def transform(self, graph_module):
    ...         relu = next(node for node in graph_module.graph.nodes if node.target is torch.relu)
    ...         relu.replace_all_uses_with(relu.args[0])
    ...         return graph_module
    >>> class Model(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.relu(x)
    >>> with tempfile.TemporaryDirectory() as directory, instrumented(dumps := Dumps(directory)):
    ...     _ = DropRelu()(torch.fx.symbolic_trace(Model()))
    >>> [file.name for file in dumps.files]
    ['000_drop-relu.before.txt', '000_drop-relu.after.txt']
    """

    may_veto = False

    def __init__(self, directory: str | PathLike[str]) -> None:
        """Prepare for dumping into a directory; it is made, with its parents, if missing.

        Raises:
            PreconditionError: It is a file, or holds files.
        """
        self.directory = Path(directory)
        self.files: list[Path] = []
        self._open: dict[int, tuple[int, str]] = {}  # by the run's id, since a pass may call another
        self._runs = 0
        if self.directory.is_file() or (self.directory.is_dir() and any(self.directory.iterdir())):
            raise PreconditionError(
                f"{directory} is a file or holds files, expected a new or empty directory for dumps"
            )

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        """Keep the text of the graph."""
        self._open[id(run)] = self._runs, str(graph_module.graph)
        self._runs += 1

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
        """Write what the pass changed."""
        number, before = self._open.pop(id(run))
        if record.changed:
            self._write(run, number, before=before, after=str(graph_module.graph))

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        """Write the state at the failure, with the error."""
        number, before = self._open.pop(id(run))
        self._write(run, number, before=before, failed=f"{type(error).__name__}: {error}\n\n{graph_module.graph}")

    def _write(self, run: PassRun, number: int, **texts: str) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        for when, text in texts.items():
            path = self.directory / f"{number:03}_{'undo-' if run.reverse else ''}{run.name}.{when}.txt"
            path.write_text(text, encoding="utf-8")
            self.files.append(path)
