"""Checkpoints of the original model in models with folded batch norms: folded going in, an identity coming out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from norm_models import chain
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_checkpoints.load import load_original_state_dict, original_state_dict
from fxopt_core import NotReversibleError, registry
from fxopt_norm.formulas import fold_after, fold_before, restore_after, restore_before
from fxopt_testing.rewrites import graph_of

FOLD = registry().pipeline("fold-batch-norm")  # in which each pass finds its own layers

MODELS: dict[str, Callable[[], nn.Module]] = {
    "conv": lambda: chain(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)),
    "no bias": lambda: chain(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6)),
    "no affine": lambda: chain(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False)),
    "neither": lambda: chain(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6, affine=False, eps=1e-2)),
    "groups": lambda: chain(nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
    "two norms": lambda: chain(nn.Conv2d(4, 6, 3, bias=False), nn.BatchNorm2d(6), nn.BatchNorm2d(6, eps=1e-3)),
    "transposed": lambda: chain(nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6)),
    "linear": lambda: chain(nn.Linear(4, 6), nn.BatchNorm1d(6)),
    "norm first": lambda: chain(nn.BatchNorm1d(4), nn.Linear(4, 6)),
    "norm first, no bias": lambda: chain(nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False)),
    "between": lambda: chain(nn.BatchNorm1d(4), nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2)),
    "counter": lambda: chain(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.Conv1d(6, 2, 3), nn.BatchNorm1d(2)),
    "volume": lambda: chain(nn.Conv3d(4, 2, 3), nn.BatchNorm3d(2)),
}
INPUTS: dict[Any, Tensor] = {nn.Conv1d: torch.randn(2, 4, 9), nn.Conv3d: torch.randn(2, 4, 4, 4, 4)}
INPUTS |= dict.fromkeys((nn.Conv2d, nn.ConvTranspose2d), torch.randn(2, 4, 6, 6))
every_model = pytest.mark.parametrize("name", list(MODELS))


def made(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def inputs_of(model: nn.Module) -> Tensor:
    (first, *_) = model.children()
    return INPUTS.get(type(first), torch.randn(3, 4))


def folded(model: nn.Module) -> GraphModule:
    dtype = next(model.parameters()).dtype
    graph_module = FOLD(graph_of(model, "modules", inputs_of(model).to(dtype)))
    assert not [module for module in graph_module.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    return graph_module


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        assert value.dtype == other[key].dtype and torch.equal(value, other[key]), key


@every_model
def test_loading_folds_on_the_way(name: str) -> None:
    graph_module, new = folded(made(name, 0)), made(name, 1)
    inputs = inputs_of(new)
    load_original_state_dict(graph_module, graph_of(new, "modules", inputs).state_dict())
    assert_equal(graph_module.state_dict(), folded(new).state_dict())
    torch.testing.assert_close(graph_module(inputs), new(inputs), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in MODELS if "no bias" not in name])
def test_what_is_saved_computes_the_same(name: str) -> None:
    graph_module, inputs = folded(made(name, 0)), inputs_of(made(name, 0))
    original, other = (graph_of(made(name, seed), "modules", inputs) for seed in (0, 1))
    before = {key: value.clone() for key, value in graph_module.state_dict().items()}
    saved = original_state_dict(graph_module)
    assert list(saved) == list(original.state_dict())
    assert {key: (v.shape, v.dtype) for key, v in saved.items()} == {
        key: (v.shape, v.dtype) for key, v in original.state_dict().items()
    }
    assert str(other.load_state_dict(saved)) == "<All keys matched successfully>"
    torch.testing.assert_close(other(inputs), original(inputs), rtol=1e-4, atol=1e-4)
    load_original_state_dict(graph_module, saved)
    for key, value in graph_module.state_dict().items():
        if "norm first" in name or name == "between":
            torch.testing.assert_close(value, before[key])
        else:
            assert torch.equal(value, before[key]), key


OTHER_DTYPES = [("between", torch.bfloat16), ("between", torch.float64)]


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float16) for name in MODELS), *OTHER_DTYPES])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    """A float32 checkpoint; the model had its dtype before the fold, or got it since."""
    checkpoint, reference = made(name, 1).state_dict(), made(name, 0).to(dtype)
    reference.load_state_dict(checkpoint)
    expected = folded(reference).state_dict()
    for graph_module in (folded(made(name, 0).to(dtype)), folded(made(name, 0)).to(dtype)):
        load_original_state_dict(graph_module, checkpoint)
        assert_equal(graph_module.state_dict(), expected)


def test_without_a_bias_nothing_holds_the_folded_one() -> None:
    with pytest.raises(NotReversibleError, match=r"`1_folded\.bias` \(pass .*\): .* has no bias that") as caught:
        original_state_dict(folded(made("norm first, no bias", 0)))
    assert caught.value.pass_name == "fuse-batch-norm1d-in-linear"


DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


@given(
    dtype=DTYPES,
    eps=st.one_of(st.sampled_from([0.0, 1e-12, 1e-5, 1e-3, 0.1, 1.0]), st.floats(0, 1)),
    biased=st.booleans(),
    affine=st.booleans(),
    scale=st.floats(-30, 30),
    seed=st.integers(0, 2**20),
)
@settings(deadline=None)
def test_folding_what_was_restored_gives_the_same_bits(
    dtype: torch.dtype, eps: float, biased: bool, affine: bool, scale: float, seed: int
) -> None:
    """Rounding of the variance changes no weight, however small or large."""
    generator = torch.Generator().manual_seed(seed)
    weight = (torch.randn(16, 5, generator=generator, dtype=torch.float64) * 2.0**scale).to(dtype)
    bias = (torch.randn(16, generator=generator, dtype=torch.float64) * 2.0**scale).to(dtype)
    shapes: dict[str, tuple[int, ...] | None] = dict.fromkeys(
        ("bias", "mean", "var", "norm_weight", "norm_bias"), (16,)
    )
    shapes |= {"weight": (16, 5), "bias": (16,) if biased else None}
    if not affine:
        shapes |= {"norm_weight": None, "norm_bias": None}
    found = {key: value.to(dtype) for key, value in restore_after(weight, bias, eps=eps, shapes=shapes).items()}
    assert {key: tuple(value.shape) for key, value in found.items()} == {k: s for k, s in shapes.items() if s}
    again = fold_after(**{key: found.get(key) for key in shapes}, eps=eps)  # type: ignore[arg-type]  # the weight is there
    assert torch.equal(again[0], weight) and torch.equal(again[1], bias)


@given(dtype=DTYPES, affine=st.booleans(), rows=st.integers(1, 9), seed=st.integers(0, 2**20))
@settings(max_examples=settings().max_examples // 2, deadline=None)
def test_folding_before_what_was_restored_gives_the_same_bits(
    dtype: torch.dtype, affine: bool, rows: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    names = ("weight", "bias", "mean", "var", "norm_weight", "norm_bias")
    sizes = ((rows, 5), (rows,), (5,), (5,), *((5,) if affine else None for _ in range(2)))
    shapes = dict(zip(names, sizes, strict=True))
    weight, bias = (torch.randn(*size, generator=generator).to(dtype) for size in sizes[:2] if size)
    found = {key: t.to(dtype) for key, t in restore_before(weight, bias, eps=1e-5, shapes=shapes).items()}
    assert {key: tuple(value.shape) for key, value in found.items()} == {k: s for k, s in shapes.items() if s}
    again = fold_before(**{name: found.get(name) for name in names}, eps=1e-5)  # type: ignore[arg-type]  # the weight is there
    assert torch.equal(again[0], weight) and torch.equal(again[1], bias)
