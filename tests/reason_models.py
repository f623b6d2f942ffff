"""Small models on which passes refuse sites, by name; each has the shape of its input as ``shape``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Forward = Callable[[Any, Tensor], Any]


class Layers(nn.Module):
    """Layers and flags by name, and what is computed with them."""

    def __init__(self, shape: tuple[int, ...], forward: Forward, **attributes: object) -> None:
        super().__init__()
        self.shape, self.computes = shape, forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor) -> Any:
        return self.computes(self, x)


class WithAdapter(nn.Module):
    """A linear layer with an adapter, its parts named as PEFT names them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def one(layer: nn.Module, *shape: int, name: str = "conv") -> Layers:
    """One layer."""
    return Layers(shape, lambda m, x: m.get_submodule(name)(x), **{name: layer})


def pair(forward: Forward = lambda m, x: (m.q(x) * 2.0, m.k(x) * 2.0), **others: object) -> Layers:
    """Two linear layers that share their input."""
    return Layers((3, 4), forward, **{"q": nn.Linear(4, 4), "k": nn.Linear(4, 2), **others})


def normed(forward: Forward = lambda m, x: m.norm(m.conv(x)), **others: object) -> Layers:
    """Batch norm after a convolution."""
    norm = nn.BatchNorm2d(4)
    with torch.no_grad():
        for _ in range(3):
            norm(torch.randn(8, 4, 3, 3) + 1)
    return Layers((2, 3, 5, 5), forward, **{"conv": nn.Conv2d(3, 4, 3), "norm": norm, **others})


def dense(forward: Forward = lambda m, x: m.norm(m.dense(x)), *shape: int, **others: object) -> Layers:
    """Batch norm after a linear layer."""
    return Layers(shape or (3, 4), forward, dense=nn.Linear(4, 6), norm=nn.BatchNorm1d(6), **others)


def called_again(model: Any, name: str) -> Any:
    """Give a layer a second name, under which the model calls it too."""
    model.again = model.get_submodule(name)
    return model


def of(forward: Callable[[Tensor], Any], *shape: int) -> Callable[[], Layers]:
    """A maker of a model without layers."""
    return lambda: Layers(shape or (3, 4), lambda m, x: forward(x))


def writes_between(m: Any, x: Tensor) -> Any:
    y = m.q(x) * 2.0
    z = x.mul_(2.0) if m.in_place else x * 2.0
    return y, m.k(x) * 2.0, z


def writes_weight(m: Any, x: Tensor) -> Any:
    if m.in_place:
        m.k.weight.data.mul_(0.5)
    return m.q(x) * 2.0, m.k(x) * 2.0


def reads_between(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    return (m.norm(y), y + 1) if m.reads_between else m.norm(y)


def decomposed(m: Any, x: Tensor) -> Any:
    """Batch norm as `run_decompositions` leaves it."""
    norm = m.norm
    if not m.decomposed:
        return norm(m.conv(x))
    normalise = torch.ops.aten._native_batch_norm_legit_no_training.default
    return normalise(m.conv(x), norm.weight, norm.bias, norm.running_mean, norm.running_var, 0.1, norm.eps)[0]


def stored_transposed() -> Layers:
    """The weight is stored as (in, out), as long as the model is told so."""
    made: Any = dense(lambda m, x: m.norm(x @ m.weight if m.transposed else m.dense(x)), transposed=True)
    made.weight = nn.Parameter(made.dense.weight.detach().t().clone())
    return made  # type: ignore[no-any-return]  # it is one


def unread(m: Any, x: Tensor) -> Any:
    m.fc(x)
    return x.relu()


def attends(m: Any, x: Tensor) -> Any:
    """Attention that is written out, and hides what follows a row by minus infinity."""
    scores = (x @ x.transpose(-2, -1)).masked_fill(x[..., :1] > 0, m.hidden)
    return (torch.softmax(scores, -1) @ x) * 2.0


def over_rows(m: Any, x: Tensor) -> Any:
    """Attention with a softmax over the queries."""
    return (torch.softmax(x @ x.transpose(-2, -1), -2) @ x) * 2.0


MODELS: dict[str, Callable[[], Any]] = {
    "pair": pair,
    "square pair": lambda: pair(k=nn.Linear(4, 4)),
    "one of a subclass": lambda: pair(k=nn.modules.linear.NonDynamicallyQuantizableLinear(4, 2)),
    "one is lazy": lambda: pair(k=nn.LazyLinear(2)),
    "one without bias": lambda: pair(k=nn.Linear(4, 2, bias=False)),
    "one with an adapter": lambda: pair(k=WithAdapter(nn.Linear(4, 2))),
    "pair inside": lambda: one(pair(), 3, 4, name="inner"),
    "one called twice": lambda: called_again(
        pair(lambda m, x: (m.q(x) * 2.0, m.k(x) * 2.0, m.again(x + 1))), "k"
    ),
    "one as a function": lambda: pair(lambda m, x: (m.q(x) * 2.0, F.linear(x, m.k.weight, m.k.bias) * 2.0)),
    "one weight scaled": lambda: pair(lambda m, x: (m.q(x) * 2.0, F.linear(x, m.k.weight * 2.0, m.k.bias) * 2.0)),
    "the only weight scaled": lambda: pair(lambda m, x: F.linear(x, m.k.weight * 2.0, m.k.bias)),
    "weight as input": lambda: pair(
        lambda m, x: (m.q(x) * 2.0, F.linear(x, x), F.linear(x, m.k.weight, m.k.bias * 2.0))
    ),
    "writes between": lambda: pair(writes_between, in_place=True),
    "writes a weight": lambda: pair(writes_weight, in_place=True),
    "biased": lambda: one(nn.Linear(4, 2), 3, 4, name="k"),
    "normed": normed,
    "lazy norm": lambda: normed(norm=nn.LazyBatchNorm2d()),
    "norm without statistics": lambda: normed(norm=nn.BatchNorm2d(4, track_running_stats=False)),
    "norm of another size": lambda: normed(norm=nn.BatchNorm2d(5)),
    "norm twice": lambda: called_again(normed(lambda m, x: m.again(m.norm(m.conv(x)).relu())), "norm"),
    "dropout between": lambda: normed(
        lambda m, x: m.norm(m.drop(m.conv(x)) if m.apart else m.conv(x)), drop=nn.Dropout(), apart=True
    ),
    "reads between": lambda: normed(reads_between, reads_between=True),
    "decomposed": lambda: normed(decomposed, decomposed=True),
    "stride of a shape": lambda: normed(
        lambda m, x: m.norm(F.conv2d(x, m.conv.weight, m.conv.bias, x.size(0) if m.computed else 2)), computed=True
    ),
    "transposed": lambda: normed(
        lambda m, x: m.norm(m.conv(x, [7, 7]) if m.sized else m.conv(x)), conv=nn.ConvTranspose2d(3, 4, 3), sized=True
    ),
    "volumes": lambda: one(nn.Conv3d(3, 4, 3), 2, 3, 5, 4, 3),
    "groups": lambda: one(nn.Conv2d(4, 4, 3, groups=2), 1, 4, 5, 5),
    "unlike branches": lambda: Layers(
        (2, 3, 6, 6), lambda m, x: m.large(x) + m.small(x),
        large=nn.Conv2d(3, 4, 3, 2, padding=1), small=nn.Conv2d(3, 4, 2, 2),  # of even and of odd size
    ),
    "dense": dense,
    "dense on rows": lambda: dense(lambda m, x: m.norm(m.dense(x)), 2, 6, 4),
    "stored transposed": stored_transposed,
    "by 70000": of(lambda x: x / 70000.0),  # whose inverse is no normal number in half precision
    "by zero": of(lambda x: x / 0.0),
    "floored": of(lambda x: torch.floor(x / 3.0)),
    "rounding": of(lambda x: torch.div(x, 3.0, rounding_mode="floor")),
    "of a shape": of(lambda x: x * (x.size(0) / 3.0)),
    "returns a view": of(lambda x: x.relu()[:]),
    "unread": lambda: Layers((3, 4), unread, fc=nn.Linear(4, 4)),
    "attends": lambda: Layers((2, 3, 4), attends, hidden=-float("inf")),
    "attention over rows": lambda: Layers((2, 3, 4), over_rows),
}  # fmt: skip
