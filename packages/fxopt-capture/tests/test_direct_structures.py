"""Calls that go straight to the operators take and return containers of all kinds as the long way does."""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from direct_watching import functions_called, goes_directly, outcome, the_long_way
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxopt_capture import capture

X = torch.randn(5, 4)


class Pair(NamedTuple):
    """A named tuple."""

    left: Tensor
    right: Any


@dataclasses.dataclass
class Record:
    """A dataclass."""

    value: Tensor
    more: list[Tensor] | None = None


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x + 1,
    "tuple": lambda x: (x + 1, x * 2),
    "list of one": lambda x: [x + 1],
    "dictionary": lambda x: {"b": x + 1, "a": {0: x * 2, 1: None}},
    "ordered": lambda x: OrderedDict(b=x + 1, a=x * 2),
    "default": lambda x: defaultdict(list, {"k": [x * 3]}),
    "named tuple": lambda x: Pair(x, (x * 2,)),
    "dataclass": lambda x: Record(x + 1, [x]),
    "nothing": lambda x: (None, x, (), {}),
    "sizes": lambda x: (x.shape, x.shape[0], 3, "text"),
    "itself": lambda x: x,
}


class Returning(nn.Module):
    """Returns its outputs in some structure."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Any:
        return OUTPUTS[self.name](x)


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_of_the_models_own_types(name: str) -> None:
    captured, expected = capture(Returning(name), torch.randn(2, 3)), OUTPUTS[name](X[:, :3])
    assert goes_directly(captured, X[:, :3])
    for found in (captured(X[:, :3]), the_long_way(captured)(X[:, :3])):
        assert type(found) is type(expected) and repr(found) == repr(expected)
        assert getattr(found, "keys", tuple)() == getattr(expected, "keys", tuple)()


class Total(nn.Module):
    """Computes with all tensors in a container."""

    def forward(self, x: Tensor, values: Any) -> Tensor:
        return x + sum(leaf * 2 for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor))


def one() -> Tensor:
    """Return a tensor; not the same one twice, as torch.export would take them for one."""
    return torch.randn(3)


INPUTS: dict[str, Callable[[], Any]] = {
    "list": lambda: [one(), (one(), [])],
    "dictionary": lambda: {"b": one(), "a": {1: one()}},
    "ordered": lambda: OrderedDict(b=one(), a=[one()]),
    "default": lambda: defaultdict(list, {"k": [one()]}),
    "named tuple": lambda: Pair(one(), (one(), one())),
    "dataclass": lambda: Record(one(), [one()]),
    "dataclass with nothing": lambda: [Record(one(), None), one()],
}


@pytest.mark.parametrize("name", INPUTS)
def test_containers_are_taken_as_at_capture(name: str) -> None:
    captured = capture(Total(), (torch.randn(3), INPUTS[name]()))
    slow = the_long_way(captured)
    right = INPUTS[name]()
    assert goes_directly(captured, one(), right)
    assert torch.equal(captured(X[0, :3], right), Total()(X[0, :3], right))
    for make in INPUTS.values():
        for value in (make(), [make()], pytree.tree_map(lambda leaf: leaf.double(), make())):
            found, expected = (outcome(graph_module, (X[0, :3], value), {}) for graph_module in (captured, slow))
            assert type(found) is type(expected)
            same = isinstance(found, Tensor) and isinstance(expected, Tensor) and torch.equal(found, expected)
            assert same or found == expected


def test_a_container_that_changes_between_calls() -> None:
    captured = capture(Total(), (torch.randn(3), {"a": one(), "b": [one()]}))
    value: dict[str, Any] = {"a": one(), "b": [one()]}
    assert goes_directly(captured, one(), value)
    value["b"].append(one())
    assert "is a list of 2" in str(outcome(captured, (one(), value), {}))
    value["b"].pop()
    value["a"] = value.pop("a")
    assert "with the keys ['b', 'a']" in str(outcome(captured, (one(), value), {}))


def test_caches(transformers: ModuleType) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, vocab_size=9)).eval()
    prompt = torch.randint(0, 9, (2, 6))
    with torch.no_grad():
        prefill = capture(model, (prompt,))
        cache = prefill(prompt).past_key_values
        step = capture(model, (prompt[:, :1],), {"past_key_values": cache})
        assert goes_directly(prefill, prompt)
        ours, theirs = copy.deepcopy(cache), copy.deepcopy(cache)
        assert goes_directly(step, prompt[:, :1], past_key_values=ours)
        for _ in range(ours.get_seq_length() - theirs.get_seq_length()):
            model(prompt[:, :1], past_key_values=theirs)
        for _ in range(2):
            found = step(prompt[:, :1], past_key_values=ours)
            expected = model(prompt[:, :1], past_key_values=theirs)
            assert found.past_key_values is ours and type(found) is type(expected)
            torch.testing.assert_close(found.logits, expected.logits)
        assert ours.get_seq_length() == theirs.get_seq_length()


@pytest.mark.parametrize("kind", ["Bert", "Llama"])
def test_python_functions_of_a_call(transformers: ModuleType, kind: str) -> None:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 16, "num_hidden_layers": 2}
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**sizes, vocab_size=9)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    given = {"input_ids": torch.randint(0, 9, (2, 6)), "attention_mask": torch.ones(2, 6, dtype=torch.int64)}
    with torch.no_grad():
        captured = capture(model, kwargs=given)
        assert goes_directly(captured, **given)
        slow = the_long_way(captured)
        calls = [partial(module, **given) for module in (captured, slow, model)]
        direct, long, eager = (len(functions_called(call)) for call in calls)
    assert direct < eager and direct < 0.6 * long
