"""The packed copy of a weight: made on the first run, made anew when the weight changes, and never saved or copied."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from fxopt_core import TensorRef
from fxopt_onednn.activations import Activation, Unary

PlanT = TypeVar("PlanT")
_MOST_PLANS = 64


class Packing(Generic[PlanT]):
    """What a layer has prepared for its fast way: the packed weight, and a plan for each shape of input.

    It belongs to one layer: a copy of the layer, by ``copy.deepcopy`` or by pickling, starts with an empty one.

    Attributes:
        plans: by shape; None where a shape has to go the plain way.
        generation: how often that was asked for, `forget`.
    """

    __slots__ = ("_bias", "_packed", "_place", "_version", "_weight", "generation", "plans")

    def __init__(self) -> None:
        self.generation = 0
        self.clear()

    def forget(self) -> None:
        """Let go of everything, and let what was made from the layer besides be made anew."""
        self.generation += 1
        self.clear()

    def clear(self) -> None:
        """Let go of everything here."""
        self.plans: dict[tuple[int, ...], PlanT | None] = {}
        self._weight: Callable[[], Tensor | None] = lambda: None
        self._bias: Callable[[], Tensor | None] = lambda: None
        self._version = -1
        self._place: tuple[int, tuple[int, ...]] = (-1, ())
        self._packed: Tensor | None = None

    def packed(self, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the packed copy of a weight; None where there is none, or where weight or bias is another one now."""
        if self._weight() is not weight or self._bias() is not bias:
            return None
        if self._version == weight._version and self._place == (weight.data_ptr(), weight.stride()):
            return self._packed
        return None

    def keep(self, weight: Tensor, bias: Tensor | None, packed: Tensor) -> Tensor:
        """Keep the packed copy of a weight, and return it."""
        self._bias = (lambda: None) if bias is None else weakref.ref(bias)
        self._weight, self._version = weakref.ref(weight), weight._version
        self._place = weight.data_ptr(), weight.stride()
        self._packed = packed
        return packed

    def forget_trained(self, weight: Tensor) -> None:
        """Let go of everything where a weight is differentiated: some optimizers change it without a trace."""
        if weight.requires_grad:
            self.forget()

    def plan(self, shape: tuple[int, ...], plan: PlanT | None) -> PlanT | None:
        """Keep the plan for a shape, and return it; the oldest ones are dropped where shapes never repeat."""
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


class PackedLayer(nn.Module):
    """A layer with plain parameters ``weight`` and ``bias``, and what it has prepared for its fast way.

    What is prepared stands in a slot, not among the attributes: whatever reads, copies or saves the attributes of a
    module does without it.
    """

    __slots__ = ("_packing",)

    weight: nn.Parameter
    bias: nn.Parameter | None
    _packing: Packing[Any]
    _unary: Unary

    @property
    def packing(self) -> Packing[Any]:
        """What this layer has prepared; nothing at first."""
        try:
            return self._packing
        except AttributeError:
            self._packing = Packing()
            return self._packing

    @property
    def activation(self) -> Activation:
        """What is applied at the end."""
        return Activation(*self._unary)

    def by_torch(self) -> Callable[..., Tensor]:
        """Return what computes the same by torch's own functions, with the present weights as constants."""
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes, which is all that is copied and saved."""
        return dict(vars(self))

    def _apply(self, fn: Any, recurse: bool = True) -> PackedLayer:
        """Let go of the packed copy where the parameters are converted or moved."""
        self.packing.forget()
        applied: PackedLayer = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # so it is in torch
        return applied


def as_parameter(ref: TensorRef) -> nn.Parameter:
    """Return the parameter that a layer has, which its packed form takes over: no memory, and no copy, is needed.

    One that was made in inference mode, by a fold say, is copied: it could not be watched for changes.
    """
    assert isinstance(ref.tensor, nn.Parameter)  # the readers of layers let nothing else through
    if not ref.tensor.is_inference():
        return ref.tensor
    with torch.inference_mode(False), torch.no_grad():
        return nn.Parameter(ref.tensor.clone(), requires_grad=ref.tensor.requires_grad)


def goes_with(bias: Tensor | None, weight: Tensor) -> bool:
    """Return whether the operators may read a bias beside a weight: they do not look at its size themselves."""
    if bias is None:
        return True
    return bias.shape == weight.shape[:1] and bias.dtype == weight.dtype and bias.is_cpu and bias.is_contiguous()
