from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import Refusal, iter_nodes
from fxopt_rewrite import (
    REASONS,
    GraphIndex,
    LinearCall,
    mixed_flags_refusal,
    read_linear,
    sharing_refusal,
    tensors_refusal,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(2, 2)
        self.k = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.q(x) + self.k(x)


def calls_of(graph_module: GraphModule) -> tuple[GraphIndex, list[LinearCall]]:
    index = GraphIndex(graph_module)
    found = [read_linear(index, node) for node in iter_nodes(graph_module.graph)]
    return index, [call for call in found if isinstance(call, LinearCall)]


def traced(change: Callable[[Model], object] | None = None) -> GraphModule:
    model = Model()
    if change is not None:
        change(model)
    graph_module = symbolic_trace(model)
    if change is not None:
        change(graph_module)  # type: ignore[arg-type]  # it has the same attributes
    return graph_module


def said(refusal: Refusal | None) -> tuple[str, str]:
    """Return the reason and the message of what is refused."""
    assert refusal is not None
    return refusal.reason, refusal.message


class TestTensors:
    def test_of_one_owner_may_be_rewritten(self) -> None:
        index, calls = calls_of(traced())
        assert [tensors_refusal(call, index) for call in calls] == [None, None]

    def test_tied_by_name(self) -> None:
        index, calls = calls_of(traced(lambda m: setattr(m.k, "weight", m.q.weight)))
        message = "`q.weight` of `q` is tied to `k.weight`; rewriting it would untie them"
        assert tensors_refusal(calls[0], index) == Refusal("q", "tied-parameter", message, ("q",))

    def test_tied_by_memory(self) -> None:
        flat = torch.zeros(6)

        def share(model: Model) -> None:
            model.q.bias, model.k.bias = nn.Parameter(flat[:2]), nn.Parameter(flat[1:3])

        index, calls = calls_of(traced(share))
        message = said(tensors_refusal(calls[1], index))[1]
        assert "`k.bias` of `k` is tied to another tensor, whose memory it shares" in message

    def test_of_a_module_with_two_names(self) -> None:
        index, calls = calls_of(traced(lambda m: setattr(m, "alias", m.q)))
        expected = ("shared-module", "module `q` has several names: `q`, `alias`")
        assert said(tensors_refusal(calls[0], index)) == expected

    def test_written_in_the_graph(self) -> None:
        class Writes(Model):
            def forward(self, x: Tensor) -> Any:
                self.q.weight.mul_(2)
                return super().forward(x)

        index, calls = calls_of(symbolic_trace(Writes()))
        reasons = [refusal and refusal.reason for refusal in (tensors_refusal(call, index) for call in calls)]
        assert reasons == ["mutated", None]


class Adapted(nn.Module):
    """A layer with an adapter; PEFT names the parts so."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2)})

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) + self.lora_A["default"](x).sum()


class OnlyNamed(nn.Module):
    """A layer that is named as the base of an adapter, and has none."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x)


class TestAdapters:
    def test_base_and_adapter_stay(self) -> None:
        model: Any = Model()
        model.k = Adapted(model.k)
        index, calls = calls_of(symbolic_trace(model))
        found = [tensors_refusal(call, index) for call in calls]
        sites = [(refusal.site, refusal.reason) for refusal in found if refusal is not None]
        assert sites == [("k.base_layer", "adapter"), ("k.lora_A.default", "adapter")]
        assert found[0] is None
        assert "adapter `lora_A` is attached to `k.base_layer`" in said(found[1])[1]

    def test_a_name_alone_is_no_adapter(self) -> None:
        model: Any = Model()
        model.k = OnlyNamed(model.k)
        index, calls = calls_of(symbolic_trace(model))
        assert [tensors_refusal(call, index) for call in calls] == [None, None]


class TestSharing:
    class Twice(Model):
        def forward(self, x: Tensor) -> Any:
            return self.q(x) + self.q(x + 1) + self.k(x)

    class Reads(Model):
        def forward(self, x: Tensor) -> Any:
            return self.q(x) + F.linear(x, self.k.weight) + self.q.bias

    def test_called_elsewhere_too(self) -> None:
        index, calls = calls_of(symbolic_trace(self.Twice()))
        expected = ("shared-module", "`q` is also called at node `q_1`; rewriting it would change that")
        assert said(sharing_refusal(calls[0], [calls[0].node], index)) == expected
        assert sharing_refusal(calls[0], [calls[0].node, calls[1].node], index) is None
        assert sharing_refusal(calls[2], [calls[2].node], index) is None

    def test_read_elsewhere_too(self) -> None:
        index, calls = calls_of(symbolic_trace(self.Reads()))
        reason, message = said(sharing_refusal(calls[0], [calls[0].node], index))
        assert reason == "tied-parameter" and "also read (its `bias`) at node `add_1`" in message
        assert sharing_refusal(calls[1], [calls[1].node], index) is None


class TestFlags:
    def test_all_alike(self) -> None:
        index, calls = calls_of(traced())
        assert mixed_flags_refusal("q + k", calls, index) is None
        index, calls = calls_of(traced(lambda m: m.requires_grad_(False)))
        assert mixed_flags_refusal("q + k", calls, index) is None

    def test_mixed(self) -> None:
        index, calls = calls_of(traced(lambda m: m.k.bias.requires_grad_(False)))
        message = "`k.bias` is frozen and `q.weight` is trainable; one tensor cannot be both"
        assert said(mixed_flags_refusal("q + k", calls, index)) == ("mixed-requires-grad", message)


def test_every_reason_says_what_it_means() -> None:
    assert all(code == code.lower() and " " not in code and text.endswith(".") for code, text in REASONS.items())
    with pytest.raises(TypeError):
        REASONS["new"] = "text"  # type: ignore[index]  # that is the point
