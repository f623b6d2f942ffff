"""`save`: an archive that `load` makes the very graph module of again."""

from __future__ import annotations

import copy
import operator
import pickle
import re
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from archive_models import Square, Varied, layout, modules
from padded_linears import PadOutputs, Perceptron
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule, symbolic_trace
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxopt_capture import CapturedModule, capture, export
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


@pytest.fixture(scope="module")
def varied() -> Varied:
    torch.manual_seed(0)
    return Varied().eval()


@pytest.fixture(scope="module")
def captured(varied: Varied) -> GraphModule:
    return capture(varied, (IDS, MASK), dynamic_shapes=(AUTO, AUTO))


def test_the_graph_module_comes_back_and_can_be_undone(
    tmp_path: Path, perceptron: GraphModule, padded: GraphModule
) -> None:
    save(padded, tmp_path / "model.fxopt")
    loaded = load(tmp_path / "model.fxopt")
    same(loaded, padded)
    assert history(loaded)[-1].rewrites
    for rows in (1, 2, 5, 64):
        x = torch.randn(rows, 4)
        assert torch.equal(loaded(x), padded(x))
    undone = undo(loaded)
    assert layout(undone) == layout(perceptron)
    assert modules(undone) == modules(perceptron)
    assert list(undone.state_dict()) == list(Perceptron().state_dict())
    assert all(torch.equal(value, perceptron.state_dict()[key]) for key, value in undone.state_dict().items())


def test_saving_leaves_the_graph_module_as_it_was(tmp_path: Path, padded: GraphModule) -> None:
    def state() -> tuple[object, ...]:
        metas = [dict(node.meta) for node in iter_nodes(padded.graph)]
        return layout(padded), modules(padded), list(vars(padded)), len(padded._forward_pre_hooks), metas

    before = state()
    save(padded, tmp_path / "model.fxopt")
    assert state() == before


def test_saving_again_changes_nothing(tmp_path: Path, captured: GraphModule) -> None:
    contents = []
    graph_module = PadOutputs()(copy.deepcopy(captured))
    for _ in range(3):
        save(graph_module, tmp_path / "model.fxopt")
        contents.append((tmp_path / "model.fxopt").read_bytes())
        graph_module = load(tmp_path / "model.fxopt")
    assert contents[0] == contents[1] == contents[2]


def test_nothing_tells_of_the_authors_machine(tmp_path: Path, captured: GraphModule) -> None:
    """Neither nodes nor the history nor programs hold paths and lines of code."""
    graph_module = PadOutputs()(copy.deepcopy(captured))
    graph_module.meta["pretrained"] = {
        "config": {"_name_or_path": str(tmp_path)}, "config_class": "C", "generation_config": None,
        "main_input_name": "x",
    }  # fmt: skip
    told = (Path(__file__).parent.as_posix().encode(), str(tmp_path).encode(), b"self.frozen(block(x))")
    save(graph_module, tmp_path / "model.fxopt")
    torch.export.save(export(graph_module), tmp_path / "model.pt2")
    for file in (tmp_path / "model.fxopt", tmp_path / "model.pt2"):
        assert not any(text in file.read_bytes() for text in told)


def test_a_varied_model(tmp_path: Path, varied: Varied, captured: GraphModule) -> None:
    save(captured, tmp_path / "model.fxopt")
    loaded: Any = load(tmp_path / "model.fxopt")
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


def test_guards_are_saved_where_torch_suppresses_them(tmp_path: Path, captured: GraphModule) -> None:
    with ShapeEnv().suppress_guards():
        save(captured, tmp_path / "model.fxopt")
    for module in (load(tmp_path / "model.fxopt"), export(captured).module()):
        module(torch.zeros(3, 5, dtype=torch.int64), mask=torch.ones(3, 5))
        with pytest.raises((CaptureError, AssertionError), match=r"size|Guard failed"):
            module(torch.zeros(3, 5, dtype=torch.int64), mask=torch.ones(3, 4))


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


def test_containers_and_constants(tmp_path: Path) -> None:
    pair, rest = {"left": torch.randn(4, 3), "right": torch.randn(3, 3)}, [torch.randn(4, 3), torch.randn(2)]
    dynamic = {"pair": {"left": {0: Dim.AUTO}, "right": None}, "rest": [{0: Dim.AUTO}, None]}
    captured = capture(Square(), (pair, rest), {"negate": True}, dynamic_shapes=dynamic)
    save(captured, tmp_path / "model.fxopt")
    loaded = load(tmp_path / "model.fxopt")
    same(loaded, captured)
    expected = captured(pair, rest, negate=True)
    torch.testing.assert_close(loaded(pair, rest, negate=True), expected, rtol=0, atol=0)
    torch.testing.assert_close(export(captured).module()(pair, rest), expected, rtol=0, atol=0)
    with pytest.raises(CaptureError, match="was called with negate=False"):
        loaded(pair, rest)


def test_a_module_that_was_pickled_knows_its_sizes_by_its_guards(tmp_path: Path, padded: GraphModule) -> None:
    save(pickle.loads(pickle.dumps(padded)), tmp_path / "model.fxopt")
    loaded = load(tmp_path / "model.fxopt")
    same(loaded, padded)
    assert loaded(torch.randn(7, 4)).shape == (7, 5)


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


def test_what_cannot_be_archived_is_named(tmp_path: Path, perceptron: GraphModule) -> None:
    own = OwnPass()(copy.deepcopy(perceptron))
    with pytest.raises(CaptureError, match=r"cannot be saved: node `div`, .*thirds.*Undo or change this"):
        save(own, tmp_path / "own.fxopt")
    assert not list(tmp_path.iterdir())


def test_a_traced_module(tmp_path: Path) -> None:
    """It comes back as it was: without checks of its inputs."""
    model = Functional().eval()
    original, transformed = symbolic_trace(model), PadOutputs()(symbolic_trace(model), expect=1)
    save(transformed, tmp_path / "model.fxopt")
    loaded = load(tmp_path / "model.fxopt")
    assert not isinstance(loaded, CapturedModule)
    same(loaded, transformed)
    for rows in (2, 5):
        x = torch.randn(rows, 3, 4)
        torch.testing.assert_close(loaded(x)["y"], transformed(x)["y"], rtol=0, atol=0)
    assert layout(undo(pickle.loads(pickle.dumps(loaded)))) == layout(undo(loaded)) == layout(original)


@pytest.mark.parametrize("check_guards", [True, False])
def test_a_graph_of_torch_export_is_refused(tmp_path: Path, check_guards: bool) -> None:
    model = Perceptron()
    program = torch.export.export(model, (torch.randn(3, 4),), dynamic_shapes={"x": {0: Dim("batch", max=8)}})
    module: Any = program.module(check_guards=check_guards)
    with pytest.raises(CaptureError, match=r"made by torch.export.*fxopt_capture.capture, from the model or from"):
        save(module, tmp_path / "model.fxopt")
    checked = program.module(check_guards=False)
    save(capture(checked, torch.randn(3, 4)), tmp_path / "model.fxopt")
    x = torch.randn(5, 4)
    assert torch.equal(load(tmp_path / "model.fxopt")(x), model(x))


# -- tensors ----------------------------------------------------------------------------------------------------------

DTYPES = [
    value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype) and not re.search("quint|qint|bits|int[1-7]$|_x2|float4|complex32", str(value))
]


@pytest.mark.parametrize("dtype", dict.fromkeys(DTYPES), ids=str)
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    graph_module = symbolic_trace(nn.Identity())
    content = torch.randint(0, 2, (3, 5, dtype.itemsize), dtype=torch.uint8)
    graph_module.register_buffer(
        "b", content.view(dtype).squeeze(-1) if dtype is not torch.bool else content[..., 0] > 0
    )
    graph_module.register_buffer("none", torch.empty(0, 3, dtype=dtype))
    graph_module.register_buffer("one", torch.zeros((), dtype=dtype))
    save(graph_module, tmp_path / "model.fxopt")
    loaded: Any = load(tmp_path / "model.fxopt")
    for name, tensor in graph_module.named_buffers():
        found = loaded.get_buffer(name)
        assert (found.dtype, found.shape, found.stride()) == (dtype, tensor.shape, tensor.stride())
        assert torch.equal(
            found.view(torch.uint8) if found.dim() else found, tensor.view(torch.uint8) if found.dim() else tensor
        )


def test_memory_that_tensors_share(tmp_path: Path) -> None:
    """Views of one another stay so; strides stay; what is expanded becomes plain."""
    rows = torch.arange(40.0).view(4, 10)
    apart = torch.arange(6.0)
    graph_module = symbolic_trace(nn.Identity())
    tensors = [rows, rows[1:3], rows.t(), rows[::2, ::3], apart[:2], apart[4:], torch.ones(1).expand(3, 4)]
    for number, tensor in enumerate(tensors):
        graph_module.register_buffer(f"b{number}", tensor)
    save(graph_module, tmp_path / "model.fxopt")
    loaded = load(tmp_path / "model.fxopt")
    found = [loaded.get_buffer(f"b{number}") for number in range(len(tensors))]
    assert all(map(torch.equal, found, tensors))
    assert [tensor.stride() for tensor in found[:-1]] == [tensor.stride() for tensor in tensors[:-1]]
    found[0].add_(1)
    assert all(map(torch.equal, found[:4], [tensor + 1 for tensor in tensors[:4]]))
    assert torch.equal(found[4], apart[:2])


def test_what_is_written_to_a_loaded_module_stays_out_of_the_file(path: Path) -> None:
    """Its pages are private, and the file may go."""
    content, loaded, second = path.read_bytes(), load(path), load(path)
    expected = second(torch.ones(2, 4))
    with torch.no_grad():
        for parameter in loaded.parameters():
            parameter.add_(1)
    loaded.share_memory()
    loaded.double()
    assert path.read_bytes() == content
    path.unlink()
    assert torch.equal(second(torch.ones(2, 4)), expected)
    assert torch.equal(pickle.loads(pickle.dumps(second))(torch.ones(2, 4)), expected)


def test_any_reader_of_safetensors_finds_the_tensors(tmp_path: Path, captured: GraphModule) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    save(captured, tmp_path / "model.fxopt")
    with zipfile.ZipFile(tmp_path / "model.fxopt") as archive:
        assert archive.testzip() is None
        found = safetensors.load(archive.read("weights.safetensors"))
    state = {name: tensor for name, tensor in captured.state_dict().items() if name in found}
    assert len(state) == len({tensor.data_ptr() for tensor in captured.state_dict().values()})
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize(
    ("tensor", "words"),
    [(torch.ones(2, device="meta"), "on the meta device"), (torch.ones(2).to_sparse(), "sparse, nested or quantized")],
)
def test_tensors_that_are_not_plain(tensor: Tensor, words: str, tmp_path: Path) -> None:
    graph_module = symbolic_trace(nn.Identity())
    graph_module.register_buffer("b", tensor)
    with pytest.raises(CaptureError, match=f"tensor `b` is .*{words}"):
        save(graph_module, tmp_path / "model.fxopt")
