"""`MergeParallelConvolutions`: RepVGG, MobileOne, RepViT, what breaks them, and their checkpoints."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_models import Computes, chain
from torch import Tensor, nn

from fxopt_checkpoints import load_original_state_dict, original_state_dict
from fxopt_core import NotReversibleError, registry, undo
from fxopt_norm import MergeParallelConvolutions
from fxopt_testing import assert_left_alone, assert_rewrites
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of

MERGE = MergeParallelConvolutions()
X = torch.randn(2, 4, 7, 6, generator=torch.Generator().manual_seed(0))
OTHERS = [(torch.randn(3, 4, 5, 9),), (torch.randn(0, 4, 8, 8),), (torch.randn(1, 4, 3, 3),)]


def normed(channels: int, out: int, kernel: int, **options: Any) -> nn.Module:
    return chain(nn.Conv2d(channels, out, kernel, bias=False, **options), nn.BatchNorm2d(out))


def in_place(m: Any, x: Tensor) -> Tensor:
    out: Any = 0
    for each in (m.a, m.b):
        out += each(x)
    out += m.norm(x)
    return F.relu(out, inplace=True)


def repvgg(bias: bool = False) -> nn.Module:
    return Computes(
        lambda m, x: m.a(x) + m.b(x) + m.norm(x),
        a=chain(nn.Conv2d(4, 4, 3, padding=1, bias=bias), nn.BatchNorm2d(4)),
        b=normed(4, 4, 1),
        norm=nn.BatchNorm2d(4),
    )


def repvit() -> nn.Module:
    branches = {"a": normed(4, 4, 3, padding=1, groups=4), "b": nn.Conv2d(4, 4, 1, groups=4)}
    return Computes(lambda m, x: m.norm(m.a(x) + m.b(x) + x), **branches, norm=nn.BatchNorm2d(4))


def mobileone() -> nn.Module:
    return Computes(
        in_place,
        a=normed(4, 4, 3, padding=1, groups=2),
        b=normed(4, 4, 3, padding=1, groups=2),
        norm=nn.BatchNorm2d(4, affine=False),
    )


def wide(m: Any, x: Tensor) -> Any:
    return m.a(x) + m.b(x)


def two(a: nn.Module, b: nn.Module, forward: Callable[[Any, Tensor], Any] = wide, **others: nn.Module) -> nn.Module:
    return Computes(forward, a=a, b=b, **others)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "repvgg": repvgg,
    "biased": lambda: repvgg(bias=True),
    "repvit": repvit,
    "mobileone": mobileone,
    "stride": lambda: two(normed(4, 6, 3, padding=1, stride=2), nn.Conv2d(4, 6, 1, stride=2)),
    "no bias": lambda: two(nn.Conv2d(4, 6, 5, padding=1, bias=False), nn.Conv2d(4, 6, 3, bias=False)),
    "dilation": lambda: two(nn.Conv2d(4, 6, 3, padding=2, dilation=2), nn.Conv2d(4, 6, 1, dilation=3)),
    "same": lambda: two(nn.Conv2d(4, 6, (3, 5), padding="same"), nn.Conv2d(4, 6, (1, 3), padding=(0, 1))),
    "reflect": lambda: two(nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), nn.Conv2d(4, 6, 1)),
    "identities": lambda: Computes(lambda m, x: (x + m.n(x)) + m.a(x), a=normed(4, 4, 1), n=nn.BatchNorm2d(4)),
}


IN_FORMS = product(("repvgg", "same", "mobileone"), ("functions", "export-dynamic"))


@pytest.mark.parametrize(("name", "form"), [*((name, "modules") for name in MODELS), *IN_FORMS])
def test_branches_become_one_convolution(name: str, form: Form) -> None:
    merged = assert_rewrites(MERGE, MODELS[name](), X, count=1, form=form, refused=(), others=OTHERS)
    left = [key for key in merged.state_dict() if not key.startswith("norm.")]
    assert left == [key for key in left if "_merged." in key] and len(left) == (1 if name == "no bias" else 2)


OTHER_DTYPES = [("biased", torch.float64), ("biased", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), [*((name, torch.float32) for name in MODELS), *OTHER_DTYPES])
def test_checkpoints_go_in_and_out(name: str, dtype: torch.dtype) -> None:
    x, old, new = X.to(dtype), MODELS[name]().to(dtype), MODELS[name]().to(dtype)
    graph_module = MERGE(graph_of(old, "modules", x), expect=1)
    load_original_state_dict(graph_module, new.state_dict())
    expected = MERGE(graph_of(new, "modules", x)).state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in graph_module.state_dict().items())
    saved = original_state_dict(graph_module)
    assert {key: value.shape for key, value in saved.items()} == {k: v.shape for k, v in new.state_dict().items()}
    old.load_state_dict(saved)
    close = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 0.1}[dtype]
    torch.testing.assert_close(old(x), new(x), rtol=close, atol=close)
    load_original_state_dict(graph_module, saved)
    for key, value in graph_module.state_dict().items():
        torch.testing.assert_close(value, expected[key])


def test_it_travels_and_is_not_undone() -> None:
    model = repvgg()
    graph_module = pickle.loads(pickle.dumps(MERGE(graph_of(model, "modules", X))))
    torch.testing.assert_close(graph_module(X), model(X), rtol=1e-4, atol=1e-5)
    assert original_state_dict(graph_module).keys() == model.state_dict().keys()
    with pytest.raises(NotReversibleError):
        undo(graph_module)


def test_a_batch_norm_after_the_sum_folds_too() -> None:
    for model in (repvit(), Computes(lambda m, x: m.norm(m.a(x) + m.b(x)) + x, **dict(repvit().named_children()))):
        folded = registry().pipeline("fold-batch-norm")(graph_of(model, "modules", X), strict=True)
        assert len(folded.state_dict()) == 2
        torch.testing.assert_close(folded(X), model(X), rtol=1e-4, atol=1e-5)
        model.load_state_dict(original_state_dict(folded))
        torch.testing.assert_close(folded(X), model(X), rtol=1e-4, atol=1e-5)


def test_a_residual_stays_beside_one_convolution() -> None:
    """A convolution adds it anyway, and that can be undone."""
    model = Computes(lambda m, x: m.norm(m.a(x) + m.b(x)) + x, **dict(repvit().named_children()))
    assert "add" in assert_rewrites(MERGE, model, X, count=1, refused=()).code


@pytest.mark.parametrize("dims", [1, 3])
def test_other_dimensions(dims: int) -> None:
    conv, norm = (getattr(nn, f"{name}{dims}d") for name in ("Conv", "BatchNorm"))
    model = two(
        conv(4, 4, 3, padding=1), chain(conv(4, 4, 1), norm(4)), lambda m, x: m.a(x) + m.b(x) + m.n(x), n=norm(4)
    )
    assert_rewrites(MERGE, model, torch.randn(2, 4, *(5,) * dims), count=1, refused=())


def test_the_rest_of_a_longer_sum_stays() -> None:
    model = two(normed(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), lambda m, x: (m.a(x) + m.b(x)) + x.sin())
    assert "add" in assert_rewrites(MERGE, model, X, count=1, refused=()).code


def test_memory_format_flags_and_meta() -> None:
    model = repvgg().to(memory_format=torch.channels_last).requires_grad_(False)  # type: ignore[call-overload]  # torch's stub
    merged: Any = MERGE(graph_of(model, "modules", X)).get_submodule("a.0_merged")
    assert merged.weight.is_contiguous(memory_format=torch.channels_last)
    assert not any(each.requires_grad for each in merged.parameters())
    assert (
        MERGE(graph_of(repvgg().to("meta"), "modules", X.to("meta")), expect=1).get_parameter("a.0_merged.bias").is_meta
    )


def test_large_weights_are_merged_block_by_block_to_the_same_values() -> None:
    model: Any = two(normed(700, 700, 3, padding=1), nn.Conv2d(700, 700, 1, bias=False))
    scale = model.a[1].weight.double() * torch.rsqrt(model.a[1].running_var.double() + model.a[1].eps)
    expected = model.a[0].weight.double() * scale.reshape(-1, 1, 1, 1)
    expected[:, :, 1:2, 1:2] += model.b.weight.double()
    merged = MERGE(torch.fx.symbolic_trace(model), expect=1).get_parameter("a.0_merged.weight")
    assert torch.equal(merged, expected.float())


UNLIKE: dict[str, tuple[nn.Module, nn.Module]] = {
    "stride": (nn.Conv2d(4, 4, 3, padding=1, stride=2), nn.Conv2d(4, 4, 1, stride=(2, 1))),
    "groups": (nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1, groups=2)),
    "channels": (nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 1, 1)),
    "dilation": (nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=2, dilation=2)),
    "padding": (nn.Conv2d(4, 4, 3, padding=1, stride=2), nn.Conv2d(4, 4, 2, stride=2)),
    "padding of one side": (nn.Conv2d(4, 4, 2, padding="same"), nn.Conv2d(4, 4, 1)),
    "padding mode": (nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 5, padding=2, padding_mode="reflect")),
    "kernel": (nn.Conv2d(4, 4, (1, 3), padding=(0, 1)), nn.Conv2d(4, 4, (3, 1), padding=(1, 0))),
}


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("what", UNLIKE)
def test_unlike_branches_are_refused(what: str) -> None:
    x = X[:, :, :6, : 1 if what == "stride" else 6]
    (refusal,) = assert_left_alone(MERGE, two(*UNLIKE[what]), x, reason="unlike-branches")
    assert "`a`" in refusal.message and "`b`" in refusal.message and what.split()[0] in refusal.message


def spoilt(change: Callable[[Any], object]) -> nn.Module:
    model = repvgg()
    change(model)
    return model


def written(m: Any, x: Tensor) -> Any:
    y = m.a(x)
    x.mul_(2)
    return y + m.b(x)


def accumulated(m: Any, x: Tensor) -> Any:
    x = x * 2
    return x.add_(m.a(x)).add_(m.b(x))


def turned(m: Any, x: Tensor) -> Any:
    x = x.transpose(2, 3)
    return x + m.a(x) + m.b(x)


def twice(forward: Callable[[Any, Tensor], Any]) -> Callable[[], nn.Module]:
    return lambda: two(normed(4, 4, 1), nn.Conv2d(4, 4, 1), forward)


untracked = nn.BatchNorm2d(4, track_running_stats=False).eval()
REFUSED: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "train mode": ("training", lambda: spoilt(lambda m: m.norm.train())),
    "no statistics": ("no-statistics", lambda: spoilt(lambda m: setattr(m, "norm", untracked))),
    "hooks": ("hooks", lambda: spoilt(lambda m: m.b[0].register_forward_hook(lambda *_: None))),
    "frozen": ("mixed-requires-grad", lambda: spoilt(lambda m: m.b.requires_grad_(False))),
    "tied": ("tied-parameter", lambda: spoilt(lambda m: setattr(m.norm, "weight", m.b[1].weight))),
    "dtype": ("dtype-mismatch", lambda: spoilt(lambda m: m.b.double())),
    "shared": ("shared-module", twice(lambda m, x: m.a(x) + m.b(x) + m.a(x.sin()))),
    "same": ("shared-module", twice(lambda m, x: m.b(x) + m.b(x))),
    "read elsewhere": ("several-users", twice(lambda m, x: ((y := m.a(x)) + m.b(x)) * y)),
    "written": ("mutated", twice(written)),
    "accumulated": ("mutated", twice(accumulated)),
    "turned": ("unlike-branches", twice(turned)),
    "not finite": ("out-of-range", lambda: spoilt(lambda m: m.norm.running_var.fill_(-1))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refusals(name: str) -> None:
    reason, model = REFUSED[name]
    assert_left_alone(MERGE, model(), X, reason=reason)


NO_SITES: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "other inputs": lambda m, x: m.a(x) + m.b(x.sin()),
    "scaled": lambda m, x: torch.add(m.a(x), m.b(x), alpha=2),
    "not a sum": lambda m, x: m.a(x) * m.b(x),
    "number": lambda m, x: m.a(x) + 1,
    "twice": lambda m, x: (y := m.a(x)) + y,
    "no convolution": lambda m, x: x + m.n(x),
}


@pytest.mark.parametrize("name", NO_SITES)
def test_other_sums_are_no_near_misses(name: str) -> None:
    convolutions = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
    assert not assert_left_alone(MERGE, two(*convolutions, NO_SITES[name], n=nn.BatchNorm2d(4)), X)


def test_a_long_sum_is_one_site() -> None:

    def forward(m: Any, x: Tensor) -> Tensor:
        total = x
        for each in m.children():
            total = each(x) + total
        return total

    model = Computes(forward, **{f"c{place}": nn.Conv2d(4, 4, 1) for place in range(100)})
    MERGE(graph_of(model, "modules", X), expect=1)


def test_complex_convolutions_stay() -> None:
    large, small = (nn.Conv2d(3, 4, size, padding=size // 2, dtype=torch.complex64) for size in (3, 1))
    model, x = two(large, small), torch.randn(1, 3, 5, 5, dtype=torch.complex64)
    graph_module = MergeParallelConvolutions()(torch.fx.symbolic_trace(model), expect=0)
    torch.testing.assert_close(graph_module(x), model(x))
