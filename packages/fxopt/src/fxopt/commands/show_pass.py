"""`fxopt show PASS`: what a pass does, takes and refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxopt.commands.answering import Answer, answer
from fxopt.commands.completion import complete_pass
from fxopt.commands.list_passes import pass_data
from fxopt.commands.parameters import JsonOption
from fxopt.commands.terminal import Terminal

if TYPE_CHECKING:
    from fxopt_core import PassInfo

PassArgument = Annotated[
    str, typer.Argument(metavar="PASS", help="A pass, or a named pipeline.", autocompletion=complete_pass)
]


def show_pass(name: PassArgument, as_json: JsonOption = False) -> None:
    """Show what a pass does, its options, the reasons for which it leaves a site alone, and where its docs are."""
    answer(lambda terminal: _work(terminal, name), as_json=as_json)


def _work(terminal: Terminal, name: str) -> Answer:
    with terminal.steps({"loading plugins": 3.0}) as step:
        step("loading plugins")
        from fxopt_core import registry

        found = registry().lookup(name)
    if isinstance(found, str):
        data: dict[str, Any] = {"name": name, "pipeline": found, "passes": _members(found)}
        return Answer(data, lambda terminal: _show_pipeline(terminal, data))
    data = _described(found)
    return Answer(data, lambda terminal: _show(terminal, data))


def _members(text: str) -> list[str]:
    from fxopt_core import registry

    return registry().pipeline_text(registry().pipeline(text)).split(",")


def _described(info: PassInfo) -> dict[str, Any]:
    from fxopt.documented import parse_docstring
    from fxopt.pass_links import documentation_of
    from fxopt.refusing import reasons_of
    from fxopt_core import REASONS

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
        "reasons": {code: REASONS.get(code, "") for code in sorted(reasons_of(cls))},
        "docs": documentation_of(info),
    }


def _show_pipeline(terminal: Terminal, data: dict[str, Any]) -> None:
    terminal.print(f"{data['name']}, a pipeline", style="bold")
    for name in data["passes"]:
        terminal.print(f"  {name}")


def _show(terminal: Terminal, data: dict[str, Any]) -> None:
    from fxopt.pass_links import SITE

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
        terminal.table(("leaves a site alone for", "which means"), list(data["reasons"].items()))
    hint = ", which `nox -s docs` builds in a checkout of fxopt" if data["docs"].startswith(SITE) else ""
    terminal.print(f"\ndocs: {data['docs']}{hint}")
