"""Models in a dtype that is slow on this processor, or that a pipeline's operators do not take: computed in float32.

transformers loads models in the dtype of their files. Without instructions for it, products may take a hundred times as
long.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxopt_core import Transformation, leaves, registry
from fxopt_rewrite import outside_inference_mode
from fxopt_tools import Inputs


class ComputeInFloat32(Transformation):
    """Leaves a graph as it is, and notes in the history that it was captured in float32.

    Args:
        stored: the dtype of the weights before.
    """

    preserves_computation = True

    def __init__(self, *, stored: str) -> None:
        self.stored = stored

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Return the graph module."""
        return graph_module


def slow_dtype(model: nn.Module, pipeline: object = None) -> ComputeInFloat32 | None:
    """Return the pass that notes the dtype of a model's weights, if a pipeline is slow on that dtype; else None.

    For pipelines that narrow weights, it is every dtype but float32, the only one that their operators take.

    >>> slow_dtype(nn.Linear(2, 2))
    >>> slow_dtype(nn.Linear(2, 2).bfloat16(), "cpu-inference-bf16")
    ComputeInFloat32(stored='bfloat16')
    """
    tensors = [tensor for tensor in (*model.parameters(), *model.buffers()) if tensor.is_floating_point()]
    if isinstance(model, GraphModule) or not all(tensor.is_cpu for tensor in tensors):
        return None
    native = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    for dtype in {tensor.dtype for tensor in tensors} & native.keys():
        if not native[dtype]() or narrows(pipeline):
            return ComputeInFloat32(stored=str(dtype).removeprefix("torch."))
    return None


def narrows(pipeline: object) -> bool:
    """Return whether one of the passes of a pipeline, given as text or as a pass, rounds weights.

    >>> narrows("cpu-inference-int8"), narrows("cpu-inference"), narrows(None)
    (True, False, False)
    """
    made = registry().pipeline(pipeline) if isinstance(pipeline, str) else pipeline
    return isinstance(made, Transformation) and any(each.promised_sqnr is not None for each in leaves(made))


def in_float32(call: Inputs) -> Inputs:
    """Return a call with its floating-point tensors in float32."""
    args, kwargs = pytree.tree_map_only(
        Tensor, lambda each: each.float() if each.is_floating_point() else each, (call.args, dict(call.kwargs))
    )
    return Inputs(*args, **kwargs)


def computed_in_float32(model: nn.Module, stored: torch.dtype, examples: Sequence[Inputs]) -> nn.Module:
    """Return a copy of a model that computes in float32; inputs and results keep the dtypes of the model.

    >>> model = nn.Linear(2, 3).half()
    >>> computed_in_float32(model, torch.float16, [Inputs(x := torch.ones(1, 2).half())])(x).dtype
    torch.float16
    """

    def widened(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype is stored else tensor

    found: list[tuple[pytree.TreeSpec, list[torch.dtype | None]]] = []
    with outside_inference_mode(), torch.no_grad(), torch.random.fork_rng(devices=[]):
        for example in examples:
            args, kwargs = pytree.tree_map_only(Tensor, torch.clone, (example.args, dict(example.kwargs)))
            # a copy, which may note what it is given
            leaves, structure = pytree.tree_flatten(copy.deepcopy(model)(*args, **kwargs))
            found.append((structure, [leaf.dtype if isinstance(leaf, Tensor) else None for leaf in leaves]))
        wide: nn.Module = copy.deepcopy(model)
        wide._apply(widened)  # type: ignore[no-untyped-call]  # of torch
    kind: Any = type(model)

    @functools.wraps(kind.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = pytree.tree_map_only(Tensor, widened, (args, kwargs))
        values, structure = pytree.tree_flatten(kind.forward(self, *args, **kwargs))
        dtypes = next(dtypes for known, dtypes in found if known == structure)
        narrow = [value if dtype is None else value.to(dtype) for value, dtype in zip(values, dtypes, strict=True)]
        return pytree.tree_unflatten(narrow, structure)

    # In a class: as an attribute of the object, the function would be bound to this object in its copies, too.
    wide.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return wide
