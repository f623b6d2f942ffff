"""Checkpoints of real architectures: a fine-tuned one goes into the rewritten model, and comes back under its keys."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import BY_NAME
from generated_models import Generated
from hypothesis import assume, given, strategies as st
from nightly import drawn
from published_weights import efficientnet, minilm
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

from fxopt_capture import capture, symbolic_trace
from fxopt_checkpoints import key_map, load_original_state_dict, original_state_dict
from fxopt_checkpoints.tensor_map import Derivation
from fxopt_checkpoints.trace import is_baked
from fxopt_core import NotReversibleError, Transformation, compose, faithful_copy, registry, undo
from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_norm import FuseBatchNorm1dInLinear, FuseBatchNorm2dInConv2d, FuseBatchNormInConvTranspose
from fxopt_rewrite import infer_shapes


def fine_tuned(model: nn.Module) -> dict[str, Tensor]:
    """Return a checkpoint as training would leave it: every parameter and statistic a little different."""
    generator = torch.Generator().manual_seed(1)
    checkpoint = {}
    for key, value in model.state_dict().items():
        noise = torch.rand(value.shape, generator=generator)
        checkpoint[key] = value * (1 + 0.05 * noise) if value.is_floating_point() else value
    tied: dict[int, str] = {}
    for key, value in model.state_dict().items():
        checkpoint[key] = checkpoint[tied.setdefault(value.data_ptr(), key)]
    return checkpoint


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        assert value.dtype == other[key].dtype and torch.equal(value, other[key]), key


def saved_and_loaded(checkpoint: dict[str, Tensor], how: str, folder: Path) -> dict[str, Any]:
    """Write a checkpoint to a file, and read it."""
    if how == "torch":
        torch.save(checkpoint, folder / "model.pt")
        loaded: dict[str, Any] = torch.load(folder / "model.pt", weights_only=True)
        return loaded
    files = pytest.importorskip("safetensors.torch")
    seen: dict[int, str] = {}  # of tied tensors such files hold one, as save_pretrained leaves the others out
    own = {key: value for key, value in checkpoint.items() if seen.setdefault(value.data_ptr(), key) == key}
    files.save_file(own, folder / "model.safetensors")
    return dict(files.load_file(folder / "model.safetensors"))


Made = tuple[nn.Module, GraphModule, dict[str, Tensor]]


@pytest.fixture(scope="module")
def sentence_encoder(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """Two layers of all-MiniLM-L6-v2, captured, and an input."""
    transformers = pytest.importorskip("transformers")
    folder = minilm(tmp_path_factory.mktemp("folders") / "minilm")
    model: nn.Module = transformers.AutoModel.from_pretrained(folder).eval()
    ids = torch.randint(1000, 20000, (2, 7), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return model, symbolic_trace(model, input_names=["input_ids", "attention_mask"]), inputs


@pytest.fixture(scope="module")
def decoder() -> Made:
    """A small Qwen2 with grouped-query attention and a head that is tied to its embedding."""
    qwen = BY_NAME["Qwen2"]
    model = qwen.build(pytest.importorskip("transformers"))
    return model, symbolic_trace(model, input_names=["input_ids", "attention_mask"]), qwen.example(2, 9)


@pytest.mark.parametrize(
    ("name", "pipeline", "output"),
    [
        ("sentence_encoder", "merge-linears", "last_hidden_state"),
        ("decoder", "merge-linears,fuse-bias-in-linear", "logits"),
    ],
)
def test_a_transformer_takes_and_gives_back_a_fine_tuned_checkpoint(
    name: str, pipeline: str, output: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    made, captured, inputs = request.getfixturevalue(name)
    model, graph_module = copy.deepcopy(made), faithful_copy(captured)
    keys, checkpoint = list(model.state_dict()), fine_tuned(model)
    registry().pipeline(pipeline)(graph_module)
    packed = key_map(graph_module).vllm_packed_modules_mapping()
    assert len(packed) == 2
    assert list(key_map(graph_module).original_keys) == keys
    for how in ("torch", "safetensors"):
        load_original_state_dict(graph_module, saved_and_loaded(checkpoint, how, tmp_path))
        saved = original_state_dict(graph_module)
        assert_equal(saved, checkpoint)
        assert_equal(saved_and_loaded(saved, "torch", tmp_path), checkpoint)
    model.load_state_dict(checkpoint)
    with torch.no_grad():
        found, expected = graph_module(**inputs), model(**inputs)
    torch.testing.assert_close(found[output], expected[output], rtol=1e-4, atol=1e-4)
    assert_equal(undo(graph_module).state_dict(), checkpoint)


def test_a_real_image_classifier_takes_a_fine_tuned_checkpoint(tmp_path: Path) -> None:
    """EfficientNet-Lite0: all batch norms are folded on the way in, and are identities on the way out."""
    model = efficientnet(whole=False)
    captured = capture(model, torch.randn(2, 3, 64, 64), dynamic_shapes=({0: Dim.AUTO},))
    graph_module = registry().pipeline("fuse-batch-norm2d-in-conv2d")(captured)
    assert list(key_map(graph_module).original_keys) == list(model.state_dict())
    checkpoint, images = fine_tuned(model), torch.randn(3, 3, 64, 64)
    load_original_state_dict(graph_module, saved_and_loaded(checkpoint, "safetensors", tmp_path))
    model.load_state_dict(checkpoint)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(graph_module(images), expected, rtol=1e-3, atol=1e-3)
        before = {key: value.clone() for key, value in graph_module.state_dict().items()}
        saved = saved_and_loaded(original_state_dict(graph_module), "safetensors", tmp_path)
        model.load_state_dict(saved)
        torch.testing.assert_close(model(images), expected, rtol=1e-3, atol=1e-3)
    load_original_state_dict(graph_module, saved)
    assert_equal(graph_module.state_dict(), before)


PASSES: tuple[Callable[[], Transformation], ...] = (
    MergeLinears,
    FuseBiasInLinear,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBatchNormInConvTranspose,
)


def graph_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> GraphModule:
    """Return a copy of a model as a graph with known shapes."""
    return infer_shapes(torch.fx.symbolic_trace(copy.deepcopy(model)), *inputs)


def check_round_trip(model: nn.Module, inputs: tuple[Tensor, ...], passes: Transformation) -> None:
    """A checkpoint makes the rewritten model what the fine-tuned one becomes by rewriting; saved, it does so again."""
    graph_module, reference = graph_of(model, inputs), graph_of(model, inputs)
    keys, checkpoint = list(reference.state_dict()), fine_tuned(reference)
    assume(not any(map(is_baked, keys)))  # a buffer that torch's tracer takes for a constant is no one's key
    reference.load_state_dict(checkpoint)
    passes(graph_module), passes(reference)
    names = key_map(graph_module)
    assert list(names.original_keys) == keys
    load_original_state_dict(graph_module, checkpoint)
    assert_equal(graph_module.state_dict(), reference.state_dict())
    try:
        saved = original_state_dict(graph_module)
    except NotReversibleError as error:
        assert "has no bias that could hold" in str(error)
        return
    assert list(saved) == keys
    if not any(isinstance(step, Derivation) for step in names.steps):
        assert_equal(saved, checkpoint)
    load_original_state_dict(graph_module, saved)
    for key, value in graph_module.state_dict().items():
        torch.testing.assert_close(value, reference.state_dict()[key], rtol=1e-4, atol=1e-4)
    half = {key: value for number, (key, value) in enumerate(checkpoint.items()) if number % 2}
    missing = load_original_state_dict(graph_module, half, strict=False).missing_keys
    assert set(missing) <= set(keys) - set(half)


ORDERS = st.lists(st.sampled_from(PASSES), min_size=1, max_size=4).map(lambda made: compose(*(each() for each in made)))


@drawn(12)
@given(seed=st.integers(0, 2**20), convolutions=st.booleans(), passes=ORDERS)
def test_generated_models(seed: int, convolutions: bool, passes: Transformation) -> None:
    """Whatever order the passes have."""
    torch.manual_seed(seed)
    inputs = torch.randn((2, 4, 4, 4) if convolutions else (3, 4))
    check_round_trip(Generated(seed, convolutions=convolutions).eval(), (inputs,), passes)
