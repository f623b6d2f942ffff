"""A snapshot brings back everything, whatever was done in between: to the same objects, but for nodes."""

from __future__ import annotations

import copy
import math
import operator
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias

import pytest
import torch
from footprints import Footprint
from hypothesis import given, settings, strategies as st
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx import GraphModule, Node
from torch.nn.utils import parametrize, prune
from torch.utils._pytree import tree_map_only

from fxopt_core import Snapshot, iter_nodes

Damage: TypeAlias = Callable[[Any], None]


class Inner(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.block = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.1))
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight
        self.shift: torch.Tensor
        self.register_buffer("shift", torch.ones(3), persistent=False)
        self.free = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.last(self.block(self.first(x))) + torch.mul(self.shift, self.free)
        return torch.mul(y, 2)


def untyped(function: Any) -> Any:
    """Torch has no types for it."""
    return function


def hook(*_: object) -> None:
    pass


def build() -> Any:
    """A graph module with hooks, plain attributes, ties, a nested graph module, node attributes and gradients."""
    torch.manual_seed(0)
    gm: Any = torch.fx.symbolic_trace(Model())
    gm.add_module("nested", torch.fx.symbolic_trace(Inner()))
    output = gm.graph.output_node()
    with gm.graph.inserting_before(output):
        called = gm.graph.call_module("nested", (output.args[0],))
    output.args = (called,)
    gm.recompile()
    gm.register_buffer("wide", torch.arange(3.0).expand(2, 3))
    gm.register_forward_hook(hook)
    gm.first.register_forward_pre_hook(hook)
    gm.label, gm.constant, gm.settings = "mine", torch.full((2,), 7.0), {"list": [1], "tensor": torch.zeros(2)}
    gm.meta["mine"] = "meta"
    gm.first.bias.grad = torch.ones(3)
    gm.first.bias.register_hook(hook)
    gm.free.requires_grad_(False)
    gm.free.tag = "tagged"
    for number, node in enumerate(iter_nodes(gm.graph)):
        node.meta["number"] = number
    vars(called)["ad_hoc"] = [1]
    return gm


def node_named(gm: Any, name: str) -> Node:
    return next(node for node in iter_nodes(gm.graph) if node.name == name)


def damage_erase(gm: Any) -> None:
    for node in reversed(list(iter_nodes(gm.graph))):
        gm.graph.erase_node(node)


def damage_insert(gm: Any) -> None:
    with gm.graph.inserting_after(node_named(gm, "first")):
        new = gm.graph.call_function(torch.sigmoid, (node_named(gm, "first"),))
    node_named(gm, "first").replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)
    gm.recompile()


def damage_names(gm: Any) -> None:
    for number, node in enumerate(list(iter_nodes(gm.graph))):
        node._rename(f"renamed_{number}")
    node_named(gm, "renamed_1").name = "plain"


def damage_fields(gm: Any) -> None:
    add = node_named(gm, "add")
    add.target, add.type, add.args = operator.mul, int, (add.args[1], add.args[0])
    add._repr_fn = lambda node: "?"
    node_named(gm, "first").kwargs = {"input": node_named(gm, "x")}
    node_named(gm, "first").args = ()


def damage_meta(gm: Any) -> None:
    nodes = list(iter_nodes(gm.graph))
    nodes[0].meta["number"], nodes[1].meta["new"] = -1, 1
    nodes[2].meta.clear()
    nodes[3].meta = {}
    vars(nodes[4])["ad_hoc"] = 1  # as passes of other packages do
    vars(node_named(gm, "nested")).clear()
    gm.meta["mine"] = "changed"
    gm.meta = {}


def damage_order(gm: Any) -> None:
    nodes = list(iter_nodes(gm.graph))
    nodes[0].prepend(nodes[5])
    nodes[-1].append(nodes[2])


def damage_users(gm: Any) -> None:
    for node in iter_nodes(gm.graph):
        node.users = dict(list(node.users.items())[1:])


def damage_assign(gm: Any) -> None:
    gm.graph = copy.deepcopy(gm.graph)
    gm.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    gm.recompile()


def damage_codegen(gm: Any) -> None:
    gm.graph.on_generate_code(lambda _: lambda body: [*body, "\n"])
    gm.graph.inserting_before(node_named(gm, "first")).__enter__()
    gm.graph._insert = node_named(gm, "first").prepend
    gm.graph._graph_namespace.create_name("spoilt", None)
    gm.graph._co_fields["co_filename"] = "elsewhere"
    gm.graph.find_nodes(op="call_function", target=torch.tanh)
    gm.recompile()


def damage_tree(gm: Any) -> None:
    gm.delete_submodule("first")
    del gm.block._modules["1"]
    gm.add_submodule("block.more", nn.ReLU())
    gm.last = nn.Identity()
    gm.delete_all_unused_submodules()


def damage_attributes(gm: Any) -> None:
    del gm.label
    gm.fresh, gm.constant = 1, torch.zeros(1)
    gm.settings["list"] = None
    del gm.settings["tensor"]
    gm.block.extra = []
    del gm.free
    gm._non_persistent_buffers_set.clear()
    gm.register_buffer("shift", torch.zeros(3))


def damage_namespace(gm: Any) -> None:
    object.__setattr__(gm.block, "__dict__", {"_parameters": {}, "_buffers": {}, "_modules": {}})
    gm.first._parameters = {}
    gm.last._forward_hooks = OrderedDict()


def damage_hooks(gm: Any) -> None:
    gm._forward_hooks.clear()
    gm.first._forward_pre_hooks.clear()
    for module in (gm, gm.first, gm.nested):
        module.register_forward_hook(hook, with_kwargs=True, always_call=True)
        module.register_forward_pre_hook(hook, prepend=True)
        module.register_full_backward_hook(hook)
        module.register_state_dict_pre_hook(hook)
        module._register_state_dict_hook(hook)
        module.register_load_state_dict_post_hook(hook)
    gm.last.bias.register_hook(hook)
    gm.first.bias._backward_hooks.clear()


def damage_graph_hooks(gm: Any) -> None:
    def boom(*_: object, **__: object) -> None:
        raise RuntimeError("a graph hook ran during rollback")

    node_named(gm, "add").replace_all_uses_with(node_named(gm, "mul"))
    gm._register_replace_node_hook(boom)
    gm._register_create_node_hook(boom)
    gm._register_erase_node_hook(boom)
    gm._register_deepcopy_hook(boom)


def damage_class(gm: Any) -> None:
    gm.__class__.__name__ = "Renamed"
    type(gm).forward = hook
    type(gm).added = 1
    del type(gm).__call__
    type(gm.nested).forward = hook
    parametrize.register_parametrization(gm.last, "bias", nn.Tanh())
    gm.get_submodule("block.0").__class__ = nn.Identity


def damage_root_class(gm: Any) -> None:
    parametrize.register_parametrization(gm, "free", nn.Tanh())


def damage_prune(gm: Any) -> None:
    untyped(prune.l1_unstructured)(gm.get_submodule("block.0"), "weight", amount=0.5)
    nn.utils.parametrizations.weight_norm(gm.first)


def damage_mode(gm: Any) -> None:
    gm.eval()
    gm.get_submodule("block.1").momentum = 0.9


def damage_nested(gm: Any) -> None:
    nested = gm.nested
    assert isinstance(nested, GraphModule)
    nested.graph.erase_node(nested.graph.output_node())
    nested.graph.output(None)
    nested.recompile()
    nested.meta["new"] = 1


def damage_dtype(gm: Any) -> None:
    gm.double()
    gm.requires_grad_(True)
    gm.block.half().requires_grad_(False)


def damage_device(gm: Any) -> None:
    gm.to("meta")


def damage_data(gm: Any) -> None:
    gm.first.weight.data = torch.zeros(5, 5)
    gm.shift.data = gm.shift.data.view(torch.int32)
    gm.free.data = gm.free.data[1:]
    gm.last.bias.grad = torch.ones(3)
    gm.first.bias.grad = None
    del gm.free.tag
    gm.settings["tensor"].requires_grad_()


def damage_swap(gm: Any) -> None:
    other = nn.Parameter(torch.zeros(4, dtype=torch.float64), requires_grad=False)
    untyped(torch.utils.swap_tensors)(gm.last.bias, other)
    gm.settings["tensor"].data = torch.zeros(9)


def damage_ties(gm: Any) -> None:
    gm.last.weight = nn.Parameter(torch.zeros(3, 3))
    gm.get_submodule("block.0").bias = gm.first.bias
    gm.load_state_dict(gm.state_dict(), assign=True)


DAMAGES: list[Damage] = [value for key, value in globals().items() if key.startswith("damage_")]


# `set_` and `swap_tensors` move version counters as writes do, so that a cheap snapshot has to suspect these.
SUSPECTED: dict[Damage, tuple[str, ...]] = {
    damage_class: ("last.bias",),
    damage_root_class: ("free",),
    damage_swap: ("last.bias",),
}


@pytest.mark.parametrize("protect_values", [False, True])
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__.removeprefix("damage_"))
def test_every_damage_is_undone(damage: Damage, protect_values: bool) -> None:
    gm = build()
    x = torch.ones(2, 3)
    code, before = gm.code, Footprint(gm)
    snapshot = Snapshot(gm, protect_values=protect_values)
    assert Footprint(gm).differences(before) == []
    before._kept.clear()  # only the snapshot keeps them alive
    damage(gm)
    assert snapshot.restore() == (() if protect_values else SUSPECTED.get(damage, ()))
    assert Footprint(gm).differences(before) == []
    gm.graph.lint()
    assert gm.code == code
    assert gm.eval()(x).shape == (2, 3)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.sampled_from(DAMAGES), min_size=2, max_size=4))
def test_damages_on_top_of_each_other_are_undone(damages: list[Damage]) -> None:
    gm = build()
    before = Footprint(gm)
    snapshot = Snapshot(gm)
    for damage in damages:
        try:
            damage(gm)
        except Exception:
            break  # what the one before has left may be too broken for the next
    snapshot.restore()
    assert Footprint(gm).differences(before) == []


def test_restoring_twice_and_nested_snapshots() -> None:
    gm = build()
    before = Footprint(gm)
    outer = Snapshot(gm)
    gm.graph.erase_node(gm.graph.output_node())
    between = Footprint(gm)
    inner = Snapshot(gm)
    damage_erase(gm)
    gm.double()
    inner.restore()
    assert Footprint(gm).differences(between) == []
    for _ in range(2):
        damage_tree(gm)
        outer.restore()
        assert Footprint(gm).differences(before) == []


# contents of tensors


def test_writes_in_place_are_named() -> None:
    gm = build()
    snapshot = Snapshot(gm)
    with torch.no_grad():
        gm.first.weight.mul_(2)
        gm.get_submodule("block.1").running_mean.add_(1)
        gm.constant.zero_()
        gm.settings["tensor"].add_(1)
        gm.first.bias.grad.add_(1)
    names = {"first.weight", "block.1.running_mean", "constant", "settings[...]", "first.bias.grad"}
    assert set(snapshot.restore()) == names


def test_a_buffer_drawn_into_autograd_in_place_is_a_leaf_again() -> None:
    gm = build()
    snapshot = Snapshot(gm)
    gm.shift.mul_(gm.last.bias)
    assert gm.shift.requires_grad
    assert snapshot.restore() == ("shift",)
    assert gm.shift.is_leaf
    assert not gm.shift.requires_grad


def test_resized_storage_is_named_and_has_its_size_again() -> None:
    gm = build()
    snapshot = Snapshot(gm)
    gm.free.untyped_storage().resize_(0)
    assert snapshot.restore() == ("free",)
    assert gm.free.untyped_storage().nbytes() == 12


def overwrite(gm: Any) -> None:
    with torch.no_grad():
        for tensor in [*gm.parameters(), gm.shift, gm.constant, gm.settings["tensor"], gm.first.bias.grad]:
            tensor.fill_(math.nan)
    gm.get_submodule("block.1").running_var.data.fill_(3)
    gm.wide[0].fill_(-1)
    gm.get_submodule("block").double()
    gm.first.weight.untyped_storage().resize_(0)


def test_protected_values_come_back() -> None:
    gm = build()
    before = Footprint(gm, identities=False)
    snapshot = Snapshot(gm, protect_values=True)
    overwrite(gm)
    assert snapshot.restore() == ()
    assert Footprint(gm, identities=False).differences(before) == []


def test_protecting_copies_a_shared_storage_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: copied.append(tensor.nbytes) or clone(tensor))  # type: ignore[func-returns-value,redundant-expr]  # in a lambda
    flat = torch.arange(8.0)
    gm: Any = torch.fx.symbolic_trace(nn.Linear(2, 2))
    gm.weight, gm.bias = nn.Parameter(flat[:4].view(2, 2)), nn.Parameter(flat[4:6])
    snapshot = Snapshot(gm, protect_values=True)
    flat.zero_()
    assert snapshot.restore() == ()
    assert flat.tolist() == list(range(8))
    assert copied == [32]


def test_unusual_tensors() -> None:
    with torch.inference_mode():
        inference = torch.ones(2)
    gm: Any = torch.fx.symbolic_trace(nn.Identity())
    gm.register_buffer("inference", inference)
    gm.register_buffer("sparse", torch.eye(2).to_sparse())
    gm.register_parameter("meta_weight", nn.Parameter(torch.empty(2, device="meta")))
    gm.register_parameter("lazy", nn.UninitializedParameter())
    gm.derived = torch.ones(2, requires_grad=True) * 2
    before = kinds(gm)
    for protect_values in (False, True):
        snapshot = Snapshot(gm, protect_values=protect_values)
        gm.sparse.data = torch.zeros(2, 2).to_sparse()
        gm.meta_weight.data = torch.empty(3, device="meta")
        gm.lazy.materialize((2, 2))
        gm.inference.data = torch.zeros(3)
        assert snapshot.restore() == ()
        assert kinds(gm) == before
        assert gm.sparse.to_dense().equal(torch.eye(2))
        assert gm.meta_weight.shape == gm.inference.shape == (2,)


def kinds(gm: Any) -> list[Any]:
    tensors = {**dict(gm.named_parameters()), **dict(gm.named_buffers()), "derived": gm.derived}
    return [(name, id(value), type(value), value.layout, value.dtype) for name, value in tensors.items()]


def test_fake_and_wrapped_tensors() -> None:
    with FakeTensorMode():
        gm: Any = torch.fx.symbolic_trace(nn.Linear(2, 2))
    gm.register_parameter("wrapped", nn.Parameter(Wrapped(torch.ones(2, 2))))
    inner, weight = gm.wrapped.held, gm.weight
    for protect_values in (False, True):
        snapshot = Snapshot(gm, protect_values=protect_values)
        gm.weight.data = gm.weight.data.double()
        gm.wrapped.held = torch.zeros(3)
        gm.wrapped.requires_grad_(False)
        inner.mul_(2)
        assert snapshot.restore() == (() if protect_values else ("wrapped.held",))
        assert gm.weight is weight
        assert gm.weight.dtype is torch.float32
        assert gm.wrapped.held is inner
        assert gm.wrapped.requires_grad
        assert inner.tolist() == [[2.0, 2.0], [2.0, 2.0]]


class Wrapped(torch.Tensor):
    """A tensor that keeps its memory in another one, as sharded and quantized ones do."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.held = inner

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares it as if it were no class method
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda wrapped: wrapped.held, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, Wrapped, func(*args, **kwargs))
