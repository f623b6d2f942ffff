"""`FuseAttention`: every way in which models bring heads to attention and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_core import PassOptionError, history, registry, undo
from fxopt_cpu import FuseAttention, MergedAttention, RowAttention, isa
from fxopt_testing import assert_rewrites
from fxopt_testing.rewrites import graph_of, refused

pytestmark = pytest.mark.skipif(isa() is None, reason="the library was not built")
B, L, H, E = 2, 7, 4, 16


def _three_narrows(x: Tensor) -> tuple[Tensor, ...]:
    parts = [x.narrow(-1, place * H * E, H * E).clone() for place in range(3)]
    return tuple(part.view(x.shape[0], x.shape[1], -1, E).transpose(1, 2) for part in parts)


def _five_dimensions(x: Tensor) -> tuple[Tensor, ...]:
    each = x.reshape(x.shape[0], x.shape[1], 3, H, E).permute(2, 0, 3, 1, 4)
    return each[0], each[1], each[2]


def _chunks(x: Tensor) -> tuple[Tensor, ...]:
    parts: Any = x.chunk(3, -1)
    return tuple(parts[place].unflatten(-1, (H, E)).permute(0, 2, 1, 3) for place in range(3))


def _heads_first(x: Tensor) -> tuple[Tensor, ...]:
    heads: Any = x.view(x.shape[0], x.shape[1], 3 * H, E).transpose(1, 2)
    each = heads.split(H, 1)
    return each[0], each[1], each[2]


def _interleaved(x: Tensor) -> tuple[Tensor, ...]:
    """Each head has its query, key and value beside one another, as in GPT-NeoX: no merged operator."""
    each = x.view(x.shape[0], x.shape[1], H, 3 * E).transpose(1, 2)
    return tuple(each.narrow(-1, place * E, E) for place in range(3))


def _joined(x: Tensor) -> Tensor:
    return x.transpose(1, 2).reshape(x.shape[0], x.shape[2], -1)


def _flat(x: Tensor) -> Tensor:
    return x.permute(0, 2, 1, 3).contiguous().flatten(2)


def _apart(x: Tensor) -> Tensor:
    return F.linear(x, x.new_ones(E, E))


class Attend(nn.Module):
    def __init__(self, before: Callable[..., Any], after: Callable[..., Any], **settings: Any) -> None:
        super().__init__()
        self.before, self.after, self.settings = before, after, settings

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        query, key, value = self.before(x)
        heads = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, **self.settings)
        return self.after(heads)


def _fused(model: nn.Module, *inputs: Tensor, form: Any = "modules") -> GraphModule:
    """Return a fused graph, all that a rewrite has to keep being checked before."""
    assert_rewrites(FuseAttention(), model, *inputs, count=1, form=form, gradients=False, again=False)
    return FuseAttention()(graph_of(model, form, *inputs))


X = torch.randn(B, L, 3 * H * E)
MASKS = {
    "none": (),
    "bool": (torch.rand(B, 1, L, L) > 0.3,),
    "bool by column": (torch.rand(1, 1, 1, L) > 0.3,),
    "summand": (torch.randn(B, H, L, L),),
    "summand of one head": (torch.randn(1, 1, L, L),),
}


BEFORE, AFTER = (_three_narrows, _five_dimensions, _chunks, _heads_first, _interleaved), (_joined, _flat, _apart)
DAILY = [(_three_narrows, _flat, "functions"), (_interleaved, _apart, "functions"), (_chunks, _joined, "functions")]
DAILY += [(before, _joined, "export-dynamic") for before in BEFORE]
OTHERS = [case for case in product(BEFORE, AFTER, ("functions", "export-dynamic")) if case not in DAILY]


@pytest.mark.parametrize(
    ("before", "after", "form"), [*DAILY, *(pytest.param(*case, marks=pytest.mark.nightly) for case in OTHERS)]
)
def test_views_of_a_merged_product(before: Any, after: Any, form: Any) -> None:
    model = Attend(before, after).eval()
    found = _fused(model, X, form=form)
    kinds = {type(module) for module in found.modules()} & {MergedAttention, RowAttention}
    assert kinds == {RowAttention if before is _interleaved else MergedAttention}
    if after is _joined and before is not _interleaved and form == "export-dynamic":
        calls = [node for node in found.graph.nodes if node.op.startswith("call") and "sym_size" not in node.name]
        assert len([node for node in calls if "guards" not in node.name]) == 1


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS.keys())
def test_masks_and_causality(mask: tuple[Tensor, ...], causal: bool) -> None:
    if mask and causal:
        pytest.skip("torch refuses both")
    model = Attend(_three_narrows, _joined, is_causal=causal, scale=0.3).eval()
    found = _fused(model, X, *mask)
    with torch.no_grad():
        torch.testing.assert_close(found(X, *mask), model(X, *mask), atol=1e-5, rtol=1e-4)


class Grouped(nn.Module):
    """Separate queries, and keys and values that several heads share."""

    def __init__(self, repeats: str) -> None:
        super().__init__()
        self.repeats = repeats

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs: tuple[Any, ...] = (q, k, v)
        query, key, value = (each.unflatten(-1, (-1, E)).transpose(1, 2) for each in inputs)
        if self.repeats == "expand":
            shape = (B, 2, H // 2, L, E)
            key, value = (each[:, :, None].expand(shape).reshape(B, H, L, E) for each in (key, value))
        return _joined(F.scaled_dot_product_attention(query, key, value, enable_gqa=self.repeats == "flag"))


@pytest.mark.parametrize("repeats", ["expand", "flag"])
def test_grouped_heads(repeats: str) -> None:
    q, kv = torch.randn(B, L, H * E), (torch.randn(B, L, 2 * E), torch.randn(B, L, 2 * E))
    model = Grouped(repeats).eval()
    found = _fused(model, q, *kv)
    assert not [node for node in found.graph.nodes if "expand" in node.name]
    with torch.no_grad():
        torch.testing.assert_close(found(q, *kv), model(q, *kv), atol=1e-5, rtol=1e-4)


def test_other_dtypes_are_left_alone() -> None:
    found = assert_rewrites(FuseAttention(), Attend(_chunks, _joined).eval(), X.double(), count=0)
    assert [reason for _, reason in refused(found)] == ["unsupported-dtype"]


@pytest.mark.parametrize("after", [torch.relu, lambda heads: heads.view(B, 3, -1), _apart])
def test_strides_that_follow_from_the_inputs(after: Callable[[Tensor], Tensor]) -> None:
    model, count = Attend(lambda x: (x, x, x), after).eval(), int(after is _apart)
    found = assert_rewrites(FuseAttention(), model, torch.randn(B, 3, L, E), count=count, form="functions")
    assert [reason for _, reason in refused(found)] == ["returned"] * (1 - count)


@torch.no_grad()
def test_strides_of_rows_may_be_seen() -> None:
    model = Attend(lambda x: _chunks(F.linear(x, x.new_ones(3 * H * E, 8))), torch.relu).eval()
    x = torch.randn(L, B, 8).transpose(0, 1)
    found = FuseAttention()(graph_of(model, "functions", x))
    assert not refused(found)
    assert found(x).stride() == model(x).stride()


class Beside(nn.Module):
    """Attention between values of different batches or heads, and what is made of it."""

    def __init__(self, heads: tuple[int, int] = (H, H), after: Callable[[Tensor], Tensor] = _joined) -> None:
        super().__init__()
        self.heads, self.after = heads, after

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        pairs = zip((query, key), self.heads, strict=True)
        parts = [x.view(*x.shape[:-1], n, x.shape[-1] // n).transpose(1, 2) for x, n in pairs]
        return self.after(F.scaled_dot_product_attention(parts[0], parts[1], parts[1]))


@pytest.mark.parametrize(("heads", "batches"), [((H, H), (1, B)), ((H, H), (B, 1)), ((1, H), (B, B))])
@torch.no_grad()
def test_batches_and_heads_broadcast_as_in_torch(heads: tuple[int, int], batches: tuple[int, int]) -> None:
    model = Beside(heads, after=lambda rows: rows.transpose(1, 2).flatten(2))
    inputs = [torch.randn(batch, L, count * E) for batch, count in zip(batches, heads, strict=True)]
    graph_module = FuseAttention()(torch.export.export(model, tuple(inputs)).module())
    torch.testing.assert_close(graph_module(*inputs), model(*inputs))


def _repeated(x: Tensor) -> tuple[Tensor, ...]:
    return _chunks(x.unsqueeze(1).expand(B, 3, L, 3 * H * E).reshape(3 * B, L, 3 * H * E))


NOT_PART: dict[str, Attend] = {
    "repeated after": Attend(_chunks, lambda y: _flat(y).unsqueeze(1).expand(-1, 3, -1, -1).reshape(3 * B, L, H * E)),
    "repeated before": Attend(_repeated, _joined),
    "another dtype": Attend(_chunks, lambda y: (_flat(y).view(torch.int32) >> 31).float()),
}


@pytest.mark.parametrize("case", NOT_PART)
@torch.no_grad()
def test_what_is_not_part_of_the_call(case: str) -> None:
    """A batch that is repeated, and a view of another dtype."""
    model = NOT_PART[case]
    graph_module = FuseAttention()(torch.export.export(model, (X,)).module())
    torch.testing.assert_close(graph_module(X), model(X), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_products_of_bfloat16_are_an_option() -> None:
    x = torch.randn(B, 60, 3 * H * E)
    rounding = FuseAttention(products="bfloat16")
    graph_module = graph_of(Attend(_chunks, _joined).eval(), "functions", x)
    expected, result = graph_module(x), rounding(graph_module)(x)
    rounds = isa() == "amx"
    assert rounding.preserves_computation is not rounds and bool(rounding.promised_sqnr) is rounds
    assert ("rounded=True" in repr(graph_module)) is rounds and (result - expected).abs().max() < 0.02
    with pytest.raises(PassOptionError, match="'float32' or 'bfloat16' as products; not 'int8'"):
        FuseAttention(products="int8")


@torch.no_grad()
def test_an_empty_batch_gives_an_empty_result() -> None:
    assert MergedAttention(H, H, scale=1.0, causal=False)(torch.zeros(0, L, 3 * H * E)).shape == (0, L, H * E)


class WrittenOut(nn.Module):
    """Attention whose keys are transposed by one permutation, or whose heads lie in the first of three dimensions."""

    def __init__(self, *, flat: bool) -> None:
        super().__init__()
        self.flat = flat

    def forward(self, x: Tensor) -> Any:
        rows, length = x.shape[0], x.shape[1]
        parts: Any = x.chunk(3, -1)
        query, key, value = (parts[place].reshape(rows, length, H, E) for place in range(3))
        query, key, value = query.transpose(1, 2), key.permute(0, 2, 3, 1), value.transpose(1, 2)
        if self.flat:
            query, value = (each.reshape(rows * H, length, E) for each in (query, value))
            key = key.reshape(rows * H, E, length)
        heads = torch.softmax(torch.matmul(query, key) / 4, -1) @ value
        return heads.reshape(rows, H, length, E).transpose(1, 2).reshape(rows, length, -1)


@torch.no_grad()
@pytest.mark.parametrize("flat", [False, True])
def test_an_earlier_rewrite_is_taken_back_where_only_torch_is_left_and_slow(flat: bool) -> None:
    pytest.importorskip("fxopt_simplify")
    model = WrittenOut(flat=flat).eval()
    graph_module = graph_of(model, "functions", X)
    before = [node.name for node in graph_module.graph.nodes]
    both = registry().pipeline("fuse-scaled-dot-product-attention,fuse-attention")
    both(graph_module)
    names = [node.name for node in graph_module.graph.nodes]
    assert ("attention" in names) is not flat
    assert not any("scaled_dot_product" in name for name in names)
    notes = [rewrite.note for rewrite in history(graph_module)[-1].rewrites]
    assert any("written out again" in note for note in notes) is flat
    torch.testing.assert_close(graph_module(X), model(X))
    assert [node.name for node in both(copy.deepcopy(graph_module)).graph.nodes] == names
    undo(graph_module)
    assert [node.name for node in graph_module.graph.nodes] == before


def test_no_key_heads_are_left_to_torch() -> None:
    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 0, 3, 4)
    expected = F.scaled_dot_product_attention(query, key, key, scale=0.5).transpose(1, 2).flatten(2)
    assert RowAttention(scale=0.5, causal=False)(query, key, key).shape == expected.shape
