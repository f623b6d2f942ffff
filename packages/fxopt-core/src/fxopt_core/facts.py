"""What is known of a node's value: shape, dtype, device, strides, and whether it is a number or a tensor.

Facts come from ``node.meta["val"]`` (as ``torch.export`` and `infer_shapes` leave it) or ``node.meta["tensor_meta"]``
(as torch's ``ShapeProp`` does). Nothing is guessed, and reading them adds no guard to symbolic sizes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.passes.shape_prop import TensorMetadata

from fxopt_core.shape_inference import infer_shapes
from fxopt_core.value_kinds import Kind, kind_of
from fxopt_core.values import expression

__all__ = ["TensorFacts", "infer_shapes", "is_python_number", "same_size", "tensor_facts"]


@dataclass(frozen=True)
class TensorFacts:
    """What is known of a tensor.

    Attributes:
        shape: its sizes; symbolic where they vary.
        dtype: its dtype.
        device: its device; None where it is not known.
        stride: its strides; None where it has none or they are not known.
        proven: whether a plain integer in ``shape`` holds for every input that the graph takes, as in a graph of
            ``torch.export``, and not only for the example that shapes were inferred from.
    """

    shape: tuple[int | SymInt, ...]
    dtype: torch.dtype
    device: torch.device | None = None
    stride: tuple[int | SymInt, ...] | None = None
    proven: bool = False

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)


def tensor_facts(node: Node, like: Tensor | None = None) -> TensorFacts | None:
    """Return what is known of the tensor that a node gives, or None.

    Args:
        node: the node.
        like: a tensor of the same dtype and device, as a parameter of the call that takes or makes the value: facts
            that contradict it are out of date, after ``graph_module.half()`` say, and count as unknown. The device
            ``meta`` contradicts no other.

    >>> graph_module = infer_shapes(torch.fx.symbolic_trace(torch.nn.Linear(4, 2)), torch.zeros(3, 4))
    >>> facts = tensor_facts(list(graph_module.graph.nodes)[-1].args[0])
    >>> facts.shape, facts.rank, facts.dtype
    ((3, 2), 2, torch.float32)
    """
    for facts in (_facts_of_value(node.meta.get("val")), _facts_of_metadata(node.meta.get("tensor_meta"))):
        if facts is not None and (like is None or _agrees(facts, like)):
            return facts
    return None


def _facts_of_value(value: object) -> TensorFacts | None:
    if not isinstance(value, Tensor):
        return None
    stride = tuple(value.stride()) if value.layout == torch.strided else None
    proven = isinstance(value, FakeTensor) and value.fake_mode.shape_env is not None
    return TensorFacts(tuple(value.shape), value.dtype, value.device, stride, proven)


def _facts_of_metadata(described: object) -> TensorFacts | None:
    if not isinstance(described, TensorMetadata):
        return None
    return TensorFacts(tuple(described.shape), described.dtype, None, tuple(described.stride))


def _agrees(facts: TensorFacts, like: Tensor) -> bool:
    return facts.dtype == like.dtype and (facts.device is None or _same_device(facts.device, like.device))


def _same_device(one: torch.device, other: torch.device) -> bool:
    if "meta" in {one.type, other.type}:
        return True
    return one.type == other.type and (one.index == other.index or None in {one.index, other.index})


_IS_NUMBER = {Kind.NUMBER: True, Kind.TENSOR: False}


def is_python_number(node: Node) -> bool | None:
    """Return whether a node gives a Python number: True, False where it gives a tensor, None where that is not known.

    Known by ``node.meta``, or else by what made the value: sizes, ``len``, ``item()`` and arithmetic on numbers alone
    are numbers; parameters and what modules and functions of torch return are tensors.

    >>> from fxopt_core import iter_nodes
    >>> graph_module = torch.fx.symbolic_trace(lambda x: torch.relu(x) / (x.shape[0] // 2))
    >>> [is_python_number(node) for node in iter_nodes(graph_module.graph) if node.op == "call_function"]
    [False, None, True, True, False]
    """
    return _IS_NUMBER.get(kind_of(node))


def same_size(a: int | SymInt, b: int | SymInt) -> bool:
    """Return whether two sizes are known to be the same, without adding a guard.

    Symbolic sizes are the same if their expressions are: two symbols count as different even where both are 8 just now.

    >>> same_size(8, 8), same_size(8, 9)
    (True, False)
    """
    return a is b or bool(expression(a) == expression(b))
