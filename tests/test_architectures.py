"""The named architectures: captured, the same as the model, merged, folded and undone."""

from __future__ import annotations

import copy
import importlib
import inspect
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, Architecture, Inputs
from nightly import mostly_nightly
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxopt_capture import capture
from fxopt_core import iter_nodes, registry, undo

aten = torch.ops.aten
OTHER_SIZES = ((3, 8), (2, 11), (4, 13), (1, 6))  # another batch, another length, both, a batch of one


@pytest.fixture
def library(request: pytest.FixtureRequest, architecture: Architecture) -> ModuleType | None:
    """The library that the architecture comes from, or a skip where it is not installed."""
    if architecture.library == "timm":
        found: ModuleType = request.getfixturevalue("timm")
        return found
    if architecture.library is None:
        return None
    pytest.importorskip("transformers", minversion="5")
    return importlib.import_module("transformers")


def named(architecture: Architecture) -> str:
    """Its name."""
    return architecture.name


@pytest.mark.parametrize(
    "architecture",
    mostly_nightly(
        ARCHITECTURES,
        ["BERT", "Llama", "Mixtral", "T5", "CLIP", "timm ResNet-18", "plain: attention"],
        named,
    ),
)
def test_architecture(architecture: Architecture, library: ModuleType | None) -> None:
    """Captured, equal at five sizes, merged, undone exactly and folded, with the caller's model left as it was."""
    model = architecture.build(library)
    example = architecture.example(2, 8)
    program = exported(model, example)
    state = state_of(model)  # only now: torch.export replaces some attributes by copies
    captured = capture(model, kwargs=example, dynamic_shapes=None if library else dynamic_shapes(example))
    assert_same_state(captured, model)
    error = max(largest_error(captured, model, architecture.example(*size)) for size in ((2, 8), *OTHER_SIZES))
    assert error <= 1e-6
    assert not is_exact(program, model, example) or largest_error(captured, model, example) == 0
    positional_calls_are_the_same(captured, model, example)

    nodes = list(iter_nodes(program.graph))
    merge_and_undo(captured, model, Found.groups(nodes), example)
    fold(captured, model, Found.folds(nodes), example)
    assert_unchanged(model, state)


@pytest.mark.parametrize(
    "architecture",
    mostly_nightly((each for each in ARCHITECTURES if "sdpa" in each.attentions), ["BERT", "Whisper"], named),
)
def test_eager_attention(architecture: Architecture, library: ModuleType | None) -> None:
    """The other implementation of attention is captured as well."""
    check_at_two_sizes(architecture, architecture.build(library, "eager"))


HALVES = ("BERT", "DeBERTa-v2", "GPT-2", "Llama", "Gemma 2", "Mixtral", "T5", "ResNet", "CLIP", "Whisper")


@pytest.mark.parametrize(
    "architecture",
    mostly_nightly((each for each in ARCHITECTURES if each.name in HALVES), ["Gemma 2"], named),
)
def test_bfloat16(architecture: Architecture, library: ModuleType | None) -> None:
    """Models in half the precision are captured bit for bit."""
    check_at_two_sizes(architecture, architecture.build(library).to(torch.bfloat16), torch.bfloat16)


def check_at_two_sizes(architecture: Architecture, model: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    """Capture the model at one size, compare at that one and at another, and merge."""
    example, other = (in_dtype(architecture.example(*size), dtype) for size in ((2, 8), (3, 11)))
    captured = capture(model, kwargs=example, dynamic_shapes=None if architecture.library else dynamic_shapes(example))
    assert_same_state(captured, model)
    assert max(largest_error(captured, model, inputs) for inputs in (example, other)) <= 1e-6
    before = table_of(captured)
    undo(registry().pipeline("merge-linears")(captured))
    assert table_of(captured) == before


def in_dtype(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs with another floating-point dtype."""
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


def exported(model: nn.Module, example: Inputs) -> ExportedProgram:
    """Export the model by torch alone, which knows no caches, with the dynamic sizes of a capture."""
    shapes = dynamic_shapes(example)
    kwargs: dict[str, Any] = dict(example)
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs["use_cache"], shapes["use_cache"] = False, None
    return torch.export.export(model, (), kwargs, dynamic_shapes=shapes, strict=False)


def dynamic_shapes(example: Inputs) -> dict[str, Any]:
    """The batch, and for sequences the length."""
    sequences = ("input_ids", "mask", "sequence")
    return {name: dict.fromkeys(range(1 + name.endswith(sequences)), Dim.AUTO) for name in example}


def run(module: nn.Module, inputs: Inputs, **constants: object) -> Any:
    """Call a module without recording gradients."""
    with torch.no_grad():
        return module(**inputs, **constants)


def largest_error(captured: nn.Module, model: nn.Module, inputs: Inputs) -> float:
    """The largest difference between the outputs, relative to the largest value of each; their types are the same."""
    found, expected = run(captured, inputs), run(model, inputs)
    assert type(found) is type(expected)
    assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    pairs = zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True)
    return max(relative_difference(left, right) for left, right in pairs)


def relative_difference(found: object, expected: object) -> float:
    """How far two values are apart, relative to the largest entry."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        return 0.0 if found == expected else float("inf")
    assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
    if torch.equal(found, expected):
        return 0.0
    return float((found.double() - expected.double()).abs().max() / expected.double().abs().max())


def is_exact(program: ExportedProgram, model: nn.Module, inputs: Inputs) -> bool:
    """Whether the program of torch.export itself gives the model's outputs bit for bit."""
    constants = {"use_cache": False} if "use_cache" in program.call_spec.in_spec.children()[1].context else {}
    pairs = zip(
        pytree.tree_leaves(run(program.module(), inputs, **constants)),
        pytree.tree_leaves(run(model, inputs, **constants)),
        strict=True,
    )
    return all(relative_difference(left, right) == 0 for left, right in pairs)


def positional_calls_are_the_same(captured: nn.Module, model: nn.Module, inputs: Inputs) -> None:
    """Give the first input by its position and the rest by name."""
    first, *rest = inputs
    with torch.no_grad():
        found, expected = (
            module(inputs[first], **{name: inputs[name] for name in rest}) for module in (captured, model)
        )
    assert max(map(relative_difference, tensors(found), tensors(expected))) <= 1e-6


def tensors(output: object) -> list[Tensor]:
    """The tensors of an output."""
    return [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]


@dataclass(frozen=True)
class State:
    """What must not change about a model: tensors with their values and versions, modules, flags, configuration."""

    values: dict[str, Tensor]
    identities: dict[str, tuple[int, int, bool]]
    modules: dict[str, tuple[int, bool, dict[str, list[object]]]]
    configuration: object


def state_of(model: nn.Module) -> State:
    """The state of a model."""
    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    configuration = getattr(model, "config", None)
    return State(
        {name: tensor.detach().clone() for name, tensor in named.items()},
        {name: (id(tensor), tensor._version, tensor.requires_grad) for name, tensor in named.items()},
        {name: (id(module), module.training, attributes_of(module)) for name, module in model.named_modules()},
        copy.deepcopy(vars(configuration)) if configuration is not None else None,
    )


def attributes_of(module: nn.Module) -> dict[str, list[object]]:
    """A module's attributes, with what those hold that are dictionaries: hooks, submodules, parameters."""
    values = vars(module)
    return {
        name: [(key, id(value)) for key, value in values[name].items()] if isinstance(values[name], dict) else []
        for name in sorted(values)
    }


def assert_unchanged(model: nn.Module, before: State) -> None:
    """The model is what it was."""
    after = state_of(model)
    assert (after.identities, after.modules) == (before.identities, before.modules)
    assert all(torch.equal(after.values[name], value) for name, value in before.values.items())
    if before.configuration is not None:
        assert vars(model)["config"].to_dict() is not None
        assert repr(after.configuration) == repr(before.configuration)


def assert_same_state(captured: nn.Module, model: nn.Module) -> None:
    """The keys in their order, the very tensors, their ties, and which buffers are not saved."""
    assert list(captured.state_dict()) == list(model.state_dict())
    for kind in ("named_parameters", "named_buffers"):
        found, expected = (dict(getattr(module, kind)(remove_duplicate=False)) for module in (captured, model))
        assert all(found[name] is tensor for name, tensor in expected.items())
    persistent = set(model.state_dict())
    unsaved = {name for name, _ in model.named_buffers() if name not in persistent}
    assert unsaved <= {name for name, _ in captured.named_buffers()}
    assert not unsaved & set(captured.state_dict())


class Found:
    """What passes have to find, counted in the graph of torch.export by its operators alone."""

    @staticmethod
    def groups(nodes: Iterable[Node]) -> list[int]:
        """Sizes of the groups of linear operators on one value."""
        users = Counter(node.args[0] for node in nodes if node.target is aten.linear.default)
        return [size for size in users.values() if size > 1]

    @staticmethod
    def folds(nodes: Iterable[Node]) -> int:
        """How many batch norms follow a convolution whose result nothing else reads."""
        norms = [node for node in nodes if node.target is aten.batch_norm.default]
        sources = [node.all_input_nodes[0] for node in norms]
        return sum(is_convolution(source) and len(source.users) == 1 for source in sources)


def is_convolution(node: Node) -> bool:
    """Whether a node is a convolution in the graph of torch.export."""
    return node.target in (aten.conv2d.default, aten.conv2d.padding)


def layer_calls(graph_module: GraphModule, *kinds: type[nn.Module]) -> list[Node]:
    """The nodes that call layers, of these types if any are given."""
    calls = [node for node in iter_nodes(graph_module.graph) if node.op == "call_module"]
    modules = {node: graph_module.get_submodule(str(node.target)) for node in calls}
    return [node for node, module in modules.items() if (type(module) in kinds if kinds else node.name != "_guards_fn")]


def table_of(graph_module: GraphModule) -> list[tuple[object, ...]]:
    """A graph, node by node, by what can be compared."""
    return [
        (node.name, node.op, str(node.target), str(node.args), str(node.kwargs))
        for node in iter_nodes(graph_module.graph)
    ]


def merge_and_undo(captured: GraphModule, model: nn.Module, groups: list[int], example: Inputs) -> None:
    """Merge every group of linear layers on one value; undo it; keys, values and graph are as before."""
    before, keys = table_of(captured), list(captured.state_dict())
    linears = len(layer_calls(captured, nn.Linear))
    registry().pipeline("merge-linears")(captured)
    calls = layer_calls(captured, nn.Linear)
    assert len(calls) == linears - sum(groups) + len(groups)
    assert max(Counter(node.args[0] for node in calls).values(), default=1) == 1
    assert largest_error(captured, model, example) <= 1e-5
    undo(captured)
    assert table_of(captured) == before
    assert list(captured.state_dict()) == keys
    original = model.state_dict()
    assert all(torch.equal(value, original[name]) for name, value in captured.state_dict().items())


def fold(captured: GraphModule, model: nn.Module, pairs: int, example: Inputs) -> None:
    """Fold every batch norm after a convolution."""
    kinds = (nn.BatchNorm2d,)
    operators = [node for node in iter_nodes(captured.graph) if node.target is aten.batch_norm.default]
    norms = len(layer_calls(captured, *kinds)) + len(operators)
    registry().pipeline("fuse-batch-norm2d-in-conv2d")(captured)
    operators = [node for node in iter_nodes(captured.graph) if node.target is aten.batch_norm.default]
    assert len(layer_calls(captured, *kinds)) + len(operators) == norms - pairs
    assert largest_error(captured, model, example) <= 1e-4
