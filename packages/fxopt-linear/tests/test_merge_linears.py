"""MergeLinears: what is merged, what is refused and why, and that nothing else changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from site_passes import Computes
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_core import UndoError, history, iter_nodes, undo
from fxopt_linear import MergeLinears
from fxopt_rewrite import infer_shapes
from fxopt_testing import assert_rewrites
from fxopt_testing.forms import TRACED, Form
from fxopt_testing.rewrites import (
    FORMS,
    graph_of,
    refused,
    setitem,
    structure,
)

Forward = Callable[[Any, Tensor], Any]


class Model(Computes):
    """Linear layers of input size 4 by name and size, and what is done with them."""

    q: nn.Linear
    k: nn.Linear
    v: nn.Linear

    def __init__(self, forward: Forward, unbiased: str = "", /, **sizes: int) -> None:
        super().__init__(forward, **{key: nn.Linear(4, size, bias=key not in unbiased) for key, size in sizes.items()})
        self.eval()


def qkv(unbiased: str = "") -> Model:
    """Unequal sizes, combined without views."""
    return Model(lambda m, x: m.q(x).relu().sum(-1) + m.k(x).tanh().sum(-1) * m.v(x).sum(-1), unbiased, q=8, k=2, v=3)


def linears(graph_module: GraphModule) -> dict[str, nn.Linear]:
    return {name: module for name, module in graph_module.named_modules() if isinstance(module, nn.Linear)}


def sizes(graph_module: GraphModule) -> dict[str, int]:
    """Return the merged layers and their sizes."""
    return {name: module.out_features for name, module in linears(graph_module).items() if "merged" in name}


OTHERS = [(torch.randn(5, 4),), (torch.randn(0, 4),), (torch.randn(1, 4),)]


@pytest.mark.parametrize(
    ("unbiased", "form"), [("", "modules"), ("qkv", "functions"), *(("k", form) for form in FORMS)]
)
def test_unequal_sizes_and_missing_biases_merge_in_every_form(unbiased: str, form: Form) -> None:
    model = qkv(unbiased)
    others = [*OTHERS, (torch.randn(4),), (torch.randn(2, 3, 4),), (torch.randn(2, 3, 2, 4),)]
    merged = assert_rewrites(MergeLinears(), model, torch.randn(3, 4), count=1, form=form, others=others)
    assert sizes(merged) == {"q_k_v_merged": 13}
    linear = merged.q_k_v_merged
    assert isinstance(linear, nn.Linear)
    assert (linear.in_features, linear.bias is None, linear.training) == (4, unbiased == "qkv", False)
    assert set(merged.state_dict()) == {"q_k_v_merged.weight"} | ({"q_k_v_merged.bias"} if unbiased != "qkv" else set())


def test_function_with_keywords_and_parameters_at_the_root() -> None:
    def root(m: Any, x: Tensor) -> Any:
        return F.linear(x, bias=m.c, weight=m.a).sum(-1) + F.linear(input=x, weight=m.b).sum(-1)

    a, b, c = (nn.Parameter(torch.randn(*size)) for size in ((3, 4), (2, 4), (3,)))
    for form in ("functions", "export-dynamic"):
        model = Computes(root, a=a, b=b, c=c).eval()
        merged = assert_rewrites(MergeLinears(), model, torch.randn(3, 4), count=1, form=form, others=OTHERS)
        assert sizes(merged) == {"a_b_merged": 5}


def test_other_memory_formats_of_the_input() -> None:
    strided = [(torch.randn(4, 3).t(),), (torch.randn(3, 8)[:, ::2],), (torch.randn(1, 4).expand(3, 4),)]
    assert_rewrites(MergeLinears(), qkv(), torch.randn(3, 4), count=1, others=strided)
    images = torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last)
    assert_rewrites(MergeLinears(), qkv(), images, count=1)


def test_train_mode_merges_biased_and_unbiased_layers_apart() -> None:
    model = Model(lambda m, x: sum(m.get_submodule(n)(x).sum(-1) for n in "abcd"), "bd", a=2, b=3, c=4, d=5)
    graph_module = graph_of(model.train(), "modules", torch.randn(3, 4))
    MergeLinears()(graph_module, expect=2)
    assert sizes(graph_module) == {"a_c_merged": 6, "b_d_merged": 8}
    assert all(linear.training for linear in linears(graph_module).values())
    model = qkv("k").train()
    graph_module = graph_of(model, "modules", torch.randn(3, 4))
    MergeLinears()(graph_module, expect=1)
    assert refused(graph_module) == [("k", "training")]


def test_names_are_unique_and_readable() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.heads = nn.Sequential(*(nn.Linear(4, 4) for _ in range(6)))
            self.left = nn.ModuleDict({"proj": nn.Linear(4, 2)})
            self.right = nn.ModuleDict({"proj": nn.Linear(4, 3)})
            self.left_proj_right_proj_merged = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Any:
            h = self.left_proj_right_proj_merged(x)
            for i in (0, 2, 4):
                h = self.heads[i](h).relu() * self.heads[i + 1](h)
            y = h.sum(-1)
            return y + self.left["proj"](h).sum(-1) + self.right["proj"](h).sum(-1)

    merged = assert_rewrites(MergeLinears(), Block().eval(), torch.randn(3, 4), count=4, others=OTHERS)
    names = {name for name in linears(merged) if name.endswith(("merged", "merged_1"))} - {
        "left_proj_right_proj_merged"
    }
    assert names == {"heads.0_1_merged", "heads.2_3_merged", "heads.4_5_merged", "left_proj_right_proj_merged_1"}
    assert history(merged)[-1].rewrites[0].site == "heads: 0 + 1"


def test_many_layers_have_a_short_name() -> None:
    names = "abcdef"
    model = Model(lambda m, x: [m.get_submodule(n)(x) for n in names], **dict.fromkeys(names, 2))
    assert sizes(assert_rewrites(MergeLinears(), model, torch.randn(3, 4), count=1)) == {"a_to_f_merged": 12}


def test_one_layer_called_several_times_with_the_same_group() -> None:
    def attend(m: Any, x: Tensor) -> Any:
        weights = torch.softmax(m.q(x) @ m.k(x).transpose(-1, -2) / 2, -1)
        return m.o(weights @ m.v(x)) + x

    model = Computes(lambda m, x: m.layer(m.layer(m.layer(x))), layer=Model(attend, "k", q=4, k=4, v=4, o=4)).eval()
    merged = assert_rewrites(MergeLinears(), model, torch.randn(2, 3, 4), count=1)
    assert sizes(merged) == {"layer.q_k_v_merged": 12}
    assert len(history(merged)[-1].rewrites[0].before) >= 9


def test_layers_called_on_other_inputs_are_merged_with_those_called_likewise() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.q(x) * m.k(x) * m.v(x)
        return m.q(y) + m.k(y)

    merged = assert_rewrites(MergeLinears(), Model(forward, q=4, k=4, v=4), torch.randn(3, 4), count=1)
    assert sizes(merged) == {"q_k_merged": 8}
    assert refused(merged) == [("v", "group-too-small")]


def test_a_layer_called_twice_on_one_value_keeps_its_slice_twice() -> None:
    model = Model(lambda m, x: m.q(x).relu() + m.k(x) * m.q(x), q=4, k=4)
    assert sizes(assert_rewrites(MergeLinears(), model, torch.randn(3, 4), count=1)) == {"q_k_merged": 8}


def test_a_layer_that_feeds_another_of_its_group() -> None:
    model = Model(lambda m, x: m.q(m.k(x)) + m.k(m.q(x)) + m.q(x) + m.k(x), q=4, k=4)
    graph_module = graph_of(model, "modules", torch.randn(3, 4))
    MergeLinears()(graph_module, expect=0)  # q alone is called on k's result, and k on q's
    model = Model(lambda m, x: (lambda q: q + m.k(x) + m.v(q))(m.q(x)), q=4, k=4, v=4)
    assert_rewrites(MergeLinears(), model, torch.randn(3, 4), count=1)


VIEWS: dict[str, Forward] = {
    "view splits": lambda m, x: m.q(x).view(6, 2, 4).transpose(0, 1).sum(0).sum(-1) + m.k(x).view(6, -1).sum(-1),
    "view joins": lambda m, x: m.q(x).view(-1).relu() * 2 + m.k(x).view(-1).sum(),
    "reshape": lambda m, x: m.q(x).reshape(-1).relu() + m.k(x).sum(),
    "as_strided": lambda m, x: m.q(x).as_strided((2, 2), (2, 1)).sum() + m.k(x).sum(),
    "contiguous then view": lambda m, x: m.q(x).contiguous().view(-1) * 2 + m.k(x).sum(),
    "returned": lambda m, x: [m.k(x).sum(), m.q(x)][1],
    "in a dict": lambda m, x: {"q": m.q(x), "both": (m.k(x), [m.q(x)])},
    "transposed": lambda m, x: m.q(x).t() @ m.k(x),
    "viewed and returned": lambda m, x: (m.q(x).unsqueeze(0), m.k(x).relu()),
    "stride is asked for": lambda m, x: m.q(x).sum() * m.q(x).stride(0) + m.k(x).sum(),
}


@pytest.mark.parametrize("name", VIEWS)
def test_results_that_are_viewed_or_returned(name: str) -> None:
    assert_rewrites(MergeLinears(), Model(VIEWS[name], q=8, k=8), torch.randn(6, 4), count=1)


def test_results_that_are_only_read_are_not_copied() -> None:
    graph_module = graph_of(qkv(), "modules", torch.randn(3, 4))
    MergeLinears()(graph_module, expect=1)
    assert not any(node.target is torch.clone for node in iter_nodes(graph_module.graph))


def _in_place_on_result(m: Any, x: Tensor) -> Tensor:
    q = m.q(x)
    k = m.k(x)
    kept = k.tanh()
    q.add_(1)
    setitem(q, 0, 2.0)
    F.relu(q, inplace=True)
    z: Tensor = (q * kept * k).sum()
    return z


def test_results_that_are_written_in_place() -> None:
    assert_rewrites(MergeLinears(), Model(_in_place_on_result, q=4, k=4), torch.randn(3, 4), count=1)


def test_an_inplace_module_between_two_reads() -> None:
    def in_place(m: Any, x: Tensor) -> Any:
        x = x * 2
        return m.q(x).sum() + m.relu(x).sum() + m.k(x).sum()

    model = Computes(in_place, q=nn.Linear(4, 4), k=nn.Linear(4, 4), relu=nn.ReLU(inplace=True)).eval()
    for form in ("modules", "export-dynamic"):
        assert_rewrites(MergeLinears(), model, torch.randn(3, 4), count=0, form=form, gradients=False)


def test_frozen_and_trainable_layers_form_groups_of_their_own() -> None:
    model = Model(lambda m, x: sum(m.get_submodule(n)(x).sum(-1) for n in "abcd"), a=2, b=3, c=4, d=5)
    model.get_submodule("a").requires_grad_(False)
    model.get_submodule("c").requires_grad_(False)
    merged = assert_rewrites(MergeLinears(), model, torch.randn(3, 4), count=2)
    assert {name: p.requires_grad for name, p in merged.named_parameters()} == {
        "a_c_merged.weight": False, "a_c_merged.bias": False, "b_d_merged.weight": True, "b_d_merged.bias": True,
    }  # fmt: skip


def test_views_of_one_storage_without_common_elements_merge() -> None:
    model, memory = qkv(), torch.randn(12, 4)
    model.q.weight, model.k.weight = nn.Parameter(memory[:8]), nn.Parameter(memory[10:12])
    assert_rewrites(MergeLinears(), model, torch.randn(3, 4), count=1)


def test_a_module_that_an_opaque_module_also_calls_is_left_alone() -> None:
    class Opaque(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Any:
            return self.inner(x)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, (nn.Linear, Opaque))

    model = qkv()
    model.opaque = Opaque(model.get_submodule("k"))  # type: ignore[arg-type]  # it is a Linear
    model.computes = lambda m, x: m.q(x).sum() + m.k(x).sum() + m.v(x).sum() + m.opaque(x).sum()
    graph_module = GraphModule(model, Tracer().trace(model))
    expected = graph_module(torch.ones(3, 4))
    MergeLinears()(graph_module, expect=1)
    assert [site for site, _ in refused(graph_module)] == ["k"]
    assert refused(graph_module)[0][1] in {"shared-module", "tied-parameter"}
    torch.testing.assert_close(graph_module(torch.ones(3, 4)), expected)


def test_a_group_has_two_layers_at_least() -> None:
    with pytest.raises(ValueError, match="min_group is 1"):
        MergeLinears(min_group=1)


def test_a_single_layer_is_no_near_miss() -> None:
    graph_module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)))
    MergeLinears()(graph_module, strict=True, expect=0)
    assert refused(graph_module) == []


def test_shared_storage_leaves_the_values_of_the_model() -> None:
    model, x = qkv("k"), torch.randn(3, 4)
    values = {key: value.clone() for key, value in model.state_dict().items()}
    graph_module = graph_of(model, "modules", x)
    expected = graph_module(x)
    MergeLinears(share_storage=True)(graph_module, expect=1)
    merged = graph_module.get_parameter("q_k_v_merged.weight")
    assert model.q.weight.untyped_storage().data_ptr() == merged.untyped_storage().data_ptr()
    assert all(torch.equal(values[key], value) for key, value in model.state_dict().items())
    torch.testing.assert_close(graph_module(x), expected)
    undo(graph_module)
    assert all(torch.equal(values[key], value) for key, value in graph_module.state_dict().items())
    assert model.q.weight.data_ptr() != graph_module.get_parameter("q.weight").data_ptr()


@pytest.mark.parametrize("shape", [(4, 6), (2, 5, 6), (2, 3, 5, 6), (0, 6)])
def test_values_are_described_with_their_strides(shape: tuple[int, ...]) -> None:
    def strides() -> list[tuple[int, ...]]:
        return [node.meta["val"].stride() for node in iter_nodes(graph_module.graph) if "val" in node.meta]

    x = torch.randn(*shape[:-1], 4)
    graph_module = infer_shapes(graph_of(qkv("k"), "modules", torch.randn(3, 4)), x)
    before = strides()
    MergeLinears()(graph_module, expect=1)
    merged = strides()
    assert strides() != before
    infer_shapes(graph_module, x)
    assert strides() == merged
    undo(graph_module)
    assert strides() == before


def test_a_stand_in_bias_that_was_trained_cannot_be_undone() -> None:
    graph_module = graph_of(qkv("k"), "modules", torch.randn(3, 4))
    MergeLinears()(graph_module, expect=1)
    bias = graph_module.get_parameter("q_k_v_merged.bias")
    assert bias.requires_grad
    with torch.no_grad():
        bias[9] = 0.5
    merged = structure(graph_module)
    with pytest.raises(UndoError, match="stand-in"):
        MergeLinears()(graph_module, reverse=True)
    assert structure(graph_module) == merged
    with torch.no_grad():
        bias[9] = 0.0
    MergeLinears()(graph_module, reverse=True)
    assert graph_module.get_submodule("k").bias is None


@given(
    widths=st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.booleans()), min_size=2, max_size=6),
    form=st.sampled_from(TRACED),
    training=st.booleans(),
)
@settings(max_examples=settings().max_examples // 10, deadline=None)
def test_any_mix_of_layers_computes_the_same_and_comes_back(
    widths: list[tuple[int, bool, bool]], form: Form, training: bool
) -> None:
    names = [f"l{i}" for i in range(len(widths))]
    unbiased = " ".join(name for name, (_, biased, _) in zip(names, widths, strict=True) if not biased)
    model = Model(
        lambda m, x: [m.get_submodule(n)(x) for n in names],
        unbiased,
        **{name: width for name, (width, _, _) in zip(names, widths, strict=True)},
    )
    model.train(training)
    for name, (_, _, trains) in zip(names, widths, strict=True):
        model.get_submodule(name).requires_grad_(trains)
    x = torch.randn(3, 4)
    graph_module = graph_of(model, form, x)
    start, expected = structure(graph_module), graph_module(x)
    MergeLinears()(graph_module)
    torch.testing.assert_close(graph_module(x), expected)
    MergeLinears()(graph_module, reverse=True)
    assert structure(graph_module) == start
