"""What is known of a node's value: shape, dtype, device, strides, and whether it is a number or a tensor.

Facts come from ``node.meta["val"]``, which ``torch.export`` and `infer_shapes` set, or ``node.meta["tensor_meta"]``,
which torch's ``ShapeProp`` sets. Nothing is guessed, and reading facts adds no guard to symbolic sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import SymInt, Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.passes.shape_prop import TensorMetadata

from fxopt_rewrite.shapes.kinds import Kind, kind_of
from fxopt_rewrite.shapes.meta import expression


@dataclass(frozen=True)
class TensorFacts:
    """What is known of a tensor.

    Attributes:
        shape: its sizes; symbolic where they vary.
        dtype: its dtype.
        device: its device, if known.
        stride: its strides, if it has any and they are known.
        proven: whether a plain integer in ``shape`` holds for every input of the graph, as ``torch.export`` proves it,
            and not only for the example from which shapes were inferred.
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
    """Return what is known of the tensor that a node returns, or None.

    Args:
        node: the node.
        like: a tensor with the dtype and device of the value, such as a parameter of its call: facts that contradict it
            are out of date, for example after ``graph_module.half()``, and count as unknown. The device ``meta``
            contradicts no other.

    >>> from fxopt_rewrite import infer_shapes
    >>> graph_module = infer_shapes(torch.fx.symbolic_trace(torch.nn.Linear(4, 2)), torch.zeros(3, 4))
    >>> facts = tensor_facts(list(graph_module.graph.nodes)[-1].args[0])
    >>> facts.shape, facts.rank, facts.dtype
    ((3, 2), 2, torch.float32)
    """
    for described in (node.meta.get("val"), node.meta.get("tensor_meta")):
        facts = _facts_of(described)
        if facts is not None and (like is None or _agrees(facts, like)):
            return facts
    return None


def _facts_of(described: object) -> TensorFacts | None:
    """Return the facts in a tensor, or in torch's description of one."""
    if isinstance(described, Tensor):
        stride = tuple(described.stride()) if described.layout == torch.strided else None
        # torch.export makes fake tensors with an environment of symbolic shapes; those of a plain example have none.
        proven = isinstance(described, FakeTensor) and described.fake_mode.shape_env is not None
        return TensorFacts(tuple(described.shape), described.dtype, described.device, stride, proven)
    if isinstance(described, TensorMetadata):
        return TensorFacts(tuple(described.shape), described.dtype, None, tuple(described.stride))
    return None


def _agrees(facts: TensorFacts, like: Tensor) -> bool:
    one, other = facts.device, like.device
    if one is None or "meta" in {one.type, other.type}:
        return facts.dtype == like.dtype
    same_device = one.type == other.type and (one.index == other.index or None in {one.index, other.index})
    return same_device and facts.dtype == like.dtype


def is_python_number(node: Node) -> bool | None:
    """Return True for a node that returns a Python number, False for one that returns a tensor, None if unknown.

    It follows from ``node.meta``, or else from the call: sizes, ``len``, ``item()`` and arithmetic on numbers only are
    numbers; parameters and results of torch's modules and functions are tensors.

    >>> from fxopt_core import iter_nodes
    >>> graph_module = torch.fx.symbolic_trace(lambda x: torch.relu(x) / (x.shape[0] // 2))
    >>> [is_python_number(node) for node in iter_nodes(graph_module.graph) if node.op == "call_function"]
    [False, None, True, True, False]
    """
    return {Kind.NUMBER: True, Kind.TENSOR: False}.get(kind_of(node))


def same_size(a: int | SymInt, b: int | SymInt) -> bool:
    """Return whether two sizes are known to be equal, without adding a guard.

    Symbolic sizes are equal if their expressions are: two symbols differ even if both are 8 in the example.

    >>> same_size(8, 8), same_size(8, 9)
    (True, False)
    """
    return a is b or bool(expression(a) == expression(b))


def same_sizes(one: Sequence[int | SymInt], other: Sequence[int | SymInt]) -> bool:
    """Return whether two shapes are known to be equal, without adding a guard.

    Compare shapes by this and sizes by `same_size`, never by ``==``: torch guards a comparison of symbolic sizes, and
    raises where a size comes from a value of a tensor.

    >>> same_sizes((2, 8), [2, 8]), same_sizes((2, 8), (2, 8, 1))
    (True, False)
    """
    return len(one) == len(other) and all(map(same_size, one, other))
