"""Programs that show a pass at work, and what they print."""

from __future__ import annotations

import ast
import doctest
import io
import warnings
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from fxopt_core import Transformation
from site_pages.public_names import import_line

MODELS = Path(__file__).parent / "models"


@dataclass(frozen=True)
class Subject:
    """A model to show a pass on.

    Attributes:
        description: what it is, in words.
        program: leaves it as ``model`` and what it is called with as ``inputs``.
    """

    description: str
    program: str


def subjects() -> Iterator[Subject]:
    """Yield the models of the site, small ones of kinds that are in use."""
    for path in sorted(MODELS.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        described = ast.parse(text)
        body = text.splitlines()[described.body[0].end_lineno or 0 :]
        yield Subject(ast.get_docstring(described) or path.stem, "\n".join(body).strip())


def run(program: str, namespace: dict[str, Any] | None = None) -> tuple[dict[str, Any], str]:
    """Run a program with a fixed seed; return its namespace and what it prints."""
    names: dict[str, Any] = {"__name__": "site_pages.running"} if namespace is None else namespace
    printed = io.StringIO()
    torch.manual_seed(0)
    with redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exec(compile(program, "<example>", "exec"), names)
    return names, printed.getvalue()


@dataclass(frozen=True)
class Session:
    """The example of a docstring as a program of its own.

    Attributes:
        text: the lines with prompts, imports included.
        namespace: what it leaves.
    """

    text: str
    namespace: dict[str, Any] = field(repr=False)


def session_of(cls: type[Transformation], example: str) -> Session | None:
    """Run the example of a pass; return it with the imports that its module has.

    Returns:
        None where there is no example, or where it fails: it is its author's to test.
    """
    statements = doctest.DocTestParser().get_examples(example) if example else []
    if not statements:
        return None
    source = "".join(statement.source for statement in statements)
    own = vars(__import__(cls.__module__, fromlist=["_"]))
    try:
        namespace, _ = run(source, dict(own))
    except Exception:
        return None
    lines = {import_line(name, own[name]) for name in _free_names(source) if name in own}
    imports = sorted(filter(None, lines), key=lambda line: (line.startswith("from"), line))
    return Session("\n".join([*(f">>> {line}" for line in imports), example]), namespace)


def _free_names(source: str) -> set[str]:
    """Return the names that a program reads and does not import or define."""
    tree = ast.parse(source)
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    made = {node.id for node in names if isinstance(node.ctx, ast.Store)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            made |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            made.add(node.name)
    return {node.id for node in names if isinstance(node.ctx, ast.Load)} - made
