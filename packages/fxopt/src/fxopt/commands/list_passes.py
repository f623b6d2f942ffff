"""`fxopt list`: the passes and pipelines that are installed, and plugins that failed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxopt.commands.answering import Answer, answer
from fxopt.commands.completion import complete_family
from fxopt.commands.exit_codes import ExitCode
from fxopt.commands.failures import CommandError
from fxopt.commands.parameters import JsonOption
from fxopt.commands.terminal import Terminal

if TYPE_CHECKING:
    from fxopt_core import PassInfo, PluginLoadError

FamilyOption = Annotated[
    str | None,
    typer.Option("--family", help="Only the passes of this family.", autocompletion=complete_family),
]


def list_passes(family: FamilyOption = None, as_json: JsonOption = False) -> None:
    """List passes by family with their versions, named pipelines, and plugins that failed to load, with the reason."""
    answer(lambda terminal: _work(terminal, family), as_json=as_json)


def _work(terminal: Terminal, family: str | None) -> Answer:
    with terminal.steps({"loading plugins": 3.0}) as step:
        step("loading plugins")
        from fxopt_core import registry
        from fxopt_core.naming import close_names

        passes = list(registry().available().values())
        pipelines, failed, missing = registry().pipelines(), registry().failed, registry().missing
        left_out = registry().left_out
    families = {info.family for info in passes}
    if family is not None and family not in families:
        hint = close_names(family, families) or f"; there are {', '.join(sorted(families))}"
        raise CommandError(f"no family {family!r} is installed{hint}", ExitCode.USAGE)
    chosen = sorted((p for p in passes if family in (None, p.family)), key=lambda info: (info.family, info.name))
    data: dict[str, list[Any]] = {
        "passes": [pass_data(info) for info in chosen],
        "pipelines": [] if family else [{"name": name, "text": text} for name, text in pipelines.items()],
        "failed": [] if family else [_failure_data(name, error) for name, error in failed.items()],
        "missing": [] if family else [{"plugin": name, "close": list(close)} for name, close in missing.items()],
        "left_out": [] if family else list(left_out),
    }
    return Answer(data, lambda terminal: _show(terminal, data))


def pass_data(info: PassInfo) -> dict[str, Any]:
    """Return what is known of a pass, for scripts."""
    from inspect import Parameter

    from fxopt_core.coercion import show_annotation
    from fxopt_core.naming import option_text

    return {
        "name": info.name,
        "family": info.family,
        "distribution": info.distribution,
        "version": info.version,
        "reversible": info.reversible,
        "preserves_computation": info.preserves_computation,
        "summary": info.summary,
        "options": [
            {
                "name": option_text(option.name),
                "type": "" if option.annotation is Parameter.empty else show_annotation(option.annotation),
                "default": option.default,
            }
            for option in info.options.values()
        ],
    }


def _failure_data(name: str, error: PluginLoadError) -> dict[str, str]:
    cause = error.__cause__
    return {
        "plugin": name,
        "error": str(error),
        "cause": "" if cause is None else f"{type(cause).__name__}: {cause}",
    }


def _show(terminal: Terminal, data: dict[str, list[Any]]) -> None:
    rows = [
        (row["family"], row["name"], row["version"], "yes" if row["reversible"] else "no", row["summary"])
        for row in data["passes"]
    ]
    terminal.table(("family", "pass", "version", "undo", "summary"), rows)
    if data["pipelines"]:
        terminal.print()
        terminal.table(("pipeline", "passes"), [(row["name"], row["text"]) for row in data["pipelines"]])
    for row in data["failed"]:
        terminal.print()
        terminal.print(f"failed: {row['error']}", style="red")
    for row in data["missing"]:
        hint = f"; did you mean {' or '.join(row['close'])}?" if row["close"] else ""
        terminal.print()
        told = f"missing: FXOPT_PLUGINS names {row['plugin']!r}, which is no installed plugin{hint}"
        terminal.print(told, style="red")
    if data["left_out"]:
        terminal.print()
        terminal.print(f"left out: FXOPT_PLUGINS does not name {', '.join(data['left_out'])}", style="yellow")
