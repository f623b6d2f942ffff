"""`save`: an archive that torch reads alone, and that `load` makes the very graph module of again."""

from __future__ import annotations

import dataclasses
import operator
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from archive_models import PadOutputs, Perceptron, Square, Varied, layout, modules
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxopt_capture import capture
from fxopt_capture.archive.files import load, save
from fxopt_core import Transformation, history, iter_nodes, undo
from fxopt_core.errors import CaptureError

AUTO = {0: Dim.AUTO, 1: Dim.AUTO}
IDS, MASK = torch.randint(0, 10, (3, 5)), torch.rand(3, 5)


def same(one: GraphModule, other: GraphModule) -> None:
    """Check that two graph modules are the same in all that an archive keeps."""
    assert layout(one) == layout(other)
    assert modules(one) == modules(other)
    assert one.code == other.code
    assert list(one.state_dict()) == list(other.state_dict())
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in one.state_dict().items())
    flags = [{name: module.training for name, module in each.named_modules()} for each in (one, other)]
    assert flags[0] == flags[1]
    assert history(one) == history(other)


def padded(model: nn.Module, *args: Any, **kwargs: Any) -> GraphModule:
    return PadOutputs()(capture(model, args, **kwargs))


@pytest.fixture
def varied() -> Varied:
    torch.manual_seed(0)
    return Varied().eval()


def test_the_graph_module_comes_back_and_can_be_undone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Perceptron()
    original = capture(model, torch.randn(2, 4))
    transformed = PadOutputs()(capture(model, torch.randn(2, 4)))
    save(transformed, tmp_path / "model.pt2")
    loaded = load(tmp_path / "model.pt2")
    same(loaded, transformed)
    assert history(loaded)[-1].rewrites
    for rows in (1, 2, 5, 64):
        x = torch.randn(rows, 4)
        assert torch.equal(loaded(x), transformed(x))
    undone = undo(loaded)
    assert layout(undone) == layout(original)
    assert modules(undone) == modules(original)
    assert list(undone.state_dict()) == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in undone.state_dict().items())


def test_saving_leaves_the_graph_module_as_it_was(tmp_path: Path) -> None:
    graph_module = padded(Perceptron(), torch.randn(2, 4))
    before = (
        layout(graph_module),
        modules(graph_module),
        list(vars(graph_module)),
        len(graph_module._forward_pre_hooks),
    )
    metas = [dict(node.meta) for node in iter_nodes(graph_module.graph)]
    save(graph_module, tmp_path / "model.pt2")
    after = (
        layout(graph_module),
        modules(graph_module),
        list(vars(graph_module)),
        len(graph_module._forward_pre_hooks),
    )
    assert before == after
    assert metas == [dict(node.meta) for node in iter_nodes(graph_module.graph)]


def test_saving_again_changes_nothing(tmp_path: Path, varied: Varied) -> None:
    texts: list[dict[str, str]] = []
    graph_module = PadOutputs()(capture(varied, (IDS, MASK), dynamic_shapes=(AUTO, AUTO)))
    for _ in range(3):
        save(graph_module, tmp_path / "model.pt2")
        texts.append({"": ""})
        torch.export.load(tmp_path / "model.pt2", extra_files=texts[-1])
        graph_module = load(tmp_path / "model.pt2")
    assert texts[0] == texts[1] == texts[2]


def test_a_varied_model(tmp_path: Path, varied: Varied) -> None:
    captured: Any = capture(varied, (IDS, MASK), dynamic_shapes=(AUTO, AUTO))
    save(captured, tmp_path / "model.pt2")
    loaded: Any = load(tmp_path / "model.pt2")
    same(loaded, captured)
    assert list(loaded.state_dict()) == list(varied.state_dict())
    assert loaded.head.weight is loaded.embedding.weight
    assert loaded.alias is loaded.frozen
    assert not loaded.frozen.weight.requires_grad
    assert "hidden" in dict(loaded.named_buffers())
    for rows, length in ((3, 5), (1, 2), (4, 1), (2, 9)):
        inputs = torch.randint(0, 10, (rows, length)), torch.rand(rows, length)
        torch.testing.assert_close(loaded(*inputs), captured(*inputs), rtol=0, atol=0)
    with pytest.raises(CaptureError, match=r"mask.size\(\)\[1\] == ids.size\(\)\[1\]"):
        loaded(IDS, torch.ones(3, 4))
    with pytest.raises(CaptureError, match="captured in evaluation mode"):
        loaded.train()


def test_names_that_are_free_stay_the_same(tmp_path: Path) -> None:
    """A node that is added afterwards gets the name that it would have got without saving."""
    graph_module = padded(Perceptron(), torch.randn(2, 4))
    save(graph_module, tmp_path / "model.pt2")
    names = []
    for one in (graph_module, load(tmp_path / "model.pt2")):
        last = list(iter_nodes(one.graph))[-1]
        with one.graph.inserting_before(last):
            names.append([one.graph.call_function(torch.relu, (last.args[0],)).name for _ in range(2)])
    assert names[0] == names[1]


def test_training_goes_on_after_loading(tmp_path: Path) -> None:
    model = Perceptron()
    save(padded(model, torch.randn(2, 4)), tmp_path / "model.pt2")
    loaded = load(tmp_path / "model.pt2")
    optimizer = torch.optim.SGD(loaded.parameters(), lr=0.1)
    loaded(torch.randn(2, 4)).sum().backward()
    optimizer.step()
    name = history(loaded)[-1].rewrites[0].modules_after[0]
    weight: Any = loaded.get_submodule(name).weight
    trained = weight[:6].clone()
    undone: Any = undo(loaded)
    assert torch.equal(undone.first.weight, trained)
    assert not torch.equal(undone.first.weight, model.first.weight)


def test_bfloat16(tmp_path: Path) -> None:
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    transformed = padded(Perceptron().bfloat16(), x)
    save(transformed, tmp_path / "model.pt2")
    loaded = load(tmp_path / "model.pt2")
    same(loaded, transformed)
    assert torch.equal(loaded(x), transformed(x))
    assert torch.equal(undo(loaded)(x), undo(transformed)(x))


def test_guards_are_saved_where_torch_suppresses_them(tmp_path: Path, varied: Varied) -> None:
    captured = capture(varied, (IDS, MASK), dynamic_shapes=(AUTO, AUTO))
    with ShapeEnv().suppress_guards():
        save(captured, tmp_path / "model.pt2")
    for module in (load(tmp_path / "model.pt2"), torch.export.load(tmp_path / "model.pt2").module()):
        module(torch.zeros(3, 5, dtype=torch.int64), mask=torch.ones(3, 5))
        with pytest.raises((CaptureError, AssertionError), match=r"size|Guard failed"):
            module(torch.zeros(3, 5, dtype=torch.int64), mask=torch.ones(3, 4))


def test_torch_reads_it_without_fxopt(tmp_path: Path, varied: Varied) -> None:
    transformed = PadOutputs()(capture(varied, (IDS, MASK), dynamic_shapes=(AUTO, AUTO)))
    save(transformed, tmp_path / "model.pt2")
    calls = []
    for rows, length in ((3, 5), (1, 2), (4, 1), (2, 9)):
        inputs = torch.randint(0, 10, (rows, length)), torch.rand(rows, length)
        calls.append((*inputs, transformed(*inputs)["logits"]))
    torch.save({"calls": calls, "keys": list(transformed.state_dict())}, tmp_path / "calls.pt")
    script = """
        import sys, torch
        for name in ("fxopt", "fxopt_core", "fxopt_capture"):
            sys.modules[name] = None
        program, told = torch.export.load("model.pt2"), torch.load("calls.pt")
        module = program.module()
        assert list(module.state_dict()) and set(module.state_dict()) == set(told["keys"]) == set(program.state_dict)
        for ids, mask, logits in told["calls"]:
            assert torch.equal(module(ids, mask=mask)["logits"], logits)
        try:
            module(torch.zeros(3, 5, dtype=torch.int64), mask=torch.ones(3, 4))
        except AssertionError as error:
            assert "Guard failed" in str(error)
        else:
            raise SystemExit("another length was taken")
        torch.export.save(program, "again.pt2")
    """
    run(tmp_path, script)
    assert history(load(tmp_path / "again.pt2")) == ()  # torch has left the ledger out


def run(folder: Path, script: str) -> None:
    """Run a script in a process of its own."""
    command = [sys.executable, "-W", "error", "-W", "ignore:Failed to initialize NumPy", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_another_process_undoes(tmp_path: Path) -> None:
    model = Perceptron()
    save(padded(model, torch.randn(2, 4)), tmp_path / "model.pt2")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    script = """
        import torch
        from fxopt_capture.archive.files import load
        from fxopt_core import history, undo
        loaded = load("model.pt2")
        assert [record.pass_name for record in history(loaded)] == ["pad-outputs"]
        restored, expected = undo(loaded).state_dict(), torch.load("state.pt")
        assert list(restored) == list(expected)
        assert all(torch.equal(restored[key], expected[key]) for key in expected)
    """
    run(tmp_path, script)


@pytest.mark.parametrize("check_guards", [True, False])
def test_a_graph_of_torch_export(tmp_path: Path, check_guards: bool) -> None:
    """Its own calling convention and checks stay, and so does the form of its graph."""
    model = Perceptron()
    program = torch.export.export(model, (torch.randn(3, 4),), dynamic_shapes={"x": {0: Dim("batch", max=8)}})
    original, transformed = (program.module(check_guards=check_guards) for _ in range(2))
    assert isinstance(original, GraphModule)
    assert isinstance(transformed, GraphModule)
    PadOutputs()(transformed, expect=2)
    save(transformed, tmp_path / "model.pt2")
    loaded = load(tmp_path / "model.pt2")
    assert layout(loaded) == layout(transformed)
    for rows in (1, 3, 8):
        x = torch.randn(rows, 4)
        assert torch.equal(loaded(x), transformed(x))
        assert torch.equal(torch.export.load(tmp_path / "model.pt2").module()(x), loaded(x))
    with pytest.raises(CaptureError, match="<= 8 only"):
        loaded(torch.randn(9, 4))
    assert layout(undo(loaded)) == layout(original)
    assert list(loaded.state_dict()) == list(original.state_dict())


class Functional(nn.Module):
    """Functions, methods and attributes, as `torch.fx.symbolic_trace` leaves them in a graph."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 6, bias=False)
        self.drop = nn.Dropout(0.5)
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor, mask: Tensor | None = None, *, scale: float = 2.0) -> Any:
        y = self.drop(torch.nn.functional.relu(self.lin(x)).view(x.shape[0], -1, 6))
        y = self.attention(y, y, y)[0].masked_fill(y > 1, float("-inf")).softmax(dim=-1)
        return {"y": y[..., 1:] * scale, "size": y.shape[1] // 1}


def test_a_traced_module(tmp_path: Path) -> None:
    model = Functional().eval()
    original, transformed = symbolic_trace(model), PadOutputs()(symbolic_trace(model), expect=1)
    with pytest.raises(CaptureError, match=r"nothing is known of the shape of input `x`.*give example inputs"):
        save(transformed, tmp_path / "model.pt2")
    save(transformed, tmp_path / "model.pt2", (torch.randn(2, 3, 4),))
    loaded = load(tmp_path / "model.pt2")
    assert layout(loaded) == layout(transformed)
    assert modules(loaded) == {**modules(transformed), "_guards_fn": "InputGuards()"}
    for rows in (2, 5):
        x = torch.randn(rows, 3, 4)
        torch.testing.assert_close(loaded(x)["y"], transformed(x)["y"], rtol=0, atol=0)
        torch.testing.assert_close(torch.export.load(tmp_path / "model.pt2").module()(x)["y"], loaded(x)["y"])
    with pytest.raises(CaptureError, match="input `x` has size 4 in dimension 1"):
        loaded(torch.randn(2, 4, 4))
    assert layout(undo(loaded)) == layout(original)


def test_dynamic_shapes_may_be_said(tmp_path: Path) -> None:
    traced = symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    save(traced, tmp_path / "any.pt2", torch.randn(2, 3, 4), dynamic_shapes={"input": {1: Dim.AUTO}})
    assert load(tmp_path / "any.pt2")(torch.randn(2, 7, 4)).shape == (2, 7, 4)
    captured = capture(Perceptron(), torch.randn(2, 4))
    save(captured, tmp_path / "static.pt2", torch.randn(3, 4), dynamic_shapes={"x": None})
    with pytest.raises(CaptureError, match="has size 2 in dimension 0"):
        load(tmp_path / "static.pt2")(torch.randn(2, 4))


def test_args_say_how_the_program_is_called(tmp_path: Path, varied: Varied) -> None:
    captured = capture(varied, (IDS, MASK))
    save(captured, tmp_path / "both.pt2", (IDS, MASK))
    save(captured, tmp_path / "names.pt2", kwargs={"ids": IDS, "mask": MASK})
    expected = captured(IDS, MASK)["logits"]
    assert torch.equal(torch.export.load(tmp_path / "both.pt2").module()(IDS, MASK)["logits"], expected)
    assert torch.equal(torch.export.load(tmp_path / "names.pt2").module()(ids=IDS, mask=MASK)["logits"], expected)
    for name in ("both.pt2", "names.pt2"):
        assert torch.equal(load(tmp_path / name)(IDS, mask=MASK)["logits"], expected)
    with pytest.raises(CaptureError, match="its dimension 0 is dynamic: give a size of 2 or more"):
        save(captured, tmp_path / "one.pt2", (IDS[:1], MASK[:1]))


def test_containers_and_constants(tmp_path: Path) -> None:
    pair, rest = {"left": torch.randn(4, 3), "right": torch.randn(3, 3)}, [torch.randn(4, 3), torch.randn(2)]
    dynamic = {"pair": {"left": {0: Dim.AUTO}, "right": None}, "rest": [{0: Dim.AUTO}, None]}
    captured = capture(Square(), (pair, rest), {"negate": True}, dynamic_shapes=dynamic)
    save(captured, tmp_path / "model.pt2")
    loaded = load(tmp_path / "model.pt2")
    same(loaded, captured)
    torch.testing.assert_close(loaded(pair, rest, negate=True), captured(pair, rest, negate=True), rtol=0, atol=0)
    with pytest.raises(CaptureError, match="was called with negate=False"):
        loaded(pair, rest)
    torch.testing.assert_close(
        torch.export.load(tmp_path / "model.pt2").module()(pair, rest), loaded(pair, rest, negate=True)
    )


def test_constants_of_a_program_stay_inputs_of_it(tmp_path: Path) -> None:
    pair, rest = {"left": torch.randn(4, 3), "right": torch.randn(3, 3)}, [torch.randn(4, 3), torch.randn(2)]
    torch.export.save(torch.export.export(Square(), (pair, rest), {"negate": True}), tmp_path / "first.pt2")
    loaded = load(tmp_path / "first.pt2")
    save(loaded, tmp_path / "second.pt2")
    again = load(tmp_path / "second.pt2")
    same(again, loaded)
    torch.testing.assert_close(again(pair, rest), loaded(pair, rest), rtol=0, atol=0)
    module = torch.export.load(tmp_path / "second.pt2").module()
    torch.testing.assert_close(module(pair, rest, negate=True), loaded(pair, rest), rtol=0, atol=0)


def test_a_module_that_was_pickled_knows_its_sizes_by_its_guards(tmp_path: Path) -> None:
    captured = padded(Perceptron(), torch.randn(2, 4))
    unpickled = pickle.loads(pickle.dumps(captured))
    save(unpickled, tmp_path / "model.pt2")
    loaded = load(tmp_path / "model.pt2")
    same(loaded, captured)
    assert loaded(torch.randn(7, 4)).shape == (7, 5)


@dataclasses.dataclass
class Named:
    """An output that torch knows by name."""

    value: Tensor


@dataclasses.dataclass
class Unnamed:
    """An output that torch has no name for."""

    value: Tensor


class Wrapped(nn.Module):
    """Returns a dataclass."""

    def __init__(self, kind: type[Any]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        return self.kind(x * 2)


def test_dataclasses(tmp_path: Path) -> None:
    torch.export.register_dataclass(Named, serialized_type_name=f"{Named.__module__}.Named")
    save(capture(Wrapped(Named), torch.ones(2)), tmp_path / "named.pt2")
    found = load(tmp_path / "named.pt2")(torch.ones(2))
    assert isinstance(found, Named)
    assert torch.equal(found.value, torch.full((2,), 2.0))


class OwnPass(Transformation):
    """``x / 3`` -> ``thirds(x)``, a function of its own."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in iter_nodes(graph_module.graph):
            if node.target in (torch.ops.aten.div.Tensor, operator.truediv):
                node.target, node.args = thirds, node.args[:1]
                self.mark_as_transformed(node)
        return graph_module


def thirds(x: Tensor) -> Tensor:
    return x / 3


def test_what_cannot_be_archived_is_named(tmp_path: Path) -> None:
    own = OwnPass()(capture(Perceptron(), torch.randn(2, 4)))
    with pytest.raises(CaptureError, match=r"cannot be saved with its ledger: node `div`, .*thirds.*ledger=False"):
        save(own, tmp_path / "own.pt2")
    assert not list(tmp_path.iterdir())
    save(own, tmp_path / "own.pt2", ledger=False)
    x = torch.randn(3, 4)
    loaded = load(tmp_path / "own.pt2")
    assert torch.equal(loaded(x), own(x))
    assert history(loaded) == ()
    hooked = padded(Perceptron(), torch.randn(2, 4))
    name = history(hooked)[-1].rewrites[0].modules_after[0]
    hooked.get_submodule(name).register_forward_hook(lambda module, args, output: None)
    with pytest.raises(CaptureError, match=f"module `{name}` has hooks"):
        save(hooked, tmp_path / "hooked.pt2")


def test_without_history_the_program_alone_does(tmp_path: Path) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1

    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return True

    model = nn.Sequential(Own())
    traced = GraphModule(model, Leaves().trace(model))
    save(traced, tmp_path / "model.pt2", torch.zeros(3))
    assert torch.equal(load(tmp_path / "model.pt2")(torch.zeros(3)), torch.ones(3))
