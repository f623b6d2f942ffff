"""`fxopt list` and `fxopt show PASS`: which passes there are, and what one of them does, takes and refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxopt.commands.answer import Answer, answer
from fxopt.commands.parameters import JsonOption
from fxopt.commands.terminal import Terminal

if TYPE_CHECKING:
    from fxopt_core import PassInfo


def list_passes(as_json: JsonOption = False) -> None:
    """List passes, named pipelines, and plugins that failed to load."""
    answer(_listed, as_json=as_json)


def _listed(terminal: Terminal) -> Answer:
    with terminal.steps():
        # Imports torch and all plugins: the passes of a plugin are known only after its code has run.
        from fxopt_core import registry

        known = registry()
        passes = sorted(known.available().values(), key=lambda info: (info.family, info.name))
    data: dict[str, list[Any]] = {
        "passes": [pass_data(info) for info in passes],
        "pipelines": [{"name": name, "text": text} for name, text in known.pipelines().items()],
        "failed": [{"plugin": name, "error": str(error)} for name, error in known.failed.items()],
    }
    return Answer(data, lambda terminal: _show_list(terminal, data))


def pass_data(info: PassInfo) -> dict[str, Any]:
    """Return a pass as data, for scripts."""
    from inspect import Parameter

    from fxopt_core import option_text, show_annotation

    names = "name", "family", "distribution", "version", "reversible", "preserves_computation", "summary"
    options = [
        {
            "name": option_text(option.name),
            "type": "" if option.annotation is Parameter.empty else show_annotation(option.annotation),
            "default": option.default,
        }
        for option in info.options.values()
    ]
    return {name: getattr(info, name) for name in names} | {"options": options}


def _show_list(terminal: Terminal, data: dict[str, list[Any]]) -> None:
    rows = [
        (row["family"], row["name"], row["version"], "yes" if row["reversible"] else "no", row["summary"])
        for row in data["passes"]
    ]
    terminal.table(("family", "pass", "version", "undo", "summary"), rows)
    terminal.print()
    terminal.table(("pipeline", "passes"), [(row["name"], row["text"]) for row in data["pipelines"]])
    for row in data["failed"]:
        terminal.print(f"\nfailed: {row['error']}", style="red")


PassArgument = Annotated[str, typer.Argument(metavar="PASS", help="A pass, or a named pipeline.")]


def show_pass(name: PassArgument, as_json: JsonOption = False) -> None:
    """Show what a pass does, its options, and why it refuses sites.

    It also says whether the pass can be undone.
    """
    answer(lambda terminal: _found(terminal, name), as_json=as_json)


def _found(terminal: Terminal, name: str) -> Answer:
    with terminal.steps():
        from fxopt_core import registry

        found = registry().lookup(name)
    if not isinstance(found, str):
        data = _described(found)
        return Answer(data, lambda terminal: _show(terminal, data))
    members = registry().pipeline_text(registry().pipeline(found)).split(",")
    text = "\n  ".join([f"{name}, a pipeline", *members])
    return Answer({"name": name, "pipeline": found, "passes": members}, lambda terminal: terminal.print(text))


def _described(info: PassInfo) -> dict[str, Any]:
    from fxopt.docstrings import parse_docstring
    from fxopt_rewrite import REASONS

    documented = parse_docstring(info.transformation)
    data = pass_data(info)
    for option in data["options"]:
        option["meaning"] = documented.parameters.get(option["name"].replace("-", "_"), "")
    cls = info.transformation
    return data | {
        "class": f"{cls.__module__}.{cls.__qualname__}",
        "description": documented.body,
        "source": documented.source,
        "cost": documented.cost,
        "reasons": dict(sorted(cls.reasons.items(), key=lambda item: (item[0] in REASONS, item))),  # its own come first
    }


def _show(terminal: Terminal, data: dict[str, Any]) -> None:
    terminal.print(f"{data['name']} ({data['family']}, {data['distribution']} {data['version']})", style="bold")
    terminal.print(data["summary"])
    if data["description"]:
        terminal.print(f"\n{data['description']}")
    for title in ("source", "cost"):
        if data[title]:
            terminal.print(f"\n{title}: {data[title]}")
    terminal.print()
    terminal.print("can be undone" if data["reversible"] else "cannot be undone")
    terminal.print("computes the same, up to rounding" if data["preserves_computation"] else "changes what is computed")
    if data["options"]:
        rows = [(o["name"], o["type"], repr(o["default"]), o["meaning"]) for o in data["options"]]
        terminal.print()
        terminal.table(("option", "type", "default", "meaning"), rows)
    if data["reasons"]:
        terminal.print()
        terminal.table(("reason for a refusal", "meaning"), list(data["reasons"].items()))
