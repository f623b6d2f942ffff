"""`Dumps`: which files are written, what is in them, and where none ever are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node, symbolic_trace

from fxopt_core import (
    Instrument,
    LintAndRecompile,
    PassError,
    PassRun,
    PreconditionError,
    Record,
    Transformation,
    compose,
    history,
    instrumented,
    iter_nodes,
    undo,
)
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.journal.editor import Editor
from fxopt_rewrite.site_pass import ReversibleSitePass
from fxopt_tools.watch.dumps import Dumps


@dataclass(frozen=True, eq=False)
class Call:
    node: Node

    @property
    def label(self) -> str:
        return self.node.name

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.node,)


class ReluToTanh(ReversibleSitePass[Call]):
    """``relu(x)`` -> ``tanh(x)``"""

    def match(self, index: GraphIndex) -> Iterator[Call]:
        for node in index.nodes:
            if node.target is torch.relu:
                yield Call(node)

    def rewrite(self, site: Call, edit: Editor) -> None:
        value: Any = site.node.args[0]
        edit.replace(site.node, edit.call_function(torch.tanh, value, before=site.node, like=[site.node]))


class Breaks(Transformation):
    """Edits, and raises half way: the graph is no graph any more."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in iter_nodes(graph_module.graph):
            if node.target is torch.relu:
                node.target = torch.sigmoid
        raise ValueError(f"no luck with {object()}") from RuntimeError("deep down")


class Empties(Transformation):
    """Leaves nothing that could be shown as code."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in iter_nodes(graph_module.graph):
            node.args = ()
            node._repr_fn = _no_text
        raise ValueError("no luck")


def _no_text(node: Node) -> str:
    raise RuntimeError("no text")


class Anew(Transformation):
    """Returns another graph module."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        twin = symbolic_trace(Model())
        twin.graph.output_node().name = "anew"
        return twin


class Named(Transformation):
    """A pass of any name, which changes something."""

    def __init__(self, called: str) -> None:
        self.called = called

    @property
    def name(self) -> str:
        return self.called

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.graph.output_node().name = "renamed"
        return graph_module


class Calls(Transformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        return LintAndRecompile()(ReluToTanh()(graph_module))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x):  # type: ignore[no-untyped-def]  # annotations show in the code of a graph
        return torch.relu(self.linear(x))


class Vetoes(Instrument):
    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> bool:
        return False


def traced() -> GraphModule:
    return symbolic_trace(Model())


def names(dumps: Dumps) -> list[str]:
    assert sorted(dumps.directory.iterdir()) == sorted(dumps.files)
    return [file.name for file in dumps.files]


def text(dumps: Dumps, place: int = -1) -> str:
    return dumps.files[place].read_text(encoding="utf-8")


# --- Which


def test_by_default_what_passes_changed_and_where_they_failed(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path / "new" / "dumps")
    assert not dumps.directory.parent.exists()
    with instrumented(dumps):
        compose(LintAndRecompile(), ReluToTanh(), LintAndRecompile())(traced())
        with pytest.raises(PassError):
            Breaks()(traced())
    assert names(dumps) == ["001_relu-to-tanh.after.txt", "003_breaks.failed.txt"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"before": True}, ["1.before", "1.after"]),
        ({"before": True, "after": False}, ["1.before"]),
        ({"before": True, "changed_only": False}, ["0.before", "0.after", "1.before", "1.after"]),
        ({"after": "relu-to-tanh"}, ["1.after"]),
        ({"after": "lint-and-recompile"}, []),
        ({"after": "lint-and-recompile", "changed_only": False}, ["0.after"]),
        ({"after": ["relu-*", "other"], "before": ("lint-*",), "changed_only": False}, ["0.before", "1.after"]),
        ({"after": []}, []),
        ({"after": False, "failed": False}, []),
    ],
)
def test_passes_and_moments_can_be_chosen(tmp_path: Path, options: Any, expected: list[str]) -> None:
    dumps = Dumps(tmp_path, **options)
    with instrumented(dumps):
        compose(LintAndRecompile(), ReluToTanh())(traced())
    titles = {"0": "000_lint-and-recompile", "1": "001_relu-to-tanh"}
    assert names(dumps) == [f"{titles[place]}.{when}.txt" for place, when in (e.split(".") for e in expected)]


def test_no_directory_is_made_where_there_is_nothing_to_dump(tmp_path: Path) -> None:
    with instrumented(Dumps(tmp_path / "dumps")):
        LintAndRecompile()(traced())
    assert not (tmp_path / "dumps").exists()


def test_the_state_before_a_failure_is_dumped_too_where_it_was_asked_for(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path, before=True)
    with instrumented(dumps), pytest.raises(PassError):
        compose(LintAndRecompile(), Breaks())(traced())
    assert names(dumps) == ["001_breaks.before.txt", "001_breaks.failed.txt"]
    assert "torch.relu" in text(dumps, 0)


def test_numbers_go_on_within_one_instrument(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path)
    for _ in range(2):
        with instrumented(dumps):
            undo(compose(ReluToTanh(), LintAndRecompile())(traced()))
    assert names(dumps) == [
        "000_relu-to-tanh.after.txt",
        "002_undo-relu-to-tanh.after.txt",
        "003_relu-to-tanh.after.txt",
        "005_undo-relu-to-tanh.after.txt",
    ]


def test_passes_inside_of_passes_have_numbers_of_their_own(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path, before=True, changed_only=False)
    with instrumented(dumps):
        Calls()(traced())
    assert names(dumps) == [
        "000_calls.before.txt",
        "001_relu-to-tanh.before.txt",
        "001_relu-to-tanh.after.txt",
        "002_lint-and-recompile.before.txt",
        "002_lint-and-recompile.after.txt",
        "000_calls.after.txt",
    ]


# --- What


def test_a_dump_has_the_graph_the_code_the_modules_and_the_record(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path)
    with instrumented(dumps):
        compose(LintAndRecompile(), ReluToTanh())(traced())
    assert text(dumps).splitlines() == [
        "# fxopt dump: relu-to-tanh, pass 1 of a composition, after",
        "",
        "== graph: 4 nodes",
        "name    op             target      value  arguments",
        "x       placeholder    x",
        "linear  call_module    linear             %x",
        "tanh    call_function  torch.tanh         %linear",
        "output  output         output             %tanh",
        "",
        "== code",
        "def forward(self, x):",
        "    linear = self.linear(x);  x = None",
        "    tanh = torch.tanh(linear);  linear = None",
        "    return tanh",
        "",
        "== modules",
        "Model, train",
        "  linear: Linear(in_features=2, out_features=2, bias=True), train",
        "    weight: parameter float32[2, 2]",
        "    bias: parameter float32[2]",
        "",
        "== record",
        "relu-to-tanh(): applied, changed",
        "rewritten: 1",
        "  relu: relu -> tanh",
        "refused: 0",
    ]
    assert text(dumps).endswith("\n") and b"\r" not in dumps.files[0].read_bytes()


def test_contents_can_be_chosen(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path, contents=("record", "code"))
    with instrumented(dumps):
        ReluToTanh()(traced())
    assert [line for line in text(dumps).splitlines() if line.startswith("==")] == ["== code", "== record"]


@pytest.mark.parametrize("contents", [(), ("graph", "pictures"), "graph"])
def test_other_contents_are_refused(tmp_path: Path, contents: Any) -> None:
    with pytest.raises(PreconditionError, match=r"contents (has|is) .*expected some of 'graph', 'code'"):
        Dumps(tmp_path, contents=contents)


def test_a_failure_shows_the_state_before_the_rollback(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path)
    graph_module = traced()
    with instrumented(dumps), pytest.raises(PassError):
        Breaks()(graph_module)
    found = text(dumps)
    assert "torch.sigmoid" in found and "torch.relu" not in found
    assert "== failure\nValueError: no luck with <object object>\ncaused by\nRuntimeError: deep down\n" in found
    assert any(node.target is torch.relu for node in iter_nodes(graph_module.graph))


def test_a_graph_that_cannot_be_shown_is_dumped_as_far_as_it_can(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path)
    with instrumented(dumps), pytest.raises(PassError):
        Empties()(traced())
    found = text(dumps)
    assert "== code\ncannot be shown: " in found and "== modules\nModel, train\n" in found
    assert "relu    call_function  torch.relu\n" in found


def test_a_veto_is_a_failure_and_shows_the_result(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path)
    with instrumented(dumps, Vetoes()):
        ReluToTanh()(traced())
        Anew()(traced())
    assert names(dumps) == ["000_relu-to-tanh.failed.txt", "001_anew.failed.txt"]
    assert "torch.tanh" in text(dumps, 0) and "VetoError: pass `relu-to-tanh` was vetoed by Vetoes" in text(dumps, 0)
    assert "anew    output" in text(dumps, 1)


def test_what_another_instrument_raises_shows_the_result_too(tmp_path: Path) -> None:
    class Raises(Instrument):
        def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
            raise ValueError("of its own")

    dumps = Dumps(tmp_path)
    with instrumented(dumps, Raises()), pytest.raises(PassError):
        Anew()(traced())
    assert names(dumps) == ["000_anew.failed.txt"] and "anew    output" in text(dumps)


def test_an_interrupt_is_dumped(tmp_path: Path) -> None:
    class Interrupted(Transformation):
        def transform(self, graph_module: GraphModule) -> GraphModule:
            raise KeyboardInterrupt

    dumps = Dumps(tmp_path)
    with instrumented(dumps), pytest.raises(KeyboardInterrupt):
        Interrupted()(traced())
    assert "KeyboardInterrupt" in text(dumps)


def test_dumps_of_equal_modules_are_equal(tmp_path: Path) -> None:
    texts = []
    for place in range(2):
        dumps = Dumps(tmp_path / str(place), before=True)
        with instrumented(dumps):
            undo(compose(ReluToTanh(), LintAndRecompile())(traced()))
        texts.append([file.read_bytes() for file in dumps.files])
    assert texts[0] == texts[1] and len(texts[0]) == 4


def test_dumping_changes_nothing(tmp_path: Path) -> None:
    seen, unseen = traced(), traced()
    with instrumented(Dumps(tmp_path, before=True, changed_only=False)):
        ReluToTanh()(seen)
    ReluToTanh()(unseen)
    assert seen.code == unseen.code and len(history(seen)) == 1
    assert [node.name for node in iter_nodes(seen.graph)] == [node.name for node in iter_nodes(unseen.graph)]


# --- Where


def test_any_name_of_a_pass_is_safe(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path / "dumps")
    odd = ["../../up", "..", "", "con", "a/b\\c:d*?", "na\u00efve \u540d", "x" * 500, "tab\tnew\nline\0", "-rf"]
    with instrumented(dumps):
        for name in odd:
            Named(name)(traced())
    assert names(dumps) == [
        "000_..-..-up.after.txt",
        "001_...after.txt",
        "002_pass.after.txt",
        "003_con.after.txt",
        "004_a-b-c-d-.after.txt",
        "005_nai-ve-.after.txt",
        f"006_{'x' * 80}.after.txt",
        "007_tab-new-line-.after.txt",
        "008_-rf.after.txt",
    ]
    assert list(tmp_path.iterdir()) == [dumps.directory]


@pytest.mark.parametrize("name", ["notes.md", ".hidden", "000_relu-to-tanh.after.txt", "000_fold.after.json"])
def test_a_directory_with_other_files_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    for replace in (False, True):
        with pytest.raises(PreconditionError, match=r"holds other files.*expected a new or empty directory") as caught:
            Dumps(tmp_path, replace=replace)
        assert name in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == [name] and (tmp_path / name).read_text() == "mine"


def test_so_is_one_with_other_directories_or_links(tmp_path: Path) -> None:
    (tmp_path / "000_fold.after.txt").mkdir()
    with pytest.raises(PreconditionError, match="holds other files"):
        Dumps(tmp_path, replace=True)
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "link").mkdir()
    target = outside / "target.txt"
    target.write_text("# fxopt dump")
    (outside / "link" / "000_fold.after.txt").symlink_to(target)
    with pytest.raises(PreconditionError, match="holds other files"):
        Dumps(outside / "link", replace=True)


def test_files_that_come_in_between_are_noticed(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path)
    (tmp_path / "mine").touch()
    graph_module = traced()
    code = graph_module.code
    with instrumented(dumps), pytest.raises(PreconditionError, match="holds other files") as caught:
        ReluToTanh()(graph_module)
    assert caught.value.pass_name == "relu-to-tanh"
    assert (graph_module.code, history(graph_module)) == (code, ())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def test_a_file_in_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(PreconditionError, match="is a file, expected a directory"):
        Dumps(tmp_path / "file")


def test_dumps_of_an_earlier_run_are_replaced_only_on_request(tmp_path: Path) -> None:
    with instrumented(first := Dumps(tmp_path)):
        ReluToTanh()(traced())
        ReluToTanh()(traced())
    with pytest.raises(PreconditionError, match=r"holds 2 dumps of an earlier run.*replace=True"):
        Dumps(tmp_path)
    second = Dumps(tmp_path, replace=True)
    assert names(first) == ["000_relu-to-tanh.after.txt", "001_relu-to-tanh.after.txt"]  # until there is a new one
    with instrumented(second):
        ReluToTanh()(traced())
    assert names(second) == ["000_relu-to-tanh.after.txt"]


def test_no_file_is_overwritten(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path)
    with instrumented(dumps):
        ReluToTanh()(traced())
        (tmp_path / "001_relu-to-tanh.after.txt").write_text("mine")
        with pytest.raises(PreconditionError, match=r"001_relu-to-tanh.after.txt cannot be written: FileExistsError"):
            ReluToTanh()(traced())
    assert (tmp_path / "001_relu-to-tanh.after.txt").read_text() == "mine"


def test_a_directory_that_cannot_be_made_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    dumps = Dumps(tmp_path / "file" / "dumps")
    with instrumented(dumps), pytest.raises(PreconditionError, match=r"cannot be written: .*give Dumps another one"):
        ReluToTanh()(traced())


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_to_is_a_clear_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with instrumented(Dumps(tmp_path)), pytest.raises(PreconditionError, match="cannot be written: PermissionError"):
        ReluToTanh()(traced())
    tmp_path.chmod(0o700)


def test_a_failure_that_cannot_be_dumped_stays_the_failure_of_the_pass(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path)
    (tmp_path / "mine").touch()
    warned = pytest.warns(RuntimeWarning, match="Dumps raised PreconditionError")
    with warned, pytest.raises(PassError, match="no luck with"), instrumented(dumps):
        Breaks()(traced())
