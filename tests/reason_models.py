"""Small models on which passes refuse sites; each has the shape of its input as ``shape``."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Pair(nn.Module):
    """Two linear layers that share their input."""

    shape: ClassVar[tuple[int, ...]] = (3, 4)

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.q(x) * 2.0, self.k(x) * 2.0


class Subclassed(Pair):
    """One of them is of a subclass of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.modules.linear.NonDynamicallyQuantizableLinear(4, 2)


class Hidden(nn.Module):
    """Both are inside of a module, which a tracer may call as a whole."""

    shape: ClassVar[tuple[int, ...]] = (3, 4)

    def __init__(self) -> None:
        super().__init__()
        self.inner = Pair()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class OneIsLazy(Pair):
    """One of them has no weights before the model has run once."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.LazyLinear(2)


class OneUnbiased(Pair):
    """One of them has no bias."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(4, 2, bias=False)


class SquarePair(Pair):
    """Both are of one size."""

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(4, 4)


class CalledTwice(Pair):
    """One of them is called on another value, too."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.k

    def forward(self, x: Tensor) -> Any:
        return self.q(x) * 2.0, self.k(x) * 2.0, self.again(x + 1)


class ScaledWeight(Pair):
    """One weight is computed."""

    def forward(self, x: Tensor) -> Any:
        return self.q(x) * 2.0, F.linear(x, self.k.weight * 2.0, self.k.bias) * 2.0


class ScaledBiased(Pair):
    """The weight of the only layer is computed."""

    def forward(self, x: Tensor) -> Any:
        return F.linear(x, self.k.weight * 2.0, self.k.bias)


class WeightAsInput(Pair):
    """One weight is an input, a bias is computed."""

    def forward(self, x: Tensor) -> Any:
        return self.q(x) * 2.0, F.linear(x, x), F.linear(x, self.k.weight, self.k.bias * 2.0)


class WithAdapter(nn.Module):
    """A linear layer with an adapter, its parts named as PEFT names them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


class Adapted(Pair):
    """An adapter is attached to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.k: Any = WithAdapter(nn.Linear(4, 2))


class LazyNorm(nn.Module):
    """Batch norm that knows its channels only after it has run once."""

    shape: ClassVar[tuple[int, ...]] = (2, 3, 5, 5)

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.LazyBatchNorm2d()

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.conv(x))


class FunctionalPair(Pair):
    """One of them is a function of tensors."""

    def forward(self, x: Tensor) -> Any:
        return self.q(x) * 2.0, F.linear(x, self.k.weight, self.k.bias) * 2.0


class WritesBetween(Pair):
    """Their input is written in place between them, unless it is told not to."""

    in_place = True

    def forward(self, x: Tensor) -> Any:
        y = self.q(x) * 2.0
        z = x.mul_(2.0) if self.in_place else x * 2.0
        return y, self.k(x) * 2.0, z


class WritesWeight(Pair):
    """One weight is written in the graph, unless it is told not to."""

    in_place = True

    def forward(self, x: Tensor) -> Any:
        if self.in_place:
            self.k.weight.data.mul_(0.5)
        return super().forward(x)


class Biased(nn.Module):
    """A linear layer with bias."""

    shape: ClassVar[tuple[int, ...]] = (3, 4)

    def __init__(self) -> None:
        super().__init__()
        self.k = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Any:
        return self.k(x)


class OverVolumes(nn.Module):
    """A convolution over three dimensions."""

    shape: ClassVar[tuple[int, ...]] = (2, 3, 5, 4, 3)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(3, 4, 3)

    def forward(self, x: Tensor) -> Any:
        return self.conv(x)


class Grouped(nn.Module):
    """A convolution of two groups of channels."""

    shape = (1, 4, 5, 5)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, groups=2)

    def forward(self, x: Tensor) -> Any:
        return self.conv(x)


class Convolution(nn.Module):
    """Batch norm after a convolution."""

    shape: ClassVar[tuple[int, ...]] = (2, 3, 5, 5)
    reads_between = False

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        with torch.no_grad():
            for _ in range(3):
                self.norm(torch.randn(8, 4, 3, 3) + 1)

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return (self.norm(y), y + 1) if self.reads_between else self.norm(y)


class Apart(Convolution):
    """Dropout stands between, unless it is told not to."""

    apart = True

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.norm(self.drop(y) if self.apart else y)


class Decomposed(Convolution):
    """Batch norm as `run_decompositions` leaves it, unless it is told not to."""

    decomposed = True

    def forward(self, x: Tensor) -> Any:
        norm = self.norm
        if not self.decomposed:
            return norm(self.conv(x))
        normalise = torch.ops.aten._native_batch_norm_legit_no_training.default
        tensors = (norm.weight, norm.bias, norm.running_mean, norm.running_var)
        return normalise(self.conv(x), *tensors, 0.1, norm.eps)[0]


class Branches(nn.Module):
    """Kernels of even and of odd size have no common centre."""

    shape = (2, 3, 6, 6)

    def __init__(self) -> None:
        super().__init__()
        self.large, self.small = nn.Conv2d(3, 4, 3, 2, padding=1), nn.Conv2d(3, 4, 2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.large(x) + self.small(x)


class ReadsBetween(Convolution):
    """What the convolution computes is used elsewhere, too."""

    reads_between = True


class NormTwice(Convolution):
    """The batch norm is called on another value, too."""

    def __init__(self) -> None:
        super().__init__()
        self.again = self.norm

    def forward(self, x: Tensor) -> Any:
        return self.again(self.norm(self.conv(x)).relu())


class WithoutStatistics(Convolution):
    """Batch norm that always takes those of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4, track_running_stats=False)


class WrongSize(Convolution):
    """Batch norm of other channels: such a model cannot run."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(5)


class StrideOfShape(Convolution):
    """A convolution whose stride the graph computes, unless it is told not to."""

    computed = True

    def forward(self, x: Tensor) -> Any:
        stride = x.size(0) if self.computed else 2
        return self.norm(F.conv2d(x, self.conv.weight, self.conv.bias, stride))


class Transposed(nn.Module):
    """Batch norm after a transposed convolution that is told the size of its output."""

    shape: ClassVar[tuple[int, ...]] = (2, 3, 5, 5)
    sized = True

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.ConvTranspose2d(3, 4, 3), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.conv(x, [7, 7]) if self.sized else self.conv(x))


class Dense(nn.Module):
    """Batch norm after a linear layer."""

    shape: ClassVar[tuple[int, ...]] = (3, 4)

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(4, 6), nn.BatchNorm1d(6)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.dense(x))


class StoredTransposed(Dense):
    """The weight is stored as (in, out), as long as it is told so."""

    transposed = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(self.dense.weight.detach().t().clone())

    def forward(self, x: Tensor) -> Any:
        return self.norm(x @ self.weight if self.transposed else self.dense(x))


class DenseOnRows(Dense):
    """On three dimensions, it normalises the second one."""

    shape = (2, 6, 4)


class Quotient(nn.Module):
    """A division by a number."""

    shape: ClassVar[tuple[int, ...]] = (3, 4)
    by: float = 3.0

    def forward(self, x: Tensor) -> Any:
        return x / self.by


class Tiny(Quotient):
    """The inverse is no normal number in half precision."""

    by = 70000.0


class ByZero(Quotient):
    """There is no inverse."""

    by = 0.0


class Floored(Quotient):
    """The quotient is rounded down."""

    def forward(self, x: Tensor) -> Any:
        return torch.floor(x / self.by)


class Rounding(Quotient):
    """The division itself rounds."""

    def forward(self, x: Tensor) -> Any:
        return torch.div(x, self.by, rounding_mode="floor")


class OfShape(Quotient):
    """The dividend is a size."""

    def forward(self, x: Tensor) -> Any:
        return x * (x.size(0) / self.by)


class ReturnsView(nn.Module):
    """A view that changes nothing is returned."""

    shape = (3, 4)

    def forward(self, x: Tensor) -> Any:
        return x.relu()[:]


class AddsZero(nn.Module):
    """Zero is added to floating-point values, or subtracted."""

    shape = (3, 4)

    def __init__(self) -> None:
        super().__init__()
        self.adds = True

    def forward(self, x: Tensor) -> Any:
        y = x.relu()
        return ((y + 0.0) if self.adds else (y - 0.0)).abs()


class Unread(nn.Module):
    """Nothing reads the result of a layer."""

    shape = (3, 4)

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        self.fc(x)
        return x.relu()


class Attends(nn.Module):
    """Attention that is written out, and hides what follows a row by minus infinity."""

    shape: ClassVar[tuple[int, ...]] = (2, 3, 4)
    hidden = -float("inf")

    def scores(self, x: Tensor) -> Tensor:
        """Return what the softmax takes."""
        return (x @ x.transpose(-2, -1)).masked_fill(x[..., :1] > 0, self.hidden)

    def forward(self, x: Tensor) -> Any:
        return (torch.softmax(self.scores(x), -1) @ x) * 2.0


class CappedAttention(Attends):
    """The scores are capped."""

    def scores(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ x.transpose(-2, -1)) * 30.0
