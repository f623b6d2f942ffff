"""SOURCE as a graph with inputs, for commands that work on graphs."""

from __future__ import annotations

from torch.fx import GraphModule

from fxopt.commands.model_inputs import inputs_for
from fxopt.commands.progress import Steps
from fxopt.commands.sources import graph_of, read_source
from fxopt_tools import Inputs


def captured_source(
    step: Steps, text: str, inputs: str | None, seed: int, *, run_pickled_code: bool = False
) -> tuple[GraphModule, list[Inputs]]:
    """Return the graph of a source, and its inputs; the steps "reading" and "capturing" are announced.

    Raises:
        CommandError: There is no such source or file of inputs, or the model cannot be captured.
    """
    step("reading")
    source = read_source(text, run_pickled_code=run_pickled_code)
    calls = inputs_for(source, inputs, seed, run_pickled_code=run_pickled_code)
    step("capturing")
    return graph_of(source, calls[0]), calls
