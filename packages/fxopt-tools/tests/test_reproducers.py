"""Reproducers: a pass that fails leaves a file, the file fails again, and nothing of anyone's is at risk."""

from __future__ import annotations

import json
import operator
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from planted import AddToSub, DropTail, MulToDiv, steps
from torch import Tensor, nn
from torch.fx import GraphModule, Node, symbolic_trace

from fxopt_core import (
    FxoptError,
    LintAndRecompile,
    PassError,
    PreconditionError,
    Transformation,
    VerificationError,
    compose,
    instrumented,
    iter_nodes,
    registry,
)
from fxopt_rewrite.plain_names import is_plain_method, plain_name
from fxopt_rewrite.shapes.facts import tensor_facts
from fxopt_rewrite.shapes.infer import infer_shapes
from fxopt_tools import Inputs, Reproducers, Verify, reproduce, verify, write_reproducer

X = torch.tensor([1.0, -2.0, 7.0])


class Fails(Transformation):
    """Leaves a half edited graph, and raises."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        next(iter_nodes(graph_module.graph)).name = "broken"
        raise KeyError("no luck")


class Scaled(nn.Module):
    """A module of no package that anyone trusts."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = 3.0
        self.weight = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale * self.weight


class Model(nn.Module):
    """Layers, a tie, a buffer that is not saved, a constant, a layer that is not called."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.GELU(approximate="tanh"))
        self.head = nn.Linear(3, 3, bias=False)
        self.head.weight = self.body.get_parameter("0.weight")
        self.shift: Tensor
        self.register_buffer("shift", torch.arange(3.0), persistent=False)
        self.constant = torch.tensor([2.0, 1.0, 0.5])
        self.unused = nn.Linear(1, 1)

    def forward(self, x: Tensor, scale: float = 2.0) -> dict[str, Tensor]:
        y: Tensor = self.body(x) + self.shift
        return {"y": self.head(y) * self.constant, "z": torch.cat([y, x], dim=-1)[..., 1:].view(-1, 5) * scale}


def file_of(graph_module: GraphModule, directory: Path, **kwargs: Any) -> Path:
    return write_reproducer(directory, graph_module, Fails(), KeyError("no luck"), **kwargs)


def rebuilt(graph_module: GraphModule, directory: Path, **kwargs: Any) -> GraphModule:
    """Return what becomes of a graph module on its way through a file."""
    path = file_of(graph_module, directory)
    return reproduce(path, transformation=LintAndRecompile(), **kwargs).graph_module


class TestTheInstrument:
    def test_an_error_leaves_a_file_with_the_graph_before_the_pass(self, tmp_path: Path) -> None:
        reproducers, graph_module = Reproducers(tmp_path / "new" / "files"), steps(2)
        with instrumented(reproducers), pytest.raises(PassError, match="no luck"):
            compose(AddToSub(), Fails())(graph_module)
        (path,) = reproducers.files
        assert path == tmp_path / "new" / "files" / "000_fails.reproducer.zip"
        assert [each.name for each in path.parent.iterdir()] == [path.name]
        found = reproduce(path, transformation=Fails())
        assert (found.verdict, found.pass_name, bool(found)) == ("reproduced", "fails", True)
        assert found.expected == found.found == "KeyError: 'no luck'"
        targets = [node.target for node in iter_nodes(found.graph_module.graph)]
        assert operator.sub in targets  # the first pass had its turn
        assert operator.add not in targets
        assert str(found).splitlines()[0] == "fails: reproduced"

    def test_a_pass_that_is_mended_no_longer_fails(self, tmp_path: Path) -> None:
        path = file_of(steps(1), tmp_path)
        found = reproduce(path, transformation=AddToSub())
        assert (found.verdict, bool(found), found.found) == ("no-failure", False, None)
        other = reproduce(path, transformation=AddToSub(raises_at="add"))
        assert (other.verdict, other.found) == ("another-failure", "ValueError: cannot rewrite add")

    @pytest.mark.parametrize("on_failure", ["raise", "veto"])
    def test_a_failed_verification_is_reproduced_on_the_inputs(self, tmp_path: Path, on_failure: Any) -> None:
        reproducers, wrong = Reproducers(tmp_path, inputs=[X, X * 2]), MulToDiv(wrong_at="mul_1")
        try:
            with instrumented(reproducers, Verify([X, X * 2], on_failure=on_failure)):
                compose(AddToSub(), wrong)(steps(2))
        except VerificationError:
            assert on_failure == "raise"
        (path,) = reproducers.files
        found = reproduce(path, transformation=wrong)
        assert found
        assert found.found is not None
        assert found.found.startswith("VerificationError: pass `mul-to-div` changed what the module computes")
        assert not reproduce(path, transformation=MulToDiv())

    def test_tolerances_are_kept(self, tmp_path: Path) -> None:
        reproducers = Reproducers(tmp_path, inputs=X, rtol=0.0, atol=0.0)
        with (
            instrumented(reproducers, Verify(X, rtol=0.0, atol=0.0)),
            pytest.raises(VerificationError),
        ):
            DropTail()(steps(1))
        assert reproduce(reproducers.files[0], transformation=DropTail())

    def test_what_succeeds_or_is_undone_or_interrupted_leaves_none(self, tmp_path: Path) -> None:
        class Interrupted(Transformation):
            def transform(self, graph_module: GraphModule) -> GraphModule:
                raise KeyboardInterrupt

        with instrumented(Reproducers(tmp_path / "files")):
            LintAndRecompile()(LintAndRecompile()(steps(1)), reverse=True)
            with pytest.raises(KeyboardInterrupt):
                Interrupted()(steps(1))
        assert list(tmp_path.iterdir()) == []

    def test_numbers_go_on(self, tmp_path: Path) -> None:
        for _ in range(2):
            with instrumented(Reproducers(tmp_path)), pytest.raises(PassError):
                Fails()(steps(1))
        file_of(steps(1), tmp_path)
        assert sorted(each.name for each in tmp_path.iterdir()) == [f"00{n}_fails.reproducer.zip" for n in range(3)]

    def test_equal_failures_give_equal_files(self, tmp_path: Path) -> None:
        one, other = (file_of(steps(2), tmp_path / name, inputs=X) for name in "ab")
        assert one.read_bytes() == other.read_bytes()


class TestWhatComesBack:
    @pytest.mark.parametrize("form", ["trace", "shapes", "export"])
    def test_a_module_computes_the_same(self, tmp_path: Path, form: str) -> None:
        model, x = Model().eval(), torch.randn(4, 3)
        if form == "export":
            exported: Any = torch.export.export(model, (x,), dynamic_shapes={"x": {0: torch.export.Dim.DYNAMIC}})
            graph_module = exported.module()
        else:
            graph_module = symbolic_trace(model, concrete_args={"scale": 2.0})
        if form == "shapes":
            infer_shapes(graph_module, x)
        path = file_of(graph_module, tmp_path, inputs=x)
        found = reproduce(path, transformation=LintAndRecompile())
        assert found.verdict == "no-failure"
        again, inputs = found.graph_module, (x, 2.0) if form != "export" else (x,)
        ours, theirs = again(*inputs), model(x)
        ours = ours if isinstance(ours, dict) else dict(zip("yz", ours, strict=True))
        for key, expected in theirs.items():
            torch.testing.assert_close(ours[key], expected, rtol=0, atol=0)
        names = [node.name for node in iter_nodes(graph_module.graph) if node.name != "_guards_fn"]
        assert [node.name for node in iter_nodes(again.graph)] == names
        assert {*graph_module.state_dict()} == {*again.state_dict()}
        for name, parameter in graph_module.named_parameters():
            assert torch.equal(again.get_parameter(name), parameter)
            assert again.get_parameter(name).requires_grad == parameter.requires_grad
        assert again.training == graph_module.training

    def test_ties_and_what_is_known_of_values_come_back(self, tmp_path: Path) -> None:
        graph_module = infer_shapes(symbolic_trace(Model().eval()), torch.randn(4, 3), 2.0)
        again = rebuilt(graph_module, tmp_path)
        assert again.get_parameter("head.weight") is again.get_parameter("body.0.weight")
        for node, twin in zip(iter_nodes(graph_module.graph), iter_nodes(again.graph), strict=True):
            facts, found = tensor_facts(node), tensor_facts(twin)
            assert (facts is None) == (found is None)
            assert facts is None or found is None or (facts.shape, facts.dtype) == (found.shape, found.dtype)
        assert verify(graph_module, again, (torch.randn(2, 3), 2.0))

    def test_sources_come_back(self, tmp_path: Path) -> None:
        again = rebuilt(steps(1), tmp_path)
        assert any("planted.py" in str(node.meta.get("stack_trace")) for node in iter_nodes(again.graph))

    def test_keyword_arguments_and_defaults_become_values_of_placeholders(self, tmp_path: Path) -> None:
        graph_module = symbolic_trace(Model().eval())
        x = torch.randn(4, 3)
        path = file_of(graph_module, tmp_path, inputs=[{"x": x}, Inputs(x, scale=3.0)])
        assert reproduce(path, transformation=LintAndRecompile()).verdict == "no-failure"

    def test_nested_graphs_come_back(self, tmp_path: Path) -> None:
        class Outer(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = symbolic_trace(Model().eval())

            def forward(self, x: Tensor) -> Tensor:
                found: Tensor = self.inner(x, 2.0)["y"]
                return found

        class Whole(torch.fx.Tracer):
            def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
                return True

        outer = Outer().eval()
        graph_module = GraphModule(outer, Whole().trace(outer))
        assert verify(graph_module, rebuilt(graph_module, tmp_path), X[None])


class TestTrust:
    def graph(self) -> GraphModule:
        class Whole(torch.fx.Tracer):
            def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
                return True

        model = nn.Sequential(Scaled())
        return GraphModule(model, Whole().trace(model))

    def test_classes_of_others_are_imported_only_when_trusted(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, Scaled.__module__, sys.modules[__name__])
        graph_module = self.graph()
        path = file_of(graph_module, tmp_path)
        with pytest.raises(PreconditionError, match=r"Scaled, which is none of torch\.nn.*trusted=True"):
            reproduce(path, transformation=LintAndRecompile())
        again = reproduce(path, transformation=LintAndRecompile(), trusted=True).graph_module
        assert verify(graph_module, again, X)

    def test_passes_of_others_are_imported_only_when_trusted(self, tmp_path: Path) -> None:
        wrong = AddToSub(raises_at="add")
        path = write_reproducer(tmp_path, steps(1), wrong, ValueError("cannot rewrite add"))
        with pytest.raises(PreconditionError, match=r"planted:AddToSub, which is not registered.*transformation="):
            reproduce(path)
        assert reproduce(path, trusted=True)

    def test_a_registered_pass_goes_by_its_text(self, tmp_path: Path) -> None:
        registry()
        path = write_reproducer(tmp_path, steps(1), LintAndRecompile(), ValueError("once"))
        assert reproduce(path).verdict == "no-failure"
        with zipfile.ZipFile(path) as archive:
            assert json.loads(archive.read("reproducer.json"))["pass"]["text"] == "lint-and-recompile"

    def test_pickled_objects_are_opened_only_when_trusted(self, tmp_path: Path) -> None:
        graph_module = symbolic_trace(nn.Sequential(nn.Linear(3, 3)))
        vars(graph_module.get_submodule("0"))["note"] = Path("somewhere")
        path = file_of(graph_module, tmp_path)
        with pytest.raises(PreconditionError, match="opening a pickle can run any code"):
            reproduce(path, transformation=LintAndRecompile())
        again = reproduce(path, transformation=LintAndRecompile(), trusted=True).graph_module
        assert again.get_submodule("0").note == Path("somewhere")

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("target", "os:system"),
            ("target", {"name": "os:system"}),
            ("target", {"name": "torch:os.system"}),
            ("target", {"name": "torch:load"}),
            ("target", {"name": "_operator:methodcaller"}),
            ("kwargs", {"x=print(1)": 1}),
            ("name", "x; import os"),
            ("op", "call"),
            ("value", ["load", [1], [1], False]),
            ("args", [{"enum": ["http:HTTPStatus", 200]}]),
        ],
    )
    def test_what_is_no_arithmetic_is_refused(self, tmp_path: Path, key: str, value: Any) -> None:
        path = file_of(steps(1), tmp_path)

        def spoil(data: Any) -> None:
            data["modules"][0]["graph"]["rows"][1][key] = value

        with pytest.raises(PreconditionError):
            reproduce(edited(path, spoil), transformation=LintAndRecompile())

    def test_graphs_read_nothing_but_what_modules_have(self, tmp_path: Path) -> None:
        def spoil(data: Any) -> None:
            row = data["modules"][0]["graph"]["rows"][1]
            row.update(op="get_attr", target="forward.__globals__", args=[])

        with pytest.raises(PreconditionError, match="which no module has"):
            reproduce(edited(file_of(steps(1), tmp_path), spoil), transformation=LintAndRecompile())

    @pytest.mark.parametrize(("method", "plain"), [("view", True), ("__add__", True), ("__reduce_ex__", False)])
    def test_methods_are_those_of_tensors(self, method: str, plain: bool) -> None:
        assert is_plain_method(method) == plain

    def test_functions_are_those_on_tensors(self) -> None:
        plain = [operator.add, torch.relu, torch.nn.functional.linear, torch.ops.aten.add.Tensor, getattr, torch.zeros]
        assert all(map(plain_name, plain))
        assert not any(
            map(plain_name, [eval, os.system, torch.load, torch.save, open, operator.methodcaller, [], __import__])
        )


def edited(path: Path, change: Any) -> Path:
    """Return a copy of a reproducer with other data."""
    other = path.with_name("999_edited.reproducer.zip")
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(other, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == "reproducer.json":
                data = json.loads(content)
                change(data)
                content = json.dumps(data).encode()
            target.writestr(name, content)
    return other


class TestFiles:
    def test_a_file_is_a_program(self, tmp_path: Path) -> None:
        path = write_reproducer(tmp_path, steps(1), LintAndRecompile(), ValueError("once"))
        done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.splitlines()[0]) == (1, "lint-and-recompile: no-failure"), done.stderr

    def test_a_file_can_be_read(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(file_of(steps(1), tmp_path)) as archive:
            assert archive.namelist() == ["__main__.py", "graph.txt", "reproducer.json", "tensors.pt"]
            text = archive.read("graph.txt").decode()
        assert text.startswith("# fxopt reproducer: fails\nKeyError: 'no luck'\n")
        assert "operator.mul" in text

    def test_a_directory_of_others_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "mine.txt").touch()
        for path in (tmp_path, tmp_path / "mine.txt"):
            with pytest.raises(PreconditionError, match="give another path"):
                Reproducers(path)
            with pytest.raises(PreconditionError, match="give another path"):
                file_of(steps(1), path)
        assert [each.name for each in tmp_path.iterdir()] == ["mine.txt"]

    def test_a_failed_write_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*args: object) -> None:
            raise OSError("no space left")

        monkeypatch.setattr(torch, "save", full)
        with pytest.raises(PreconditionError, match="cannot be written: OSError: no space left"):
            file_of(steps(1), tmp_path)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("links", [True, False])
    def test_no_file_is_overwritten(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
        def unsupported(*args: object) -> None:
            raise PermissionError("no links here")

        if not links:
            monkeypatch.setattr(os, "link", unsupported)
        monkeypatch.setattr("fxopt_tools.reproducers.write.check_directory", lambda _: 0)  # two processes at once
        one, other = file_of(steps(1), tmp_path), file_of(steps(1), tmp_path)
        assert (one.name, other.name) == ("000_fails.reproducer.zip", "001_fails.reproducer.zip")
        assert len(list(tmp_path.iterdir())) == 2

    def test_what_is_no_reproducer_is_refused(self, tmp_path: Path) -> None:
        other = tmp_path / "other.zip"
        other.write_bytes(pickle.dumps(3))
        for path in (other, tmp_path / "missing"):
            with pytest.raises(PreconditionError, match="is no reproducer that can be read"):
                reproduce(path)
        path = file_of(steps(1), tmp_path / "files")
        with pytest.raises(PreconditionError, match="version 3, and this fxopt-tools reads up to 2"):
            reproduce(edited(path, lambda data: data.update(version=3)))
        with pytest.raises(PreconditionError, match="is damaged: KeyError"):
            reproduce(edited(path, lambda data: data.pop("notes")))


class TestWhatCannotBeWritten:
    def test_a_graph_of_local_functions_is_there_to_read(self, tmp_path: Path) -> None:
        def local(x: Tensor) -> Tensor:
            return x

        graph_module = steps(1)
        node: Node = list(iter_nodes(graph_module.graph))[1]
        node.target = local
        path = file_of(graph_module, tmp_path)
        with pytest.raises(PreconditionError, match="no graph, but only its text: the graph cannot be built again"):
            reproduce(path)
        with zipfile.ZipFile(path) as archive:
            assert "note: the graph cannot be built again: node `mul` calls" in archive.read("graph.txt").decode()

    def test_hooks_and_inputs_that_do_not_fit_are_noted(self, tmp_path: Path) -> None:
        graph_module = symbolic_trace(nn.Sequential(nn.Linear(3, 3)))
        graph_module.get_submodule("0").register_forward_hook(lambda *_: None)
        found = reproduce(file_of(graph_module, tmp_path, inputs=(X, X)), transformation=Fails())
        assert found
        assert found.notes[0] == "module `0` has hooks, which are left out"
        assert found.notes[1].startswith("inputs are left out: the graph module does not take the inputs: TypeError")
        assert "note: module `0`" in str(found)

    def test_values_written_in_place_are_noted(self, tmp_path: Path) -> None:
        class Writes(Transformation):
            def transform(self, graph_module: GraphModule) -> GraphModule:
                with torch.no_grad():
                    graph_module.get_parameter("0.weight").add_(1)
                raise ValueError("too late")

        reproducers = Reproducers(tmp_path)
        with instrumented(reproducers), pytest.raises(FxoptError):
            Writes()(symbolic_trace(nn.Sequential(nn.Linear(3, 3))))
        found = reproduce(reproducers.files[0], transformation=Fails())
        assert any("wrote to tensors in place" in note for note in found.notes)

    def test_an_uninitialised_module_is_noted(self, tmp_path: Path) -> None:
        lazy = nn.Sequential(nn.LazyLinear(3))
        path = file_of(symbolic_trace(lazy), tmp_path)
        with pytest.raises(PreconditionError, match=r"`0\.weight` is not initialised yet"):
            reproduce(path)
