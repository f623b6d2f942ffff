"""The named architectures: captured, the same as the model, merged, folded and undone."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, Architecture, Inputs
from nightly import mostly_nightly
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxopt_capture import capture
from fxopt_core import history, iter_nodes, registry, undo
from fxopt_simplify import FuseScaledDotProductAttention
from fxopt_testing.pictures import changes, picture, state_of

BATCH_NORM = torch.ops.aten.batch_norm.default
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
    mostly_nightly(ARCHITECTURES, ["BERT", "Mixtral", "CLIP", "timm ResNet-18", "plain: attention"], named),
)
def test_architecture(architecture: Architecture, library: ModuleType | None) -> None:
    """Captured, equal at five sizes, merged, undone exactly and folded, with the caller's model left as it was."""
    model = architecture.build(library)
    example = architecture.example(2, 8)
    state, configuration = state_of(model), configuration_of(model)
    captured = capture(model, kwargs=example, dynamic_shapes=None if library else dynamic_shapes(example))
    assert_same_state(captured, model)
    assert max(largest_error(captured, model, architecture.example(*size)) for size in ((2, 8), *OTHER_SIZES)) <= 1e-6
    merge_and_undo(captured, model, example)
    fold(captured, model, example)
    assert changes(state, state_of(model)) == []
    assert configuration_of(model) == configuration


OTHERWISE = ("Gemma 2", "Mixtral")  # one caps its scores, the other has a softmax in its routers, too
CHOICE = [each for each in ARCHITECTURES if "sdpa" in each.attentions or each.name == "T5"]
WRITTEN_OUT = [each for each in CHOICE if each.name not in OTHERWISE]


@pytest.mark.parametrize("architecture", mostly_nightly(WRITTEN_OUT, ["Llama", "T5"], named))
def test_eager_attention(architecture: Architecture, library: ModuleType | None) -> None:
    """The other implementation of attention is captured as well, and becomes torch's own."""
    model = architecture.build(library, "eager")
    captured = check_at_two_sizes(architecture, model)
    before = picture(captured)
    FuseScaledDotProductAttention()(captured, strict=True)
    assert history(captured)[-1].rewrites
    assert not [node for node in iter_nodes(captured.graph) if "softmax" in node.name or node.name == "clone"]
    assert max(largest_error(captured, model, architecture.example(*size)) for size in OTHER_SIZES[:2]) <= 1e-5
    undo(captured)
    assert changes(before, picture(captured)) == []


HALVES = ("BERT", "GPT-2", "Llama", "Gemma 2", "Mixtral", "T5", "ResNet", "CLIP", "Whisper")


@pytest.mark.parametrize(
    "architecture", mostly_nightly((each for each in ARCHITECTURES if each.name in HALVES), ["Gemma 2"], named)
)
def test_bfloat16(architecture: Architecture, library: ModuleType | None) -> None:
    """Models in half the precision are captured bit for bit."""
    check_at_two_sizes(architecture, architecture.build(library).to(torch.bfloat16), torch.bfloat16)


def check_at_two_sizes(architecture: Architecture, model: nn.Module, dtype: torch.dtype = torch.float32) -> GraphModule:
    """Capture the model at one size, compare at that one and at another, merge, undo, and return the graph module."""
    example, other = (in_dtype(architecture.example(*size), dtype) for size in ((2, 8), (3, 11)))
    captured = capture(model, kwargs=example)
    assert_same_state(captured, model)
    assert max(largest_error(captured, model, inputs) for inputs in (example, other)) <= 1e-6
    before = picture(captured)
    undo(registry().pipeline("merge-linears")(captured))
    assert changes(before, picture(captured)) == []
    return captured


def in_dtype(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Inputs with another floating-point dtype."""
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in inputs.items()}


def dynamic_shapes(example: Inputs) -> dict[str, Any]:
    """The batch, and for sequences the length."""
    sequences = ("input_ids", "mask", "sequence")
    return {name: dict.fromkeys(range(1 + name.endswith(sequences)), Dim.AUTO) for name in example}


def largest_error(captured: nn.Module, model: nn.Module, inputs: Inputs) -> float:
    """The largest difference between the outputs, relative to the largest value of each; their types are the same."""
    with torch.no_grad():
        found, expected = captured(**inputs), model(**inputs)
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


def configuration_of(model: nn.Module) -> str:
    """The configuration of a model, with all that it holds."""
    return repr(vars(model.config)) if hasattr(model, "config") else ""


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


def layer_calls(graph_module: GraphModule, kind: type[nn.Module]) -> list[Node]:
    """The nodes that call layers of a type."""
    calls = graph_module.graph.find_nodes(op="call_module")
    return [node for node in calls if type(graph_module.get_submodule(str(node.target))) is kind]


def merge_and_undo(captured: GraphModule, model: nn.Module, example: Inputs) -> None:
    """Merge every group of linear layers on one value; undo it; keys, values and graph are as before."""
    before = picture(captured)
    inputs = {node.args[0] for node in layer_calls(captured, nn.Linear)}
    registry().pipeline("merge-linears")(captured)
    calls = layer_calls(captured, nn.Linear)
    assert len(calls) == len(inputs)
    assert largest_error(captured, model, example) <= 1e-5
    undo(captured)
    assert changes(before, picture(captured)) == []


def fold(captured: GraphModule, model: nn.Module, example: Inputs) -> None:
    """Fold every batch norm after a convolution whose result nothing else reads."""
    norms = [*layer_calls(captured, nn.BatchNorm2d), *captured.graph.find_nodes(op="call_function", target=BATCH_NORM)]
    read_once = {node for node in layer_calls(captured, nn.Conv2d) if len(node.users) == 1}
    pairs = sum(node.args[0] in read_once for node in norms)
    registry().pipeline("fuse-batch-norm2d-in-conv2d")(captured, expect=pairs)
    assert largest_error(captured, model, example) <= 1e-4
