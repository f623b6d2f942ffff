"""What the commands that measure have in common: a pipeline and a captured model, given to a function of the tools."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fxopt.commands.exit_codes import ExitCode
from fxopt.commands.failures import blaming
from fxopt.commands.terminal import Terminal

if TYPE_CHECKING:
    from fxopt_tools import Ratio

Result = TypeVar("Result")

RoundsOption = Annotated[int, typer.Option("--rounds", min=8, help="How often each variant is measured.")]

_STEPS = {"loading torch": 3.0, "reading": 4.0, "capturing": 6.0, "measuring": 20.0}


@dataclass(frozen=True)
class Measurement:
    """What to measure: options of a command, as they were given."""

    source: str
    pipeline: str
    inputs: str | None
    seed: int
    rounds: int
    run_pickled_code: bool

    def made_by(self, terminal: Terminal, measure: Callable[..., Result], **options: Any) -> Result:
        """Return what a function that is called like `fxopt_tools.bench` makes of it.

        Raises:
            CommandError: There is no such source or pass, the model cannot be captured, or a pass fails.
        """
        with terminal.steps(_STEPS) as step:
            step("loading torch")
            from fxopt.commands.captured_sources import captured_source
            from fxopt_core import registry

            transformation = registry().pipeline(self.pipeline)
            opened = self.run_pickled_code
            graph_module, calls = captured_source(step, self.source, self.inputs, self.seed, run_pickled_code=opened)
            step("measuring")
            with blaming(ExitCode.PASS):
                settings = {"rounds": self.rounds, "seed": self.seed, "progress": step.part}
                return measure(graph_module, transformation, calls, **settings, **options)


def ratio_data(ratio: Ratio) -> dict[str, float]:
    """Return a ratio for scripts."""
    return {"median": ratio.median, "low": ratio.low, "high": ratio.high}
