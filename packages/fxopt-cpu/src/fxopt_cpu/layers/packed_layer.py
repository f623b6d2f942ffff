"""The packed copy of a layer's weight, and when a call may use it.

The copy is made at the first call and after each change of the weight. It is never saved or copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fxopt_cpu._torch import mkldnn_enabled
from fxopt_cpu.layers.epilogue import Activation, Norm, check_epilogue
from fxopt_cpu.layers.thawing import Layer
from fxopt_rewrite import Watched, runs_plainly

_MOST_PLANS = 64
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Packing:
    """What a layer has prepared for its fast path: the packed weight, and a plan for each input shape.

    It belongs to one layer: a copy of the layer, by ``copy.deepcopy`` or by pickling, starts with an empty one.

    Attributes:
        plans: by input shape; None for shapes that torch has to compute.
    """

    __slots__ = ("_kept", "plans")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Drop everything."""
        self.plans: dict[tuple[int, ...], Any] = {}
        self._kept: tuple[Watched, Tensor | None, int, Tensor] | None = None  # one object, as other threads read it

    @property
    def is_empty(self) -> bool:
        """Whether there is no packed weight."""
        return self._kept is None

    def packed(self, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """Return the packed copy of a weight; None if there is none, or weight or bias have changed."""
        if self._kept is None:
            return None
        made_of, former, place, packed = self._kept  # the bias's numbers are read at each call
        if former is not bias or (bias is not None and bias.data_ptr() != place):
            return None
        return packed if made_of.hold((weight,)) else None

    def keep(self, weight: Tensor, bias: Tensor | None, packed: Tensor) -> Tensor:
        """Keep the packed copy of a weight, and return it."""
        self._kept = Watched((weight,)), bias, 0 if bias is None else bias.data_ptr(), packed
        return packed

    def forget_trained(self, weight: Tensor) -> None:
        """Drop everything if a weight trains: some optimizers change it without a new version."""
        if weight.requires_grad:
            self.clear()

    def plan(self, shape: tuple[int, ...], plan: Any) -> Any:
        """Keep the plan for a shape, and return it; drop all once there are too many."""
        if len(self.plans) >= _MOST_PLANS:
            self.plans.clear()
        self.plans[shape] = plan
        return plan

    def __copy__(self) -> Packing:
        """Return an empty one."""
        return Packing()

    def __deepcopy__(self, memo: dict[int, object]) -> Packing:
        """Return an empty one."""
        return Packing()

    def __reduce__(self) -> tuple[type[Packing], tuple[()]]:
        """Pickle as an empty one."""
        return Packing, ()


class PackedLayer(Layer):
    """A layer with plain parameters ``weight`` and ``bias``, and what it has prepared for its fast path.

    The latter is in a slot, not in ``__dict__``: nothing that reads, copies or saves a module's attributes sees it.
    """

    __slots__ = ("_packing",)

    weight: nn.Parameter
    bias: nn.Parameter | None
    _packing: Packing

    def __init__(
        self, shape: Sequence[int], activation: tuple[Any, ...], *, bias: bool, device: Any, dtype: Any
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
        own_bias = nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", own_bias)
        self._activation: tuple[Any, ...] = tuple(Activation(*activation))  # plain data, as archives write it

    def check_attributes(self) -> None:
        """Raise a ValueError if a file has set values that no operator takes."""
        check_epilogue(self.activation, Norm())

    @property
    def packing(self) -> Packing:
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
        """Drop the packed copy and all else derived from the weight; the next call derives it again."""
        self.packing.clear()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes alone, to be copied and saved."""
        return dict(vars(self))


def bias_fits(bias: Tensor | None, weight: Tensor) -> bool:
    """Return whether a bias is safe for the operators, which do not check its size."""
    if bias is None:
        return True
    return bias.shape == weight.shape[:1] and bias.dtype == weight.dtype and bias.is_cpu and bias.is_contiguous()


def runs_by_onednn() -> bool:
    """Return whether nothing intercepts operators now, and oneDNN is enabled."""
    return runs_plainly() and mkldnn_enabled()
