"""The house keeps its floors: imports go down, nothing imports in circles, few files know the insides of torch.fx.

`docs/architecture.md` draws the floors; `FLOORS` is the same as a table. A new distribution is a new row with what
it may import.
"""

from __future__ import annotations

import ast
import gc
import re
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import NamedTuple

import torch
from site_passes import Computes
from torch import nn

from fxopt_linear import MergeLinears

PACKAGES = Path(__file__).parents[1] / "packages"

_REWRITE = ("fxopt_core", "fxopt_rewrite")
# A distribution -> those that its files may import. Within a distribution, anything but a circle.
FLOORS: dict[str, tuple[str, ...]] = {
    "fxopt_core": (),
    "fxopt_rewrite": ("fxopt_core",),
    "fxopt_checkpoints": _REWRITE,
    "fxopt_linear": _REWRITE,
    "fxopt_norm": _REWRITE,
    "fxopt_arith": _REWRITE,
    "fxopt_cpu": _REWRITE,
    "fxopt_simplify": _REWRITE,
    "fxopt_compile": (*_REWRITE, "fxopt_checkpoints", "fxopt_tools"),
    "fxopt_capture": (*_REWRITE, "fxopt_tools"),
    "fxopt_tools": _REWRITE,
    "fxopt_report": (*_REWRITE, "fxopt_tools"),
    "fxopt_testing": (*_REWRITE, "fxopt_checkpoints", "fxopt_capture", "fxopt_tools"),
    "_fxopt_entry_points": ("fxopt_core",),  # in `plugin` alone: torch and transformers run the rest in every process
    "fxopt": ("*",),
}
DOORS = ("fxopt_core", "fxopt_core.errors", "fxopt_rewrite")
# These import inside functions: listing passes, answering --help and starting pytest must not load torch, and
# inductor is loaded only where a pass is plugged into it.
LAZY = ("plugin", "commands", "torch_passes")
MOST_RETURNS = 25  # to rooms that the way of a call has left, counted over all calls

# What torch.fx keeps private.
_OF_NODES = ("_args", "_kwargs", "_input_nodes", "_prev", "_next", "_sort_key", "_erased", "_repr_fn", "_rename")
_OF_GRAPHS = ("_root", "_len", "_insert", "_codegen", "_co_fields", "_tracer_cls", "_find_nodes_lookup_table")
_OF_NAMES = ("_graph_namespace", "_used_names", "_base_count", "_obj_to_name", "associate_name_with_obj")
_OF_CODE = ("_body_transformer", "_gen_python_code")
PRIVATE_FIELDS = {*_OF_NODES, "_update_args_kwargs", *_OF_GRAPHS, *_OF_NAMES, *_OF_CODE}
SEAM = {
    "fxopt_core._torch": "the seam itself",
    "fxopt_rewrite._torch": "what journals and branches need besides",
    "fxopt_capture._torch": "how captured graphs take their inputs",
}


class Import(NamedTuple):
    """A module of this repository that a file imports, or imports a name from."""

    module: str
    name: str  # of the module, as it is written
    line: int
    in_function: bool


@cache
def files() -> dict[str, Path]:
    """Every module of every package, by its dotted name; a package is its `__init__.py`."""
    found = {}
    for file in sorted(PACKAGES.glob("*/src/**/*.py")):
        source = next(parent for parent in file.parents if parent.name == "src")
        found[".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")] = file
    return found


@cache
def tree_of(module: str) -> ast.Module:
    """A module's syntax tree."""
    return ast.parse(files()[module].read_text(encoding="utf-8"))


@cache
def imports_of(module: str) -> list[Import]:
    """What a file imports of this repository: at the top, inside functions, and for type checkers alone."""
    tree, found = tree_of(module), []
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    inner = {id(node) for function in functions for node in ast.walk(function)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{module}, line {node.lineno}, imports relatively: write the whole name"
            names = {f"{node.module}.{alias.name}": str(node.module) for alias in node.names}
        elif isinstance(node, ast.Import):
            names = {alias.name: alias.name for alias in node.names}
        else:
            continue
        targets = {module_of(name): written for name, written in sorted(names.items())}
        in_function = id(node) in inner
        found += [
            Import(target, written, node.lineno, in_function)
            for target, written in targets.items()
            if target not in ("", module)
        ]
    return found


def module_of(name: str) -> str:
    """The module of this repository that a dotted name is or is defined in; empty for names from elsewhere."""
    while name and name not in files():
        name = name.rpartition(".")[0]
    return name


def room_of(module: str) -> str:
    """The folder that a module is in."""
    return module if files()[module].name == "__init__.py" else module.rpartition(".")[0]


def may_import(importer: str, module: str) -> bool:
    """Whether the table lets one module import another."""
    own, target = (each.partition(".")[0] for each in (importer, module))
    below = FLOORS[own]
    return own == target or target in below or "*" in below


def private_names(module: str) -> Iterator[tuple[int, str]]:
    """The lines of a file that name what torch.fx keeps private, by attribute or by import, and the name.

    An attribute of `self` that the file sets or defines itself is its own, whatever torch calls one of its fields.
    """
    nodes = list(ast.walk(tree_of(module)))
    of_self = [node for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self"]
    set_here = {node.attr for node in of_self if isinstance(node.ctx, ast.Store)}
    own = set_here | {node.name for node in nodes if isinstance(node, ast.FunctionDef)}
    own_attributes = {id(node) for node in of_self if node.attr in own}
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in PRIVATE_FIELDS and id(node) not in own_attributes:
            yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.ImportFrom) and node.module in ("torch.fx.graph", "torch.fx.node"):
            yield from ((node.lineno, alias.name) for alias in node.names if alias.name.startswith("_"))


def test_every_import_goes_down() -> None:
    """A distribution knows those below it, and none above or beside."""
    wrong = [
        f"{module}, line {each.line}, imports {each.module}"
        for module in files()
        for each in imports_of(module)
        if not may_import(module, each.module)
    ]
    assert not wrong, "move what is needed down, or pass it as an argument:\n" + "\n".join(wrong)


def test_imports_of_core_and_rewrite_go_through_their_doors() -> None:
    """Third parties stand where we stand: what another distribution needs of core and rewrite is public."""
    wrong = [
        f"{module}, line {each.line}: {each.name}"
        for module in files()
        for each in imports_of(module)
        if each.name.startswith(("fxopt_core.", "fxopt_rewrite.")) and each.name not in DOORS
        if module.partition(".")[0] != each.name.partition(".")[0]
    ]
    assert not wrong, "import from the package itself:\n" + "\n".join(wrong)


def test_the_table_has_no_rows_of_the_past() -> None:
    """Each row, and each exception, is about something that is there."""
    assert {module.partition(".")[0] for module in files()} == FLOORS.keys()
    idle = sorted(module for module in SEAM if module not in files() or not any(private_names(module)))
    assert not idle, f"these need not be in SEAM: {', '.join(idle)}"


def test_the_way_of_a_call_returns_to_few_rooms() -> None:
    """Count, from `execute` on and apart from what the pass does, all calls from one room into another."""
    modules = {name: sys.modules[name] for name in files() if name.startswith("fxopt_core.") and name in sys.modules}
    names = {str(module.__file__): room_of(name) for name, module in modules.items()}
    returns: list[str] = []

    def walk(frame: FrameType, event: str, _: object) -> None:
        callers = [frame, *(each for each, _ in walk_stack(frame.f_back))]
        own = [each for each in callers if each.f_code.co_filename in names]
        functions = [each.f_code.co_name for each in callers[1:]]
        on_the_way = "execute" in functions and "transform" not in functions
        if event == "call" and on_the_way and own[:1] == [frame] and len(own) > 1:
            entered, left = (names[each.f_code.co_filename] for each in own[:2])
            called = f"{left} {own[1].f_code.co_name} -> {entered} {frame.f_code.co_name}"
            returns.extend([called] * (entered != left))

    for profile in (None, walk):  # what is found out once is found out by the first
        model = Computes(lambda m, x: m.q(x) + m.k(x), q=nn.Linear(4, 4), k=nn.Linear(4, 4))
        graph_module = torch.fx.symbolic_trace(model)
        gc.collect()  # what other tests left would be cleared on the way
        gc.disable()
        sys.setprofile(profile)
        try:
            MergeLinears()(graph_module)
        finally:
            sys.setprofile(None)
            gc.enable()
    assert 5 < len(returns) <= MOST_RETURNS, "\n".join(returns)


def test_no_files_import_each_other_in_a_circle() -> None:
    """Imports inside functions and for type checkers count too: they hide a circle and do not open it."""
    try:
        TopologicalSorter({module: {each.module for each in imports_of(module)} for module in files()}).prepare()
    except CycleError as error:
        circle = " <- ".join(error.args[1])
        raise AssertionError(f"in a circle, each imported by the next; move what both ends need: {circle}") from None


def test_imports_are_at_the_top() -> None:
    """Except in the files that have to load fast."""
    inside = [
        f"{module}, line {each.line}, imports {each.module} inside a function"
        for module in files()
        if not set(LAZY) & set(module.split("."))
        for each in imports_of(module)
        if each.in_function
    ]
    assert not inside, "import at the top, or say in LAZY why not:\n" + "\n".join(inside)


def test_private_fields_of_torch_are_named_in_the_seams() -> None:
    """When torch moves its nodes and name tables to C++, those files change and no others."""
    wrong = [
        f"{module}, line {line}, names {name}"
        for module in files()
        if module not in SEAM
        for line, name in private_names(module)
    ]
    assert not wrong, "give it a name in the distribution's `_torch`, and use that:\n" + "\n".join(wrong)


def test_each_distribution_has_one_seam_to_torch() -> None:
    """Private functions of torch are named in its file `_torch`, which looks for them at import."""
    private = re.compile(
        r"^(?! *>>>).*(torch\._C\._(?!nn\b)|_symbolic_trace\._|import _(?!_|C\b|ops|pytree)\w+,? _)", re.M
    )
    wrong = [
        f"{module}: {found[0].strip()}"
        for module, file in files().items()
        if not module.endswith("._torch")
        for found in private.finditer(file.read_text(encoding="utf-8"))
    ]
    assert not wrong, "name it in _torch.py, and use that:\n" + "\n".join(wrong)
