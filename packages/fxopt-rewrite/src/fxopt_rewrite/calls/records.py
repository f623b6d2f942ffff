"""Calls of layers and divisions as `fxopt_rewrite.calls.readers` returns them, the same for every form of graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import Tensor, nn
from torch.fx import Node

from fxopt_rewrite.layers import module_with

PLAIN: tuple[Any, ...] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED: tuple[Any, ...] = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

#: An operand of arithmetic: a node of the graph, a tensor, or a Python number.
Operand: TypeAlias = Node | Tensor | int | float | complex


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a call cannot be rewritten: a reason code and a sentence."""

    site: str
    reason: str
    message: str


@dataclass(frozen=True, eq=False, slots=True)
class TensorRef:
    """A parameter or buffer that a call uses.

    Attributes:
        name: full name.
        tensor: the tensor.
        node: the ``get_attr`` node that reads it; None if a module call does.
    """

    name: str
    tensor: Tensor
    node: Node | None

    @property
    def key(self) -> str:
        """Its name within its module."""
        return self.name.rpartition(".")[2]


@dataclass(frozen=True, eq=False, slots=True)
class ParameterisedCall:
    """A call of a layer with parameters.

    Attributes:
        node: the call.
        input: the node of its input.
        weight: its weight; None for a normalisation without affine parameters.
        bias: its bias, or None.
        module: the module that is called; None if the graph calls an operation.
        module_name: full name of that module, or of the module that holds the weight.
        training: whether it runs in train mode.
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
        """Name of the module, or else of the node."""
        return self.module_name or self.node.name

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """The tensors that it uses."""
        return tuple(ref for ref in (self.weight, self.bias) if ref is not None)


@dataclass(frozen=True, eq=False, slots=True)
class LinearCall(ParameterisedCall):
    """``input @ weight.T + bias``: weight is (out_features, in_features).

    Attributes:
        transposed: whether the weight is (in_features, out_features) instead, as in ``Conv1D`` of GPT-2.
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
        """The weight as (out_features, in_features), however it is stored; a detached view."""
        weight = self.weight.tensor.detach()
        return weight.t() if self.transposed else weight


@dataclass(frozen=True, eq=False, slots=True)
class ConvolutionCall(ParameterisedCall):
    """A convolution over 1, 2 or 3 dimensions; the attributes are those of ``nn.Conv2d`` and its siblings.

    The weight is ``(out, in / groups, *kernel)``, or ``(in, out / groups, *kernel)`` for a transposed convolution.
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
        """Number of spatial dimensions."""
        return self.weight.tensor.dim() - 2

    @property
    def out_channels(self) -> int:
        """Number of output channels."""
        shape = self.weight.tensor.shape
        return shape[1] * self.groups if self.transposed else shape[0]

    @property
    def in_channels(self) -> int:
        """Number of input channels."""
        shape = self.weight.tensor.shape
        return shape[0] if self.transposed else shape[1] * self.groups

    def build(self, *, bias: bool, tensors: Mapping[str, nn.Parameter] | None = None) -> nn.Module:
        """Return a new module that computes this call.

        Args:
            bias: whether it has a bias.
            tensors: its parameters by name; the others are on the meta device, to be assigned.
        """
        cls = (TRANSPOSED if self.transposed else PLAIN)[self.dims - 1]
        channels, kernel = (self.in_channels, self.out_channels), tuple(self.weight.tensor.shape[2:])
        keys = ("stride", "padding", "dilation", "groups", "padding_mode")
        settings: dict[str, Any] = {key: getattr(self, key) for key in keys}
        if self.transposed:
            settings["output_padding"] = self.output_padding
        module: nn.Module = module_with(tensors or {}, cls, *channels, kernel, bias=bias, **settings)
        return module.train(self.training)


@dataclass(frozen=True, eq=False, slots=True)
class BatchNormCall(ParameterisedCall):
    """``(input - mean) / sqrt(variance + eps) * weight + bias`` over dimension 1.

    Attributes:
        running_mean: running mean, or None.
        running_var: running variance, or None.
        counter: ``num_batches_tracked``, or None.
        eps: added to the variance.
        ranks: the numbers of dimensions that an input may have; empty for any.
    """

    running_mean: TensorRef | None
    running_var: TensorRef | None
    counter: TensorRef | None
    eps: float
    ranks: tuple[int, ...]

    @property
    def uses_batch_statistics(self) -> bool:
        """Whether it normalises with the statistics of the batch, not with the running ones."""
        return self.training or self.running_mean is None or self.running_var is None

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """The tensors that it uses."""
        refs = (self.weight, self.bias, self.running_mean, self.running_var, self.counter)
        return tuple(ref for ref in refs if ref is not None)


@dataclass(frozen=True, eq=False, slots=True)
class LayerNormCall(ParameterisedCall):
    """``(input - mean) / sqrt(variance + eps) * weight + bias``, with statistics over the last dimensions.

    Attributes:
        normalized_shape: the sizes of those dimensions.
        eps: added to the variance; None, in RMS norms only, for the eps of the dtype.
        centred: whether the mean is subtracted; False for an RMS norm.
    """

    normalized_shape: tuple[int, ...]
    eps: float | None
    centred: bool


@dataclass(frozen=True, eq=False, slots=True)
class EmbeddingCall(ParameterisedCall):
    """Rows of a weight of shape (entries, features), one for each index.

    Attributes:
        weight: its weight.
        padding_idx: the row that gets no gradient, or None.
    """

    weight: TensorRef
    padding_idx: int | None


@dataclass(frozen=True, eq=False, slots=True)
class OperationCall:
    """A call of an operation without parameters.

    Attributes:
        node: the call.
    """

    node: Node

    @property
    def label(self) -> str:
        """The name of the node."""
        return self.node.name


@dataclass(frozen=True, eq=False, slots=True)
class ActivationCall(OperationCall):
    """An activation of one value, in any form.

    Attributes:
        input: the node whose value it takes.
        name: the operation, as torch's function is called: ``gelu``, ``leaky_relu``.
        settings: its other arguments by name, defaults included: ``{"negative_slope": 0.01}``.
        inplace: whether the call writes its result into its input.
    """

    input: Node
    name: str
    settings: Mapping[str, Any]
    inplace: bool


@dataclass(frozen=True, eq=False, slots=True)
class ElementwiseCall(OperationCall):
    """``left + alpha * right``, ``left - alpha * right``, ``left * right`` or ``left / right``, in any form.

    Attributes:
        operation: ``add``, ``sub``, ``mul`` or ``div``.
        left: the first `Operand`.
        right: the second one.
        alpha: the factor of the second operand of a sum or difference.
        rounding_mode: how a quotient is rounded, or None.
        inplace: whether the call writes its result into its first operand.
    """

    operation: str
    left: Operand
    right: Operand
    alpha: int | float
    rounding_mode: str | None
    inplace: bool
