"""Graph modules as archives: whole, or not there at all."""

from __future__ import annotations

from pathlib import Path

from torch.fx import GraphModule

from fxopt.commands.exit_codes import ExitCode
from fxopt.commands.failures import FileError, blaming
from fxopt_capture import save
from fxopt_capture.archive_call import guards_in
from fxopt_core import CaptureError, iter_nodes
from fxopt_tools import Inputs


def write_graph(
    graph_module: GraphModule, path: Path, inputs: Inputs | None = None, *, keep_history: bool = True
) -> int:
    """Save a graph module; whatever was at the path is there until the new file is complete.

    Args:
        graph_module: the graph module.
        path: the file.
        inputs: an example, for a graph that does not know the shapes of its inputs.
        keep_history: whether to save its own nodes and history too, or the program alone.

    Returns:
        The size of the file in bytes.

    Raises:
        CommandError: It cannot be saved, or not there.
    """
    with blaming(ExitCode.CAPTURE):
        try:
            if inputs is None or _knows_its_inputs(graph_module):
                save(graph_module, path, ledger=keep_history)
            else:
                save(graph_module, path, inputs.args, inputs.kwargs, ledger=keep_history)
        except CaptureError as error:
            if isinstance(error.__cause__, OSError):
                raise FileError(str(error)) from error
            raise CaptureError(str(error).replace("ledger=False", "--no-history")) from error
    return path.stat().st_size


def _knows_its_inputs(graph_module: GraphModule) -> bool:
    inputs = (node for node in iter_nodes(graph_module.graph) if node.op == "placeholder")
    return guards_in(graph_module) is not None or all("val" in node.meta for node in inputs)
