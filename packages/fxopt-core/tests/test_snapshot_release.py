"""A snapshot lets go of released tensors, rebuilds them only if nobody else has kept them, and costs little."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from fxopt_core import Snapshot, iter_nodes
from fxopt_core.errors import FxoptError


def hook(*_: object) -> None:
    pass


class Scale(nn.Module):
    def __init__(self, factor: torch.Tensor) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn: Any = nn.Module()
        self.attn.q, self.attn.k = nn.Linear(4, 4), nn.Linear(4, 4)
        self.attn.k.bias = self.attn.q.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.add(self.attn.q(x), self.attn.k(x))


def merge(gm: Any, snapshot: Snapshot) -> nn.Linear:
    """What a pass does: build the replacement, release the originals, drop them."""
    merged = nn.Linear(4, 8)
    q, k = gm.attn.q, gm.attn.k
    with torch.no_grad():
        merged.weight.copy_(torch.cat([q.weight, k.weight]))
        merged.bias.copy_(torch.cat([q.bias, k.bias]))
    snapshot.release(q.weight, lambda: merged.weight[:4].clone())
    snapshot.release(k.weight, lambda: merged.weight[4:].clone())
    snapshot.release(q.bias, lambda: merged.bias[:4].clone())
    gm.attn.qk = merged
    for node in list(iter_nodes(gm.graph))[-4:-1]:
        node.replace_all_uses_with(next(iter_nodes(gm.graph)))
        gm.graph.erase_node(node)
    return merged


def values(gm: Any) -> dict[str, list[float]]:
    return {name: tensor.tolist() for name, tensor in gm.state_dict().items()}


@pytest.mark.parametrize("whole", [False, True])
def test_released_tensors_are_freed_and_rebuilt(whole: bool) -> None:
    model: Any = Three()
    gm: Any = torch.fx.symbolic_trace(model)
    del model
    gc.collect()
    gm.attn.q.eval()
    gm.attn.k.register_forward_hook(hook)
    gm.attn.q.weight.requires_grad_(False)
    gm.attn.q.weight.tag = "tagged"
    gm.attn.k.weight.grad = gradient = torch.ones(4, 4)
    before, order, types = values(gm), list(gm.state_dict()), [type(module) for module in gm.modules()]
    hooks = gm.attn.k._forward_hooks
    snapshot = Snapshot(gm)
    references = [weakref.ref(tensor) for tensor in gm.parameters()]
    references += [weakref.ref(tensor.untyped_storage()) for tensor in gm.parameters()]
    merge(gm, snapshot)
    if whole:
        del gm.attn
    else:
        del gm.attn.q, gm.attn.k
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
    assert snapshot.restore() == ()
    assert values(gm) == before
    assert list(gm.state_dict()) == order
    assert [type(module) for module in gm.modules()] == types
    assert gm.attn.k.bias is gm.attn.q.bias
    assert (gm.attn.q.training, gm.attn.k.training) == (False, True)
    assert gm.attn.k._forward_hooks is hooks
    assert (gm.attn.q.weight.requires_grad, gm.attn.k.weight.requires_grad) == (False, True)
    assert gm.attn.q.weight.tag == "tagged"
    assert gm.attn.k.weight.grad is gradient
    gm.graph.lint()
    gm(torch.ones(1, 4))


def test_a_callers_model_is_left_alone_and_comes_back() -> None:
    model: Any = Three()
    gm: Any = torch.fx.symbolic_trace(model)
    before = values(gm)
    held = {name: id(value) for name, value in model.named_parameters()}
    snapshot = Snapshot(gm)
    merged = merge(gm, snapshot)
    gm.attn._modules = {}
    del gm.attn
    merged.weight.data.zero_()  # must not matter: nothing is rebuilt
    assert {name: id(value) for name, value in model.named_parameters()} == held
    assert snapshot.restore() == ()
    assert gm.attn is not model.attn  # the tracer made a container of its own
    assert gm.attn.q is model.attn.q
    assert {name: id(value) for name, value in model.named_parameters()} == held
    assert values(gm) == before


def test_tensors_that_share_memory_do_so_again() -> None:
    gm: Any = torch.fx.symbolic_trace(Three())
    gm.attn.q.weight.data, gm.attn.k.weight.data = torch.randn(2, 4, 4)
    before, snapshot = values(gm), Snapshot(gm)
    merge(gm, snapshot)
    del gm.attn
    assert snapshot.restore() == ()
    assert values(gm) == before
    assert gm.attn.q.weight.untyped_storage().data_ptr() == gm.attn.k.weight.untyped_storage().data_ptr()


@pytest.mark.parametrize("protect_values", [False, True])
def test_a_held_tensor_that_became_a_view_gets_memory_of_its_own_again(protect_values: bool) -> None:
    model: Any = Three()
    gm: Any = torch.fx.symbolic_trace(model)
    weight, before = model.attn.q.weight, values(gm)
    snapshot = Snapshot(gm, protect_values=protect_values)
    merged = nn.Linear(4, 8)
    with torch.no_grad():
        merged.weight.copy_(torch.cat([weight, model.attn.k.weight]))
    weight.data = merged.weight.detach()[:4]
    snapshot.release(gm.attn.q.weight, lambda: merged.weight.detach()[:4].clone())
    del gm.attn
    assert snapshot.restore() == ()
    assert gm.attn.q.weight is weight
    assert values(gm) == before
    with torch.no_grad():
        merged.weight.zero_()
    assert values(gm) == before
    assert weight.untyped_storage().nbytes() == 64


def test_protected_values_stand_in_for_released_tensors() -> None:
    gm: Any = torch.fx.symbolic_trace(Three())
    gc.collect()
    before = values(gm)
    snapshot = Snapshot(gm, protect_values=True)
    merged = merge(gm, snapshot)
    merged.weight.data.zero_()
    del gm.attn
    gc.collect()
    assert snapshot.restore() == ()
    assert values(gm) == before


def test_a_wrong_stand_in_is_an_error_and_the_rest_is_restored() -> None:
    gm: Any = torch.fx.symbolic_trace(Three())
    gc.collect()
    order = [node.name for node in iter_nodes(gm.graph)]
    snapshot = Snapshot(gm)
    snapshot.release(gm.attn.k.weight, lambda: torch.zeros(1))  # the first one counts
    merge(gm, snapshot)
    snapshot.release(gm.attn.q.weight, lambda: torch.zeros(1))
    del gm.attn
    gc.collect()
    with pytest.raises(FxoptError, match=r"attn\.k\.weight.*was released.*torch\.Size\(\[1\]\)"):
        snapshot.restore()
    assert [node.name for node in iter_nodes(gm.graph)] == order
    assert gm.attn.q.weight.shape == (4, 4)


def test_a_plain_attribute_can_be_released() -> None:
    gm: Any = torch.fx.symbolic_trace(Scale(torch.ones(3)))
    gc.collect()
    name = next(node.target for node in iter_nodes(gm.graph) if node.op == "get_attr")
    assert isinstance(name, str)
    reference = weakref.ref(getattr(gm, name))
    snapshot = Snapshot(gm)
    snapshot.release(getattr(gm, name), lambda: torch.full((3,), 5.0))
    delattr(gm, name)
    gc.collect()
    assert reference() is None
    snapshot.restore()
    assert getattr(gm, name).tolist() == [5.0] * 3


def test_snapshots_do_not_put_off_full_collections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)  # the tests freeze what they import
    gc.collect()
    for _ in range(3):
        gc.collect(0)  # a full collection follows ten of generation 1, which follow ten of generation 0
    Snapshot(nn.Linear(2, 2))
    assert gc.get_count()[1] >= 3
