"""A faithful copy is equal in everything and shares nothing that can change."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.export import Dim
from torch.fx import GraphModule
from torch.nn.utils import parametrize
from traced_blocks import (
    SAMPLES as BLOCKS,
    Block,
    functional,
    hook,
    mutable_parts,
    node_rows,
    same,
    subclass,
    tensor_rows,
    traced,
)

from fxopt_core import faithful_copy, iter_nodes
from fxopt_core.errors import FxoptError


def from_dict() -> Any:
    graph = torch.fx.Graph()
    x = graph.placeholder("x", type_expr=torch.Tensor)
    weight = graph.get_attr("deep.weight")
    graph.output(graph.call_module("act", (graph.call_function(F.linear, (x, weight)),)))
    return GraphModule({"deep.weight": nn.Parameter(torch.randn(3, 3)), "act": nn.ReLU()}, graph, "FromDict")


def exported(**options: Any) -> Any:
    batch = Dim("batch", min=2, max=8)
    inputs = torch.randn(3, 3), torch.randn(3, 3)
    shapes = {0: batch}
    program = torch.export.export(Block().eval(), inputs, dynamic_shapes=(shapes, shapes), strict=False)
    return program.module(**options)


SAMPLES: list[Callable[[], Any]] = [*BLOCKS, from_dict, exported]


def structure(graph_module: Any) -> Any:
    """Everything of a graph module by name and value, nothing by identity."""
    modules = [(name, type(module).__name__, module.training) for name, module in graph_module.named_modules()]
    attributes = [
        (name, key, str(value) if not key.endswith("hooks") else [str(item) for item in value])
        for name, module in graph_module.named_modules()
        for key, value in vars(module).items()
        if key not in ("_graph", "_modules", "train", "eval") and not isinstance(value, dict)
    ]
    metas = [[(key, id(value)) for key, value in node.meta.items()] for node in iter_nodes(graph_module.graph)]
    names = graph_module.graph._graph_namespace
    space = names._used_names, names._base_count
    rows = tensor_rows(graph_module), node_rows(graph_module.graph)
    return modules, attributes, rows, metas, space, graph_module.code, list(graph_module.state_dict())


def inputs_of(graph_module: Any) -> tuple[torch.Tensor, ...]:
    count = len(graph_module.graph.find_nodes(op="placeholder"))
    return tuple(torch.ones(3, 3) for _ in range(count if "validate_inputs" in vars(graph_module) else 1))


@pytest.mark.parametrize("make", SAMPLES)
def test_a_copy_is_equal_and_shares_nothing(make: Callable[[], Any]) -> None:
    original = make()
    twin = faithful_copy(original)
    assert structure(twin) == structure(original)
    assert not mutable_parts(twin) & mutable_parts(original)
    assert type(twin).__mro__[1:] == type(original).__mro__[1:]
    twin.graph.lint()
    assert twin.graph.owning_module is twin
    if "validate_inputs" not in vars(original):
        twin.eval()
        original.eval()
    inputs = inputs_of(original)
    assert same(twin(*inputs), original(*inputs))
    twin.recompile()
    assert same(twin(*inputs), original(*inputs))
    assert twin.code == original.code


def test_users_and_code_generators() -> None:
    original = traced()
    first, *_, last = iter_nodes(original.graph)
    first.users = {last: None, **first.users}
    original.graph.on_generate_code(lambda _: lambda body: ["\n", *body])
    twin = faithful_copy(original)
    assert list(map(str, next(iter_nodes(twin.graph)).users)) == list(map(str, first.users))
    twin.graph.on_generate_code(lambda _: lambda body: body)
    assert original.graph._codegen._body_transformer(["x"]) == ["\n", "x"]


def test_stale_code_stays_as_it_is() -> None:
    original = from_dict()
    output = original.graph.output_node()
    with original.graph.inserting_before(output):
        output.args = (original.graph.call_function(torch.neg, output.args),)
    twin = faithful_copy(original)
    x = torch.ones(2, 3)
    assert torch.equal(twin(x), original(x))
    twin.recompile()
    assert torch.equal(twin(x), -original(x))


# hooks


def register_all(module: Any, callback: Any) -> None:
    module.register_forward_pre_hook(callback, with_kwargs=True)
    module.register_forward_hook(callback, with_kwargs=True, always_call=True)
    module.register_full_backward_pre_hook(callback)
    module.register_full_backward_hook(callback)
    module.register_state_dict_pre_hook(callback)
    module.register_state_dict_post_hook(callback)
    module.register_load_state_dict_pre_hook(callback)
    module.register_load_state_dict_post_hook(callback)


# But for the one whose hooks torch wraps.
HOOKS = [key for key in vars(nn.Module()) if "_hooks" in key and key != "_load_state_dict_pre_hooks"]


@pytest.mark.parametrize("make", [make for make in SAMPLES if make is not subclass])
def test_hooks_of_all_kinds_stay(make: Callable[[], Any]) -> None:
    class Callback:
        def __call__(self, *_: object, **__: object) -> None:
            pass

    original = make()
    original._register_replace_node_hook(hook)
    for callback in (hook, Callback(), lambda *_: None):
        for module in original.modules():
            register_all(module, callback)
    twin = faithful_copy(original)
    for ours, theirs in zip(twin.modules(), original.modules(), strict=True):
        for name in HOOKS:
            assert list(getattr(ours, name).items()) == list(getattr(theirs, name).items()), name
            assert getattr(ours, name) is not getattr(theirs, name)
        wrapped = [(h.hook, h.with_module and h.module()) for h in ours._load_state_dict_pre_hooks.values()]
        assert [pair[0] for pair in wrapped] == [h.hook for h in theirs._load_state_dict_pre_hooks.values()]
        assert all(pair[1] in (False, ours) for pair in wrapped)
    assert twin._replace_hooks == [hook]
    assert twin._replace_hooks is not original._replace_hooks


class Recorder(GraphModule):
    def remember(self, *_: object) -> None:
        self.seen = True


def test_hooks_bound_to_the_tree_are_bound_to_the_copy() -> None:
    class Keeper:
        def __init__(self, module: nn.Module) -> None:
            self.module = module

        def __call__(self, *_: object) -> None:
            self.module.kept = True  # type: ignore[assignment]  # any attribute will do

    def note(module: Any, *_: object) -> None:
        module.noted = True

    base = functional()
    original: Any = Recorder(base, base.graph)
    original.register_forward_hook(original.remember)
    original.register_forward_hook(functools.partial(note, original))
    original.register_forward_hook(Keeper(original))
    twin = faithful_copy(original)
    twin(torch.ones(1, 3))
    assert (twin.seen, twin.noted, twin.kept) == (True, True, True)
    assert not {"seen", "noted", "kept"} & set(vars(original))


def test_deepcopy_hooks_run_on_the_copy() -> None:
    original = functional()
    copies: list[Any] = []
    original._register_deepcopy_hook(copies.append)
    twin = faithful_copy(original)
    assert copies == [twin]
    assert twin._deepcopy_hooks == original._deepcopy_hooks


# attributes and tensors


def test_plain_attributes() -> None:
    original, table = traced(), {"a": [1, {2}], "b": torch.ones(2)}
    original.table, original.same_table = table, table
    original.node, original.part, original.me = next(iter_nodes(original.graph)), original.linear, original
    twin = faithful_copy(original)
    assert twin.table["a"] == [1, {2}]
    assert twin.table["a"] is not table["a"]
    assert twin.table["b"].equal(table["b"])
    assert twin.table["b"] is not table["b"]
    assert twin.same_table is twin.table
    assert twin.node is next(iter_nodes(twin.graph))
    assert (twin.part, twin.me) == (twin.linear, twin)


def test_tensors_keep_ties_flags_gradients_and_shared_memory() -> None:
    original = traced()
    original.linear.weight.grad = torch.ones(3, 3)
    original.linear.weight.tag = {"tag": 1}
    original.linear.bias.requires_grad_(False)
    original.linear.eval()
    flat = torch.arange(12.0)
    original.register_buffer("left", flat[:6])
    original.register_buffer("right", flat[3:9].view(2, 3).t())
    original._non_persistent_buffers_set.add("shift")
    original.alias = original.linear.weight
    twin = faithful_copy(original)
    assert twin.linear.weight is twin.tied.weight is twin.alias
    assert twin.linear.weight.grad.equal(torch.ones(3, 3))
    assert twin.linear.weight.grad is not original.linear.weight.grad
    assert twin.linear.weight.tag == {"tag": 1}
    assert twin.linear.weight.tag is not original.linear.weight.tag
    assert not twin.linear.bias.requires_grad
    assert not twin.linear.training
    twin.left[3] = -1
    assert twin.right[0, 0] == -1
    assert twin.right.stride() == (1, 3)
    assert flat[3] == 3
    assert "shift" in dict(twin.named_buffers())
    assert "shift" not in twin.state_dict()


def test_unusual_tensors_and_modules() -> None:
    original = traced()
    original.register_buffer("sparse", torch.eye(2).to_sparse())
    original.register_buffer("conjugate", torch.tensor([1 + 2j]).conj())
    original.register_parameter("nowhere", nn.Parameter(torch.empty(2, device="meta")))
    original.register_parameter("lazy", nn.UninitializedParameter())
    original.lstm = nn.LSTM(2, 2)
    parametrize.register_parametrization(original.linear, "bias", nn.Tanh())
    twin = faithful_copy(original)
    assert twin.sparse.to_dense().equal(torch.eye(2))
    assert twin.sparse is not original.sparse
    assert twin.conjugate.equal(original.conjugate)
    assert twin.nowhere.is_meta
    assert type(twin.lazy) is nn.UninitializedParameter
    assert twin.lstm._flat_weights[0] is twin.lstm.weight_ih_l0
    assert twin.lstm(torch.ones(1, 2))[0].equal(original.lstm(torch.ones(1, 2))[0])
    assert twin.linear.bias.equal(original.linear.bias)
    assert twin.linear.parametrizations.bias.original is not original.linear.parametrizations.bias.original


def test_a_compiled_call_is_not_copied() -> None:
    original = functional()
    original.compile(backend="eager")
    assert "_compiled_call_impl" in vars(original)
    assert "_compiled_call_impl" not in vars(faithful_copy(original))


def test_fake_tensors() -> None:
    with FakeTensorMode():
        original: Any = torch.fx.symbolic_trace(nn.Linear(2, 3))
    twin = faithful_copy(original)
    assert isinstance(twin.weight.data, FakeTensor)
    assert twin.weight is not original.weight


def test_a_parametrized_root() -> None:
    original = functional()
    parametrize.register_parametrization(original, "weight", nn.Tanh())
    x = torch.ones(1, 3)
    twin = faithful_copy(original)
    assert same(twin(x), original(x))
    twin.graph.output_node().args = (None,)
    twin.recompile()
    assert twin(x) is None
    assert original(x) is not None


def test_hooks_of_tensors_are_copied_and_then_each_has_its_own() -> None:
    original, heard = traced(), list[torch.Tensor]()
    original.linear.weight.register_hook(lambda gradient: gradient * 0)
    original.linear.bias.register_post_accumulate_grad_hook(heard.append)
    twin = faithful_copy(original)
    twin(torch.ones(2, 3)).sum().backward()
    assert not twin.linear.weight.grad.any()
    assert heard[0] is twin.linear.bias
    twin.linear.weight.register_hook(lambda gradient: gradient)
    assert len(original.linear.weight._backward_hooks) == 1


def test_what_cannot_be_copied_is_named() -> None:
    original = traced()
    original.linear.register_buffer("derived", original.linear.weight * 2)
    with pytest.raises(FxoptError, match=r"linear\.derived was computed while autograd recorded: detach it"):
        faithful_copy(original)
    del original.linear.derived
    original.linear.note = {"x": threading.Lock()}
    with pytest.raises(FxoptError, match=r"module 'linear' cannot be copied: .*lock"):
        faithful_copy(original)
    original.linear.note, original.mixed = None, [threading.Lock(), [3]]
    with pytest.raises(FxoptError, match=r"attribute 'mixed' cannot be copied: .*lock"):
        faithful_copy(original)


# exported graphs


@pytest.mark.parametrize("check_guards", [True, False])
def test_a_copy_of_an_exported_graph_refuses_what_the_original_refuses(check_guards: bool) -> None:
    original = exported(check_guards=check_guards)
    twin = faithful_copy(faithful_copy(original))
    assert twin.range_constraints == original.range_constraints
    for sizes in ((3, 3), (8, 8), (2, 2)):
        inputs = [torch.randn(size, 3) for size in sizes]
        assert twin(*inputs).equal(original(*inputs))
    for shapes in (((9, 3), (9, 3)), ((3, 3), (4, 3)), ((3, 4), (3, 4))):
        inputs = [torch.randn(shape) for shape in shapes]
        errors = []
        for graph_module in (original, twin):
            with pytest.raises((AssertionError, RuntimeError)) as caught:
                graph_module(*inputs)
            errors.append(str(caught.value))
        assert errors[0] == errors[1]
    with pytest.raises(ValueError, match="input tree spec"):
        twin(torch.ones(3, 3))


def test_a_copy_of_an_exported_graph_refuses_modes_in_its_own_name() -> None:
    original = exported()
    twin = faithful_copy(original)
    for name in ("train", "eval"):
        with pytest.raises(NotImplementedError):
            getattr(twin, name)()
        assert getattr(twin, name).__self__ is twin


def test_branches_are_copied() -> None:
    class Branch(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.cond(x.sum() > 0, lambda a: a + 1, lambda a: a - 1, (x,))

    original: Any = torch.export.export(Branch(), (torch.ones(3),), strict=False).module()
    twin = faithful_copy(original)
    assert not mutable_parts(twin) & mutable_parts(original)
    for x in (torch.ones(3), -torch.ones(3)):
        assert twin(x).equal(original(x))
