"""Adversarial cases: small models on which rewriting easily goes wrong, by family, from combinations of factors.

A case is a model with inputs. Every contender gets a model of its own, built from the same seed, and has to compute
the same as the model: by a correct rewrite or by leaving it alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

FAMILIES = (
    "batch norm into convolution",
    "batch norm into linear",
    "merged linears",
    "bias in linear",
    "division",
)
NORMS = FAMILIES[:2]
"""Families that need statistics, and cannot be undone."""
Inputs = tuple[Tensor, ...]
Change = Callable[[Any], object]
"""Changes a model, whose attributes the case knows and mypy does not."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "int64": torch.int64}


@dataclass(frozen=True)
class Case:
    """A model to rewrite.

    Attributes:
        family: the rewrite that it tests.
        topic: its subject in particular; cases of a topic are counted together.
        name: its factors.
        make: makes the same model every time.
        inputs: makes inputs for several calls.
        dtype: the dtype that it computes in.
        training: whether it is in training mode.
    """

    family: str
    topic: str
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], tuple[Inputs, ...]]
    dtype: torch.dtype = torch.float32
    training: bool = False

    def build(self) -> nn.Module:
        """Make the model: seeded, with statistics that no fold can ignore, in its mode."""
        torch.manual_seed(0)
        return self.make()

    def example(self) -> Inputs:
        """Make the largest inputs, which tracing needs."""
        return max(self.inputs(), key=lambda inputs: sum(tensor.numel() for tensor in inputs))

    def varying(self) -> tuple[tuple[int, ...], ...]:
        """The axes of each input that differ in size between calls, and so are dynamic."""
        calls = [[tensor.shape for tensor in inputs] for inputs in self.inputs()]
        return tuple(
            tuple(axis for axis, sizes in enumerate(zip(*shapes, strict=True)) if len(set(sizes)) > 1)
            for shapes in zip(*calls, strict=True)
        )

    @property
    def title(self) -> str:
        """Family, topic and factors."""
        return ", ".join(part for part in (self.family, self.topic, self.name) if part)


def prepared(model: nn.Module, dtype: torch.dtype, training: bool, change: Change | None) -> nn.Module:
    """Draw statistics and weights of norms, convert, set the mode, and make the change that the case tests."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                    if tensor is not None:
                        tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    model = model.to(dtype).train(training)
    if change is not None:
        change(model)
    return model


def case(
    family: str,
    topic: str,
    name: str,
    model: Callable[[], nn.Module],
    shapes: Iterable[tuple[int, ...]],
    *,
    dtype: str = "float32",
    training: bool = False,
    change: Change | None = None,
) -> Case:
    """Return a case whose model takes one tensor of each of these shapes."""
    kind, sizes = DTYPES[dtype], tuple(shapes)
    return Case(
        family,
        topic,
        ", ".join(part for part in (name, dtype if dtype != "float32" else "") if part),
        lambda: prepared(model(), torch.float32 if kind is torch.int64 else kind, training, change),
        lambda: tuple((drawn(size, kind),) for size in sizes),
        kind,
        training,
    )


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Draw an input; its first element is zero, a frequent value."""
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randint(-500, 500, shape, generator=generator)
    if dtype is not torch.int64:
        values = torch.randn(shape, generator=generator).to(dtype)
    values.view(-1)[:1] = 0
    return values


def product(**factors: Iterable[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the combinations of factors, each with a name.

    >>> [name for name, _ in product(bias=(True, False), affine=(True,))]
    ['bias, affine', 'no bias, affine']
    """
    for values in itertools.product(*factors.values()):
        chosen = dict(zip(factors, values, strict=True))
        yield ", ".join(_factor(name, value) for name, value in chosen.items() if name != "dtype"), chosen


def _factor(name: str, value: object) -> str:
    if isinstance(value, bool):
        return name if value else f"no {name}"
    return f"{name} {value}"
