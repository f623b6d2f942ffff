"""`FuseNorms`: sums of embeddings, and norms that are written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from site_passes import Computes
from torch import Tensor, nn

from fxopt_cpu import EmbeddingNorm, FuseNorms, SumNorm, isa
from fxopt_testing import assert_rewrites
from fxopt_testing.forms import TRACED
from fxopt_testing.rewrites import graph_of, refused

pytestmark = pytest.mark.skipif(isa() is None, reason="the library was not built")


class Embedded(nn.Module):
    def __init__(self, norm: nn.Module, *, tied: bool = False) -> None:
        super().__init__()
        self.words, self.places, self.kinds = (nn.Embedding(size, 16, padding_idx=1) for size in (50, 20, 2))
        self.norm, self.head = norm, nn.Linear(16, 50, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, words: Tensor, places: Tensor, kinds: Tensor) -> Any:
        return self.head(self.norm(self.words(words) + self.kinds(kinds) + self.places(places)))


IDS = torch.randint(50, (2, 7)), torch.arange(7).unsqueeze(0), torch.randint(2, (2, 7))


@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(16),
        nn.LayerNorm(16, elementwise_affine=False),
        nn.RMSNorm(16),
        nn.RMSNorm(16, elementwise_affine=False),
        nn.Identity(),
    ],
    ids=str,
)
def test_sums_of_embeddings(norm: nn.Module) -> None:
    model = Embedded(norm).eval()
    found = assert_rewrites(FuseNorms(), model, *IDS, count=1)
    (made,) = (module for module in found.modules() if isinstance(module, EmbeddingNorm))
    assert made.padding == (1, 1, 1)
    with torch.no_grad():
        torch.testing.assert_close(found(*IDS), model(*IDS), atol=1e-5, rtol=1e-4)
        with pytest.raises(IndexError, match="out of range"):
            found(IDS[0] + 50, *IDS[1:])


def test_tied_embeddings_stay() -> None:
    found = assert_rewrites(FuseNorms(), Embedded(nn.LayerNorm(16), tied=True).eval(), *IDS, count=0)
    assert [reason for _, reason in refused(found)] == ["tied-parameter"]


def test_long_sums_are_read() -> None:
    def long(x: Tensor) -> Tensor:
        y = x
        for _ in range(1000):
            y = y + x
        return y

    assert not refused(FuseNorms()(torch.fx.symbolic_trace(long)))


# By day, dynamic sizes stand for fixed ones.
FORMS = [*TRACED, "export-dynamic", pytest.param("export", marks=pytest.mark.nightly)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("square", ["pow", "product"])
def test_norms_that_are_written_out(square: str, form: Any) -> None:
    def written(m: Any, x: Tensor) -> Any:
        """An RMS norm as Llama and T5 have it."""
        dtype = x.dtype
        x = x.to(torch.float32)
        squares = x.pow(2) if square == "pow" else x * x
        return m.weight * (x * torch.rsqrt(squares.mean(-1, keepdim=True) + 1e-6)).to(dtype)

    model, x = Computes(written, weight=nn.Parameter(torch.randn(16))).eval(), torch.randn(3, 16)
    assert_rewrites(FuseNorms(), model, x, count=1, form=form, again=False)
    found = FuseNorms()(graph_of(model, form, x))
    assert [module._norm for module in found.modules() if isinstance(module, SumNorm)] == [("rms", 1e-6)]
    with torch.no_grad():
        torch.testing.assert_close(found(x), model(x), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("settings", [{"alpha": 3}, {"dtype": torch.float64}])
@torch.no_grad()
def test_a_norm_with_other_arithmetic_stays(settings: dict[str, Any]) -> None:
    def written(m: Any, x: Tensor) -> Any:
        mean = x.pow(2).mean(-1, keepdim=True, dtype=settings.get("dtype"))
        return m.weight * (x * torch.rsqrt(torch.add(mean, 0.1, alpha=settings.get("alpha", 1))))

    model, x = Computes(written, weight=nn.Parameter(torch.rand(16))), torch.randn(3, 16)
    torch.testing.assert_close(FuseNorms()(torch.export.export(model, (x,)).module())(x), model(x))


@pytest.mark.parametrize("shown", [True, False])
@torch.no_grad()
def test_a_norm_whose_strides_are_seen_stays(shown: bool) -> None:
    def written(m: Any, x: Tensor) -> Any:
        y = x.transpose(1, 2)
        y = m.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6))
        return y if shown else m.lin(y)

    model = Computes(written, weight=nn.Parameter(torch.randn(16)), lin=nn.Linear(16, 3)).eval()
    x = torch.randn(2, 16, 5)
    found = FuseNorms()(graph_of(model, "export-dynamic", x))
    torch.testing.assert_close(found(x), model(x))
    assert found(x).stride() == model(x).stride()
    assert [reason for _, reason in refused(found)] == (["returned"] if shown else [])
