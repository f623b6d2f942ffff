"""Linear layers inside of torch's own attention: merged where the graph shows them, refused by name where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from site_passes import Computes
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_testing import assert_rewrites
from fxopt_testing.forms import FunctionTracer
from fxopt_testing.rewrites import graph_of, refusals, refused

X, MEMORY, NARROW = torch.randn(3, 5, 8), torch.randn(3, 4, 8), torch.randn(3, 4, 6)


class Attention(nn.Module):
    """Self-attention on one input, and cross-attention on two."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **settings)
        self.eval()

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        memory = x if memory is None else memory
        return self.attention(x, memory, memory, need_weights=False)[0]  # type: ignore[no-any-return]  # it is a tensor


def both() -> nn.Module:
    """Projections beside attention that read the same values."""
    return Computes(
        lambda m, x: m.attention(x, x, x, need_weights=False)[0].sum(-1) + m.q(x).sum(-1) + m.k(x).sum(-1),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
        q=nn.Linear(8, 3),
        k=nn.Linear(8, 4),
    ).eval()


@pytest.mark.parametrize("inputs", [(X,), (X, MEMORY)], ids=["self", "cross"])
def test_packed_projections_have_nothing_to_merge(inputs: tuple[Tensor, ...]) -> None:
    assert refused(assert_rewrites(MergeLinears(), Attention(), *inputs, count=0, form="export-dynamic")) == []


def test_separate_projections_of_one_memory_merge() -> None:
    model = Attention(kdim=6, vdim=6, bias=False)
    merged = assert_rewrites(MergeLinears(), model, X, NARROW, count=1, form="export-dynamic")
    name = "attention.k_proj_weight_v_proj_weight_merged"
    assert repr(merged.get_submodule(name)) == "Linear(in_features=6, out_features=16, bias=False)"


def test_slices_of_a_packed_bias_are_refused_by_name() -> None:
    merged = assert_rewrites(MergeLinears(), Attention(kdim=6, vdim=6), X, NARROW, count=0, form="export")
    assert [reason for _, reason in refused(merged)] == ["computed-weight"] * 2
    assert all("attention" in refusal.site for refusal in refusals(merged))


def test_layers_beside_attention_merge() -> None:
    merged = assert_rewrites(MergeLinears(), both(), X, count=1, form="export")
    assert "q_k_merged" in dict(merged.named_children())
    assert "attention.in_proj_weight" in merged.state_dict()


STACKS: dict[str, tuple[Callable[[], nn.Module], tuple[Tensor, ...]]] = {
    "encoder layer, norm first": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), (X,)
    ),
    "decoder": (
        lambda: nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1), (X, MEMORY)
    ),
}  # fmt: skip


class Wrapped(nn.Module):
    def __init__(self, stack: nn.Module) -> None:
        super().__init__()
        self.stack = stack
        self.eval()

    def forward(self, x: Tensor, memory: Tensor | None = None) -> Tensor:
        return self.stack(x) if memory is None else self.stack(x, memory)  # type: ignore[no-any-return]  # it gives a tensor


@pytest.mark.parametrize("name", STACKS)
@pytest.mark.parametrize("frozen", [False, True])
def test_torchs_stacks_stay_right(name: str, frozen: bool) -> None:
    build, inputs = STACKS[name]
    model = Wrapped(build()).requires_grad_(not frozen)
    with torch.set_grad_enabled(not frozen):  # without gradients, torch takes its fast path where it may
        graph_module = graph_of(model, "export", *inputs)
        expected = model(*inputs)
        MergeLinears()(graph_module, expect=0)
        torch.testing.assert_close(graph_module(*inputs), expected)
        FuseBiasInLinear()(graph_module)
        torch.testing.assert_close(graph_module(*inputs), expected)


def test_traced_attention_is_refused_by_name_and_the_rest_merges() -> None:
    graph_module = symbolic_trace(both())
    expected = graph_module(X)
    MergeLinears()(graph_module, expect=1)
    assert refused(graph_module) == [("attention", "opaque-call")]
    assert "(MultiheadAttention) is a single call with 2 linear layers inside" in refusals(graph_module)[0].message
    torch.testing.assert_close(graph_module(X), expected)


def test_attention_as_a_function_is_refused_by_name() -> None:
    def functional(m: Any, x: Tensor) -> Any:
        a = m.attention
        weights = (a.in_proj_weight, a.in_proj_bias, None, None, False, 0.0, a.out_proj.weight, a.out_proj.bias)
        attended, _ = F.multi_head_attention_forward(x, x, x, 8, 2, *weights, training=False)
        return attended.add(m.q(x))

    model = Computes(functional, attention=nn.MultiheadAttention(8, 2), q=nn.Linear(8, 8)).eval()
    graph_module = GraphModule(model, FunctionTracer().trace(model))
    MergeLinears()(graph_module, expect=0)
    assert "opaque-call" in [reason for _, reason in refused(graph_module)]


def test_projections_that_attention_reads_too_are_left_alone() -> None:
    def shared(m: Any, x: Tensor) -> Any:
        own = F.linear(x, m.attention.out_proj.weight, m.attention.out_proj.bias)
        return m.attention(x, x, x, need_weights=False)[0] + own + m.q(x)

    model = Computes(shared, attention=nn.MultiheadAttention(8, 2, batch_first=True), q=nn.Linear(8, 8)).eval()
    for form in ("modules", "export"):
        graph_module = graph_of(model, form, X) if form == "export" else symbolic_trace(model)
        expected = graph_module(X)
        MergeLinears()(graph_module, expect=0)
        assert {"tied-parameter", "group-too-small"} & {reason for _, reason in refused(graph_module)}
        torch.testing.assert_close(graph_module(X), expected)
