"""`verify` finds errors among ordinary values, whatever extreme ones there are beside them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from verified_calls import Calls

from fxopt_tools import VerificationReport, verify

MASKS = [-1e4, -1e5, -1e9, torch.finfo(torch.float32).min, -math.inf]
Change = Callable[[Tensor], Tensor]


def seeded(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def some(share: float, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(9)) < share


class Scores(nn.Module):
    """Attention scores, masked; computed in halves, which are added in either order."""

    def __init__(self, masked: Tensor, mask: float, *, swapped: bool = False, change: Change | None = None) -> None:
        super().__init__()
        self.q, self.k = (nn.Linear(32, 32, bias=False) for _ in range(2))
        with torch.no_grad():
            for place, layer in enumerate((self.q, self.k)):
                layer.weight.copy_(seeded(32, 32, seed=place) / 4)
        self.masked, self.mask, self.swapped, self.change = masked, mask, swapped, change

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        parts = [q[..., half] @ k[..., half].transpose(-1, -2) for half in (slice(16), slice(16, None))]
        scores = parts[1] + parts[0] if self.swapped else parts[0] + parts[1]
        scores = scores if self.change is None else self.change(scores)
        lowest = self.mask if math.isinf(self.mask) else max(self.mask, torch.finfo(x.dtype).min)
        return scores.masked_fill(self.masked, lowest)


def wrong_one(scores: Tensor) -> Tensor:
    scores = scores.clone()
    scores[..., -1, 0] += 5
    return scores


def wrong_head(scores: Tensor) -> Tensor:
    return torch.cat([scores[:, :1] * 1.5, scores[:, 1:]], 1)


def scaled(scores: Tensor) -> Tensor:
    return scores * 1.05


def swapped_rows(scores: Tensor) -> Tensor:
    return scores.roll(1, 1)


def masked(share: float | None, size: int = 24) -> Tensor:
    if share is None:
        return torch.ones(size, size).triu(1).bool()
    found = some(share, 2, 4, size, size)
    found[..., -1, 0] = False
    return found


X = seeded(2, 4, 24, 32, seed=5)


HALVES = [(-1e4, torch.float16), (-math.inf, torch.float16), (-1e9, torch.bfloat16), (MASKS[3], torch.bfloat16)]


@pytest.mark.parametrize(("mask", "dtype"), [*((mask, torch.float32) for mask in MASKS[1:]), *HALVES], ids=str)
def test_wrong_scores_are_found_beside_masked_ones_and_rounding_passes(mask: float, dtype: torch.dtype) -> None:
    for share in (None, 0.3, 0.97):
        one = Scores(masked(share), mask).to(dtype)
        x = X.to(dtype)
        assert verify(one, Scores(masked(share), mask, swapped=True).to(dtype), x)
        for change in (wrong_one, wrong_head, swapped_rows, scaled):
            if change is not scaled or dtype == torch.float32:
                report = verify(one, Scores(masked(share), mask, change=change).to(dtype), x)
                assert not report, f"{share} {change.__name__}\n{report}"


@pytest.mark.parametrize("mask", MASKS)
def test_a_few_ordinary_values_are_enough(mask: float) -> None:
    def verified(values: list[float], other: list[float]) -> bool:
        one, two = torch.tensor(values), torch.tensor(other)
        return verify(Calls(lambda x: one), Calls(lambda x: two), X).passed

    assert verified([0.5, mask, 0.7, mask], [0.5, mask, 0.7, mask])
    assert not verified([0.5, mask, 0.7, mask], [5.5, mask, 0.7, mask])
    assert not verified([mask, 1.0], [mask, 1.01])
    assert not verified([0.0, mask] * 8, [0.0, mask] * 7 + [5.0, mask]), "the mask itself"
    assert not verified([mask] * 99 + [1.0], [mask] * 99 + [1.5])


def compare(one: Tensor, other: Tensor) -> VerificationReport:
    return verify(Calls(lambda x: one), Calls(lambda x: other), X)


@pytest.mark.parametrize("factor", [1e6, 1e9, 1e-3, 1e-6])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_half_that_is_right_does_not_hide_another_of_another_magnitude(factor: float, dim: int) -> None:
    half, other = seeded(64, 64), seeded(64, 64, seed=1)
    a = torch.cat([half * factor, other], dim)
    for wrong in (other * 1.01, other + 0.01, other.roll(1, 0), torch.where(some(0.001, 64, 64), other + 1, other)):
        assert not compare(a, torch.cat([half * factor, wrong], dim))
    small = torch.cat([half, other * factor], dim)
    if factor >= 1e-3:
        assert not compare(small, torch.cat([half, other * factor * 1.3], dim))


def test_small_values_beside_large_ones_are_compared_where_float64_shows_that_they_mean_something() -> None:
    class Halves(nn.Module):
        def __init__(self, factor: float = 1.0) -> None:
            super().__init__()
            self.factor = factor

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([x, x * 1e-6 * self.factor])

    assert verify(Halves(), Halves(), X) and not verify(Halves(), Halves(1.5), X)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_what_rounding_leaves_where_terms_cancel_passes(dtype: torch.dtype) -> None:
    backwards = Calls(lambda x: (x.flip(-1) * 30).sum(-1).relu())
    forwards = Calls(lambda x: (x * 30).cumsum(-1)[..., -1].relu())
    assert verify(forwards, backwards, seeded(64, 512).to(dtype))
    rows = torch.logspace(-3, 3, 64)[:, None]
    assert verify(forwards, backwards, (seeded(64, 512) * rows).to(dtype))


@pytest.mark.parametrize(
    "values", [[1e-42], [1e-42, 1.0], [0.0], [0.0, 0.0, 1e-45], [3.0], [1e30, 1.0], [7.0, 7.0, 7.0]]
)
def test_tiny_tensors_agree_with_themselves_and_not_with_others(values: list[float]) -> None:
    a = torch.tensor(values)
    assert compare(a, a.clone())
    for place in range(len(values)):
        b = a.clone()
        b[place] = b[place] * 1.01 + 0.01
        assert not compare(a, b)
