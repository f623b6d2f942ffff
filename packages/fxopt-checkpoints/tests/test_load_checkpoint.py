"""Checkpoints that are streamed into captured modules, and all that is refused before anything is written."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from padded_linears import PadOutputs, Perceptron
from safetensors_writing import write_safetensors
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_capture import capture
from fxopt_checkpoints import load_checkpoint
from fxopt_checkpoints.load import load_original_state_dict
from fxopt_checkpoints.streaming.files import StoredTensor
from fxopt_core import CheckpointError, undo


def _meta(make: Callable[[], nn.Module] = Perceptron) -> nn.Module:
    with torch.device("meta"):
        return make().eval()


def _padded(model: nn.Module) -> GraphModule:
    return PadOutputs()(capture(model, torch.randn(2, 4, dtype=next(model.parameters()).dtype)))


def _state(module: nn.Module) -> dict[str, tuple[Tensor, Tensor | None, int]]:
    """Return each tensor, a copy of its values, and its version."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    copies = {name: None if tensor.is_meta else tensor.detach().clone() for name, tensor in tensors.items()}
    return {name: (tensor, copies[name], tensor._version) for name, tensor in tensors.items()}


def _unchanged(module: nn.Module, before: dict[str, tuple[Tensor, Tensor | None, int]]) -> bool:
    now = _state(module)
    return list(now) == list(before) and all(
        now[name][0] is tensor and (values is None or torch.equal(tensor, values))
        for name, (tensor, values, _) in before.items()
    )


@pytest.fixture
def trained() -> nn.Module:
    torch.manual_seed(3)
    return Perceptron().eval()


@pytest.mark.parametrize("on_meta", [True, False], ids=["meta", "values"])
def test_it_is_loading_and_transforming_in_one(tmp_path: Path, trained: nn.Module, on_meta: bool) -> None:
    write_safetensors(tmp_path / "model.safetensors", trained.state_dict())
    graph_module = _padded(_meta() if on_meta else Perceptron().eval())
    before = dict(graph_module.named_parameters())
    found = load_checkpoint(graph_module, tmp_path)
    assert str(found) == "<All keys matched successfully>"
    expected = _padded(trained).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in graph_module.state_dict().items())
    kept = [graph_module.get_parameter(name) is parameter for name, parameter in before.items()]
    assert kept == [not on_meta] * len(before)
    x = torch.randn(5, 4)
    torch.testing.assert_close(graph_module(x), trained(x))
    undo(graph_module)
    assert all(torch.equal(value, trained.state_dict()[key]) for key, value in graph_module.state_dict().items())


def test_flags_are_kept(tmp_path: Path, trained: nn.Module) -> None:
    write_safetensors(tmp_path / "model.safetensors", trained.state_dict())
    model = _meta()
    model.get_submodule("first").requires_grad_(False)
    graph_module = _padded(model)
    load_checkpoint(graph_module, tmp_path)
    flags = {name: parameter.requires_grad for name, parameter in graph_module.named_parameters()}
    assert flags == {name: name != "padded.weight" for name in flags}
    assert all(type(parameter) is nn.Parameter for parameter in graph_module.parameters())


@pytest.mark.parametrize("stored", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_values_are_cast_to_what_the_module_has(tmp_path: Path, trained: nn.Module, stored: torch.dtype) -> None:
    tensors = {key: value.to(stored) for key, value in trained.state_dict().items()}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    graph_module, other = _padded(_meta()), _padded(Perceptron().eval())
    load_checkpoint(graph_module, tmp_path)
    load_original_state_dict(other, tensors)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in graph_module.state_dict().items())


class Buffers(nn.Module):
    """Persistent and other buffers, a tie, a tensor that the graph does not read, and one of each kind of dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.norm = nn.BatchNorm1d(4)
        self.unused = nn.Parameter(torch.zeros(2))
        self.register_buffer("steps", torch.tensor(0))
        self.register_buffer("scale", torch.ones(4), persistent=False)

    def forward(self, ids: Tensor) -> Any:
        return self.head(self.norm(self.embedding(ids) * self.scale) + self.steps)


def _filled() -> nn.Module:
    torch.manual_seed(1)
    model = Buffers()
    for tensor in model.state_dict().values():
        tensor.random_(1, 9) if not tensor.is_floating_point() else tensor.uniform_(0.5, 2.0)
    return model.eval()


IDS = torch.tensor([1, 2, 0])


def test_ties_buffers_and_what_nothing_reads(tmp_path: Path) -> None:
    model = _filled()
    stored = {key: value for key, value in model.state_dict().items() if key != "head.weight"}
    write_safetensors(tmp_path / "model.safetensors", stored)
    meta = _meta(Buffers)
    meta.get_buffer("scale")
    meta._buffers["scale"] = torch.ones(4)
    graph_module = capture(meta, IDS)
    load_checkpoint(graph_module, tmp_path)
    assert list(graph_module.state_dict()) == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in graph_module.state_dict().items())
    assert graph_module.get_parameter("head.weight") is graph_module.get_parameter("embedding.weight")
    torch.testing.assert_close(graph_module(IDS), model(IDS))
    assert all(tensor.is_meta for tensor in meta.state_dict().values())


def test_a_buffer_that_no_checkpoint_has_is_refused_by_name(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", _filled().state_dict())
    graph_module = capture(_meta(Buffers), IDS)
    before = _state(graph_module)
    with pytest.raises(CheckpointError, match="`scale` is not part of a checkpoint, since it is not saved"):
        load_checkpoint(graph_module, tmp_path)
    assert _unchanged(graph_module, before)
    graph_module.scale = torch.ones(4)
    load_checkpoint(graph_module, tmp_path)
    torch.testing.assert_close(graph_module(IDS), _filled()(IDS))


def test_ties_that_differ_in_the_checkpoint(tmp_path: Path) -> None:
    tensors = dict(_filled().state_dict())
    file = write_safetensors(tmp_path / "model.safetensors", tensors)
    graph_module = capture(Buffers().eval(), IDS)
    load_checkpoint(graph_module, file)
    tensors["head.weight"] = tensors["head.weight"] + 1
    write_safetensors(file, tensors)
    with pytest.raises(CheckpointError, match=r"`embedding.weight` in .* and `head.weight` in .* and differ here"):
        load_checkpoint(graph_module, file)


def _without(key: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name != key}


def _with(key: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, key: tensor}


MISFITS: dict[str, tuple[Callable[[dict[str, Tensor]], dict[str, Tensor]], str]] = {
    "missing": (_without("block.0.weight"), "missing: `block.0.weight`"),
    "unexpected": (_with("extra", torch.ones(1)), "(?s)not in the original model: `extra`.*`extra` is in `{file}`"),
    "shape": (
        _with("first.weight", torch.ones(6, 5)),
        r"`first.weight` in `{file}` has shape \(6, 5\), expected \(6, 4\)",
    ),
    "integers": (
        _with("first.weight", torch.ones(6, 4, dtype=torch.int64)),
        "`first.weight` in `{file}` is torch.int64, expected floating values, to be torch.float32",
    ),
}


@pytest.mark.parametrize("on_meta", [True, False], ids=["meta", "values"])
@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(
    tmp_path: Path, trained: nn.Module, name: str, on_meta: bool
) -> None:
    change, message = MISFITS[name]
    file = write_safetensors(tmp_path / "model.safetensors", change(dict(trained.state_dict())))
    graph_module = _padded(_meta() if on_meta else Perceptron().eval())
    before = _state(graph_module)
    with pytest.raises(CheckpointError, match=message.format(file=file)) as caught:
        load_checkpoint(graph_module, tmp_path)
    assert str(tmp_path) in str(caught.value) and "nothing of it was loaded" in str(caught.value)
    assert _unchanged(graph_module, before)


def test_without_strict_what_is_complete_is_loaded(tmp_path: Path, trained: nn.Module) -> None:
    tensors = _without("block.0.weight")(dict(trained.state_dict()))
    write_safetensors(tmp_path / "model.safetensors", tensors | {"extra": torch.ones(1)})
    graph_module = _padded(_meta())
    found = load_checkpoint(graph_module, tmp_path, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == (["block.0.weight"], ["extra"])
    hollow = {name for name, parameter in graph_module.named_parameters() if parameter.is_meta}
    assert hollow == {"block.padded.weight"}
    assert torch.equal(graph_module.get_parameter("block.2.bias"), trained.state_dict()["block.2.bias"])


@pytest.mark.parametrize(
    ("error", "on_meta"), [(CheckpointError("it cannot be read"), True), (KeyboardInterrupt(), False)], ids=str
)
def test_failing_midway_leaves_nothing_loaded(
    tmp_path: Path, trained: nn.Module, error: BaseException, on_meta: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_safetensors(tmp_path / "model.safetensors", trained.state_dict())
    original = StoredTensor.read
    for at in range(1, len(trained.state_dict()) + 1):
        graph_module = _padded(_meta() if on_meta else Perceptron().eval())
        before, reads = _state(graph_module), itertools.count(1)

        def failing(stored: StoredTensor, at: int = at, reads: Iterator[int] = reads) -> Tensor:
            if next(reads) == at:
                raise error
            return original(stored)

        monkeypatch.setattr(StoredTensor, "read", failing)
        with pytest.raises(type(error)):
            load_checkpoint(graph_module, tmp_path)
        assert _unchanged(graph_module, before)


def test_memory_is_that_of_the_module(tmp_path: Path, trained: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    write_safetensors(tmp_path / "model.safetensors", trained.state_dict())
    made: list[int] = []
    for name in ("empty", "empty_like", "zeros_like"):
        monkeypatch.setattr(torch, name, _counted(getattr(torch, name), made))
    graph_module = _padded(_meta())
    made.clear()
    load_checkpoint(graph_module, tmp_path)
    size = sum(parameter.numel() * 4 for parameter in graph_module.parameters())
    assert sum(made) == size


def _counted(function: Callable[..., Tensor], made: list[int]) -> Callable[..., Tensor]:
    def counted(*args: Any, **kwargs: Any) -> Tensor:
        tensor = function(*args, **kwargs)
        made.append(0 if tensor.is_meta else tensor.numel() * tensor.element_size())
        return tensor

    return counted


def test_renamed_tensors(tmp_path: Path, trained: nn.Module) -> None:
    tensors = {key.replace("first", "layer1"): value for key, value in trained.state_dict().items()}
    write_safetensors(tmp_path / "model.safetensors", tensors | {"step": torch.tensor(3)})
    graph_module, x = _padded(_meta()), torch.randn(3, 4)
    load_checkpoint(
        graph_module, tmp_path, rename=lambda key: None if key == "step" else key.replace("layer1", "first")
    )
    torch.testing.assert_close(graph_module(x), trained(x))
    with pytest.raises(CheckpointError, match="not in the original model: `step`"):
        load_checkpoint(_padded(_meta()), tmp_path, rename={"layer1.weight": "first.weight"})


def test_modules_that_load_themselves_are_refused_by_name(tmp_path: Path, trained: nn.Module) -> None:
    write_safetensors(tmp_path / "model.safetensors", trained.state_dict())
    graph_module = _padded(_meta())
    layer: Any = graph_module.get_submodule("block.2")
    handle = layer.register_load_state_dict_pre_hook(lambda *args: None)
    with pytest.raises(CheckpointError, match=r"module `block.2` \(Linear\) loads its part by its own code"):
        load_checkpoint(graph_module, tmp_path)
    handle.remove()
    seen: list[Any] = []
    layer.register_load_state_dict_post_hook(lambda module, found: seen.append(found))
    load_checkpoint(graph_module, tmp_path)
    assert [found.missing_keys for found in seen] == [[]]


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def test_counters_of_batches_may_be_absent_as_in_torch(tmp_path: Path) -> None:
    tensors = {key: value for key, value in _filled().state_dict().items() if "num_batches" not in key}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    meta = _meta(Buffers)
    meta._buffers["scale"] = torch.ones(4)
    graph_module = capture(meta, IDS)
    load_checkpoint(graph_module, tmp_path)
    assert graph_module.get_buffer("norm.num_batches_tracked").item() == 0
    assert not any(tensor.is_meta for tensor in graph_module.state_dict().values())


@pytest.mark.parametrize("on_meta", [True, False], ids=["meta", "values"])
def test_in_inference_mode(tmp_path: Path, trained: nn.Module, on_meta: bool) -> None:
    write_safetensors(tmp_path / "model.safetensors", trained.state_dict())
    graph_module = _padded(_meta() if on_meta else Perceptron().eval())
    x = torch.randn(3, 4)
    with torch.inference_mode():
        load_checkpoint(graph_module, tmp_path)
        torch.testing.assert_close(graph_module(x), trained(x))


def test_tensors_of_inference_mode_are_replaced(tmp_path: Path, trained: nn.Module) -> None:
    write_safetensors(tmp_path / "model.safetensors", trained.state_dict())
    with torch.inference_mode():
        model = Perceptron().eval()
    graph_module = PadOutputs()(torch.fx.symbolic_trace(model))
    load_checkpoint(graph_module, tmp_path)
    x = torch.randn(3, 4)
    torch.testing.assert_close(graph_module(x), trained(x))
    assert not any(parameter.is_inference() for parameter in graph_module.parameters())
