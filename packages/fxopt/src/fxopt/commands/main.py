"""The command `fxopt`: all of its commands, and how it starts."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Annotated

import typer

import fxopt
from fxopt.commands.bench import bench
from fxopt.commands.bisect import bisect
from fxopt.commands.export import export
from fxopt.commands.optimize import optimize
from fxopt.commands.passes import list_passes, show_pass
from fxopt.commands.show_history import show_history
from fxopt.commands.terminal import silence_libraries
from fxopt.commands.undo import undo
from fxopt.commands.verify import verify
from fxopt.commands.view import view

_COMMANDS: dict[str, Callable[..., None]] = {
    "list": list_passes,
    "show": show_pass,
    "optimize": optimize,
    "verify": verify,
    "export": export,
    "undo": undo,
    "history": show_history,
    "view": view,
    "bench": bench,
    "bisect": bisect,
}


def build_app(*, plain: bool) -> typer.Typer:
    """Return the application.

    Args:
        plain: whether help and usage errors are printed without frames and colours.
    """
    app = typer.Typer(
        name="fxopt",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None if plain else "markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_root)
    for name, command in _COMMANDS.items():
        app.command(name)(command)
    return app


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"fxopt {fxopt.__version__}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Fewer and faster operations in PyTorch graphs, with proof.

    Every command takes --json, for scripts. Exit codes: 0 done, 2 wrong command line, 3 file or factory, 4 capture,
    5 pass failed, 6 demand not met, 7 numbers differ, 8 cannot be undone, 9 nothing found, 10 saved but no report,
    130 interrupted.
    """


def main() -> None:
    """Run the command."""
    # Without NumPy, which fxopt does not need, torch warns on stderr.
    warnings.filterwarnings("ignore", "Failed to initialize NumPy", UserWarning)
    silence_libraries()
    build_app(plain=not (sys.stdout.isatty() and sys.stderr.isatty()))()
