"""What packed modules share: the packed copy of a weight, and when a call may use it.

It is made on the first run, again whenever the weight changes, and is never saved or copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_cpu._torch import mkldnn_enabled
from fxopt_cpu.layers.epilogue import Activation, Norm, check_epilogue
from fxopt_cpu.layers.thawing import Layer
from fxopt_cpu.operators.onednn import why_unsupported
from fxopt_rewrite import (
    ConvolutionCall,
    Editor,
    GraphIndex,
    LinearCall,
    Piece,
    TensorRef,
    Watched,
    sharing_refusal,
    tensors_refusal,
)
from fxopt_rewrite.toolbox import runs_plainly

PlanT = TypeVar("PlanT")
_MOST_PLANS = 64
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Packing(Generic[PlanT]):
    """What a layer has prepared for its fast path: the packed weight, and a plan for each input shape.

    It belongs to one layer: a copy of the layer, by ``copy.deepcopy`` or by pickling, starts with an empty one.

    Attributes:
        plans: by input shape; None for shapes that torch has to compute.
        generation: how often `forget` was called.
    """

    __slots__ = ("_bias", "_made_of", "_packed", "generation", "plans")

    def __init__(self) -> None:
        self.generation = 0
        self.clear()

    def forget(self) -> None:
        """Drop everything, and invalidate whatever else was made from the layer."""
        self.generation += 1
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self.plans: dict[tuple[int, ...], PlanT | None] = {}
        self._made_of: Watched | None = None
        self._bias: tuple[Tensor | None, int] = (None, 0)
        self._packed: Tensor | None = None

    @property
    def is_empty(self) -> bool:
        """Whether there is no packed weight."""
        return self._packed is None

    def packed(self, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the packed copy of a weight; None if there is none, the weight has changed, or the bias is another."""
        former, place = self._bias  # its numbers are read at each call
        if self._made_of is None or former is not bias or (bias is not None and bias.data_ptr() != place):
            return None
        return self._packed if self._made_of.hold((weight,)) else None

    def keep(self, weight: Tensor, bias: Tensor | None, packed: Tensor) -> Tensor:
        """Keep the packed copy of a weight, and return it."""
        self._made_of, self._bias = Watched((weight,)), (bias, 0 if bias is None else bias.data_ptr())
        self._packed = packed
        return packed

    def forget_trained(self, weight: Tensor) -> None:
        """Drop everything if a weight trains: some optimizers change it without a new version."""
        if weight.requires_grad:
            self.forget()

    def plan(self, shape: tuple[int, ...], plan: PlanT | None) -> PlanT | None:
        """Keep the plan for a shape, and return it; drop all once there are too many."""
        if len(self.plans) >= _MOST_PLANS:
            self.plans.clear()
        self.plans[shape] = plan
        return plan

    def __copy__(self) -> Packing[PlanT]:
        """Return an empty one."""
        return Packing()

    def __deepcopy__(self, memo: dict[int, object]) -> Packing[PlanT]:
        """Return an empty one."""
        return Packing()

    def __reduce__(self) -> tuple[type[Packing[PlanT]], tuple[()]]:
        """Pickle as an empty one."""
        return Packing, ()


class PackedLayer(Layer):
    """A layer with plain parameters ``weight`` and ``bias``, and what it has prepared for its fast path.

    That is in a slot, not in ``__dict__``, so that nothing that reads, copies or saves a module's attributes sees it.
    """

    __slots__ = ("_packing",)

    weight: nn.Parameter
    bias: nn.Parameter | None
    _packing: Packing[Any]

    def __init__(
        self, shape: Sequence[int], activation: tuple[Any, ...], *, bias: bool, device: Any, dtype: Any
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
        own_bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", own_bias)
        self._activation: tuple[Any, ...] = tuple(Activation(*activation))  # plain data, as archives write it

    def check_attributes(self) -> None:
        """Raise a ValueError where a file has set what no operator takes."""
        check_epilogue(self.activation, Norm())

    @property
    def packing(self) -> Packing[Any]:
        """What this layer has prepared; empty at first."""
        try:
            return self._packing
        except AttributeError:
            self._packing = Packing()
            return self._packing

    @property
    def activation(self) -> Activation:
        """The activation of the result."""
        return Activation(*self._activation)

    def forget_derived(self) -> None:
        """Drop the packed copy, and what else was made of the weight; the next call makes it again."""
        self.packing.forget()

    def by_torch(self) -> Callable[..., Tensor]:
        """Return a function that computes the same with torch's own, the current weights as constants."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes alone, to be copied and saved."""
        return dict(vars(self))

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLayer:
        """Drop the packed copy when parameters are converted or moved."""
        self.forget_derived()
        applied: PackedLayer = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        return applied


def packing_refusal(call: ConvolutionCall | LinearCall, kind: str, index: GraphIndex) -> Refusal | None:
    """Refuse to pack what oneDNN cannot compute, and shared, tied or mutated tensors."""
    unsupported = why_unsupported(call.weight.tensor.dtype, call.weight.tensor.device)
    if unsupported is not None:
        return index.refuse(call.label, unsupported[0], f"{kind} `{call.label}` {unsupported[1]}", call.node)
    return tensors_refusal(call, index) or sharing_refusal(call, [call.node], index)


def insert_packed(
    edit: Editor,
    module: PackedLayer,
    call: ConvolutionCall | LinearCall,
    nodes: Sequence[Node],
    inputs: Sequence[Node],
    before: Node,
) -> None:
    """Give a packed layer the parameters of a call, and call it in place of these nodes, that call among them."""
    refs = {key: ref for key, ref in (("weight", call.weight), ("bias", call.bias)) if ref is not None}
    for key, ref in refs.items():
        module.register_parameter(key, _as_parameter(ref))
    full = call.module_name or call.weight.name
    name = edit.add_module(full, f"{full.rpartition('.')[2]}_packed", module.train(call.training))
    packed = edit.call_module(name, *inputs, before=before, like=nodes[::-1])
    *between, last = nodes
    edit.replace(last, packed)
    for node in reversed(between):
        edit.erase(node)
    pieces: dict[str, Piece | None] = {ref.key: Piece(f"{name}.{key}") for key, ref in refs.items()}
    edit.drop(call, pieces, twin=name)
    for node in nodes:
        if node is not call.node and node.op == "call_module":
            edit.drop_unused(node)


def _as_parameter(ref: TensorRef) -> nn.Parameter:
    """Return the parameter of a layer for its packed form, without a copy.

    One made in inference mode, by a fold say, is copied: it has no version, so that changes would go unnoticed.
    """
    assert isinstance(ref.tensor, nn.Parameter)  # the readers of layers accept nothing else
    if not ref.tensor.is_inference():
        return ref.tensor
    with torch.inference_mode(False), torch.no_grad():
        return nn.Parameter(ref.tensor.clone(), requires_grad=ref.tensor.requires_grad)


def bias_fits(bias: Tensor | None, weight: Tensor) -> bool:
    """Return whether a bias is safe for the operators, which do not check its size."""
    if bias is None:
        return True
    return bias.shape == weight.shape[:1] and bias.dtype == weight.dtype and bias.is_cpu and bias.is_contiguous()


def runs_by_onednn() -> bool:
    """Return whether operators called now just run, and by oneDNN."""
    return runs_plainly() and mkldnn_enabled()
