"""`PackedLayer`: a layer whose weight is packed by its first call, and then exists only as panels until it is read."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from fxopt_cpu.layers.epilogue import Activation
from fxopt_cpu.layers.thawing import Layer, Packed, Thawing, thawing
from fxopt_cpu.library import isa
from fxopt_cpu.operators.linear import padded_scale, plain_scale, shifted_sums, sums_of
from fxopt_rewrite import Watched


class PackedLayer(Layer):
    """Base of the layers that pack their weight for operators of our own.

    The plain weight is dropped if nothing else refers to it; whatever reads it afterwards gets it back, bit for bit
    (`Thawing`). The panels are in a slot, not in ``__dict__``: nothing that reads, copies or saves a module's
    attributes sees them.
    """

    __slots__ = ("_panels",)
    only_computes = True
    #: The dtypes of a floating-point weight that can be packed.
    floats: ClassVar[tuple[torch.dtype, ...]] = (torch.float32,)

    weight: Tensor  # a parameter, or a buffer of integers
    scale: Tensor
    rounding: Tensor
    bias: nn.Parameter | None
    #: The weight before it was rounded, where the pass was told to keep it.
    original_weight: nn.Parameter
    _activation: tuple[Any, ...]  # plain data, as archives write it
    _panels: Packed | None

    @property
    def activation(self) -> Activation:
        """The activation of the result, or of the gate."""
        return Activation(*self._activation)

    @property
    def panels(self) -> Packed | None:
        """What the weight was packed into; None at first."""
        panels: Packed | None = getattr(self, "_panels", None)
        return panels

    @property
    def holder(self) -> Thawing:
        """The dictionary that has the weight."""
        return thawing(self, "_buffers" if "weight" in self._buffers else "_parameters")

    @property
    def drops(self) -> bool:
        """Whether the plain weight may be dropped."""
        return True

    @property
    def parts(self) -> int:
        """How many matrices the weight consists of, each padded separately."""
        return 1

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """The shape that the weight has to have."""
        raise NotImplementedError

    @property
    def packable(self) -> bool:
        """Whether the weight has a dtype and a shape that can be packed."""
        held: Any = self.holder
        if held.frozen:  # only a weight that can be packed is dropped
            return True
        shape, single = self.weight_shape, (torch.float32,)
        kinds = {"weight": (self.floats, shape)}
        if "scale" in self._buffers:
            kinds = {"weight": ((torch.int8,), shape), "scale": (single, shape[:1])}
        if held.get("rounding") is not None:
            kinds["rounding"] = single, (2, shape[1])
        return isa() is not None and all(_fits(held.get(key), *kind) for key, kind in kinds.items())

    def packed(self) -> Packed | None:
        """Return the panels of the present weight, packed now if it has changed; None where it cannot be packed."""
        held: Any = self.holder
        packed = self.panels
        if packed is not None and packed.stands_for(held, drops=self.drops):
            return packed
        self._panels = None
        # Changes of tensors that were made in inference mode cannot be noticed.
        given = (each for each in map(held.get, ("weight", "scale", "rounding")) if each is not None)
        packed = self._pack() if self.packable and not any(each.is_inference() for each in given) else None
        if packed is not None and self.drops:
            packed.freeze(held)
        self._panels = packed
        return packed

    def _pack(self) -> Packed:
        """Return what the present weight, scale and rounding are packed into."""
        weight, scale, rounding = self.weight, self._buffers.get("scale"), self._buffers.get("rounding")
        panels, unpacked = self._in_panels(weight.detach())
        makers: dict[str, Callable[[], Tensor]] = {"weight": unpacked}
        padded = sums = None
        if scale is not None:
            padded, sums = padded_scale(scale, self.parts), sums_of(panels)
            makers["scale"] = partial(plain_scale, padded, self.parts, len(scale) // self.parts)
        if rounding is not None:
            shifts = rounding[1].repeat(weight[0].numel() // rounding.shape[1])  # for each place of a kernel
            # Clones: whoever reads the plain tensor may write to it.
            rounding, sums = rounding.clone(), torch.cat([cast("Tensor", sums), shifted_sums(panels, shifts)])
            makers["rounding"] = rounding.clone
        held: Any = self.holder
        watched = Watched([held[key] for key in makers])
        return Packed(watched, makers, panels, padded, sums, rounding, weight.requires_grad)

    def _in_panels(self, weight: Tensor) -> tuple[Tensor, Callable[[], Tensor]]:
        """Return the panels of a weight, and the function that makes it again."""
        raise NotImplementedError

    def add_integers(self, *, rounding: bool, device: torch.device | str | None) -> None:
        """Register an int8 weight with its scale and, if asked for, factors and shifts of inputs."""
        shape = self.weight_shape
        self.register_buffer("weight", torch.zeros(shape, dtype=torch.int8, device=device))
        self.register_buffer("scale", torch.ones(shape[0], device=device))
        if rounding:
            self.register_buffer("rounding", torch.ones(2, shape[1], device=device))

    def forget_derived(self) -> None:
        """Drop the panels; the next call packs the weight again."""
        for held in (self._parameters, self._buffers):
            if isinstance(held, Thawing):
                held.thaw()
        self._panels = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes alone, to be copied and saved."""
        # Python would add the values of slots by default, here the panels.
        return dict(vars(self))


def _fits(tensor: Any, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in dtypes and tuple(tensor.shape) == shape
    return plain and tensor.is_cpu and tensor.numel() > 0
