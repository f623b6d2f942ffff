"""What a call of a layer or a division is, whichever form the graph has: the results of `fxopt_core.views`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.fx import Node

from fxopt_core.filling import filled_at_once
from fxopt_core.module_state import module_with

PLAIN: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[Any, ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@filled_at_once
@dataclass(frozen=True)
class Obstacle:
    """Why a call cannot be read as one that may be rewritten: a reason code and a sentence."""

    site: str
    reason: str
    message: str


@filled_at_once
@dataclass(frozen=True, eq=False)
class TensorRef:
    """A parameter or buffer that a call uses.

    Attributes:
        name: full name.
        tensor: the tensor.
        node: the ``get_attr`` node that reads it, or None where a module call does.
    """

    name: str
    tensor: Tensor
    node: Node | None

    @property
    def key(self) -> str:
        """Its name within the module that holds it."""
        return self.name.rpartition(".")[2]


@filled_at_once
@dataclass(frozen=True, eq=False)
class ParameterisedCall:
    """A call of an operation with parameters, whichever form the graph has.

    Attributes:
        node: the call.
        input: the value it works on.
        weight: its weight; None for a normalisation without affine parameters.
        bias: its bias, or None.
        module: the module that is called, or None where an operation is.
        module_name: full name of that module, or of the module that holds the weight.
        training: whether it is in train mode.
    """

    node: Node
    input: Node
    weight: TensorRef | None
    bias: TensorRef | None
    module: nn.Module | None
    module_name: str
    training: bool

    @property
    def label(self) -> str:
        """A readable name: that of the module, or else that of the node."""
        return self.module_name or self.node.name

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """The tensors that it uses."""
        return tuple(ref for ref in (self.weight, self.bias) if ref is not None)


@filled_at_once
@dataclass(frozen=True, eq=False)
class LinearCall(ParameterisedCall):
    """``input @ weight.T + bias``: weight is (out_features, in_features).

    Attributes:
        transposed: whether the weight is stored as (in_features, out_features) instead, as in ``Conv1D`` of GPT-2.
    """

    weight: TensorRef
    transposed: bool = False

    @property
    def in_features(self) -> int:
        """Size of the input's last dimension."""
        return self.weight.tensor.shape[0 if self.transposed else 1]

    @property
    def out_features(self) -> int:
        """Size of the output's last dimension."""
        return self.weight.tensor.shape[1 if self.transposed else 0]

    @property
    def matrix(self) -> Tensor:
        """The weight's values as (out_features, in_features), whichever way it is stored; a view without gradient."""
        weight = self.weight.tensor.detach()
        return weight.t() if self.transposed else weight


@filled_at_once
@dataclass(frozen=True, eq=False)
class ConvolutionCall(ParameterisedCall):
    """A convolution over 1, 2 or 3 dimensions, plain or transposed.

    The weight is ``(out, in / groups, *kernel)``, or ``(in, out / groups, *kernel)`` for a transposed one.
    """

    weight: TensorRef
    stride: tuple[int, ...]
    padding: tuple[int, ...] | str
    dilation: tuple[int, ...]
    groups: int
    transposed: bool
    output_padding: tuple[int, ...]
    padding_mode: str

    @property
    def dims(self) -> int:
        """Number of dimensions that it convolves over."""
        return self.weight.tensor.dim() - 2

    @property
    def out_channels(self) -> int:
        """Number of channels that it produces."""
        shape = self.weight.tensor.shape
        return shape[1] * self.groups if self.transposed else shape[0]

    @property
    def in_channels(self) -> int:
        """Number of channels that it takes."""
        shape = self.weight.tensor.shape
        return shape[0] if self.transposed else shape[1] * self.groups

    def build(self, *, bias: bool, tensors: Mapping[str, nn.Parameter] | None = None) -> nn.Module:
        """Return a new module that computes this call.

        Args:
            bias: whether it has a bias.
            tensors: its parameters; those that are not given are on the meta device, to be assigned.
        """
        cls = (TRANSPOSED if self.transposed else PLAIN)[self.dims - 1]
        settings: dict[str, Any] = {"output_padding": self.output_padding} if self.transposed else {}
        module: nn.Module = module_with(
            tensors or {},
            cls,
            self.in_channels,
            self.out_channels,
            tuple(self.weight.tensor.shape[2:]),
            stride=self.stride,
            padding=self.padding,
            dilation=self.dilation,
            groups=self.groups,
            bias=bias,
            padding_mode=self.padding_mode,
            **settings,
        )
        return module.train(self.training)


@filled_at_once
@dataclass(frozen=True, eq=False)
class BatchNormCall(ParameterisedCall):
    """``(input - mean) / sqrt(variance + eps) * weight + bias`` over dimension 1.

    Attributes:
        running_mean: running mean, or None.
        running_var: running variance, or None.
        counter: ``num_batches_tracked``, or None.
        eps: what is added to the variance.
        ranks: the numbers of dimensions that an input may have; empty where any may.
    """

    running_mean: TensorRef | None
    running_var: TensorRef | None
    counter: TensorRef | None
    eps: float
    ranks: tuple[int, ...]

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether it normalises with the statistics of the batch instead of the running ones."""
        return self.training or self.running_mean is None or self.running_var is None

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """The tensors that it uses."""
        refs = (self.weight, self.bias, self.running_mean, self.running_var, self.counter)
        return tuple(ref for ref in refs if ref is not None)


@filled_at_once
@dataclass(frozen=True, eq=False)
class TrueDivision:
    """``input / divisor`` without rounding, as an operator, a function, a method or an in-place form.

    Attributes:
        node: the call.
        input: the dividend.
        divisor: a Python number or a node.
        product: the operation that multiplies in the same form: a function or the name of a method.
    """

    node: Node
    input: Node
    divisor: object
    product: Any

    @property
    def label(self) -> str:
        """The name of the node."""
        return self.node.name
