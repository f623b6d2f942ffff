"""The zoo: models on which every pass must keep its promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial
from itertools import chain

import torch
from torch import Tensor, nn

from fxopt_testing.cases import ModelCase
from fxopt_testing.forms import TRACED, Form
from fxopt_testing.models import linear, norm, plain
from fxopt_testing.models.graph import nested_graphs, with_spare_parts
from fxopt_tools import Inputs

ALL: tuple[Form, ...] = (*TRACED, "export", "export-dynamic")


@cache
def zoo() -> tuple[ModelCase, ...]:
    """Return the models to try every pass on.

    >>> [case.id for case in zoo()][:3]
    ['spare parts[graph]', 'nested graphs[graph]', 'attention[modules]']
    """
    return tuple(_everything())


def model_case(id: str) -> ModelCase:
    """Return the case of the zoo with this id, as findings name it.

    Raises:
        KeyError: There is none.
    """
    for case in zoo():
        if case.id == id:
            return case
    raise KeyError(f"the zoo has no case {id!r}; zoo() lists them")


def is_of_the_zoo(case: ModelCase) -> bool:
    """Whether `model_case` gives this very case."""
    return any(case is each for each in zoo())


def _everything() -> Iterator[ModelCase]:
    yield ModelCase("spare parts", with_spare_parts, _input(3, 4), form="graph")
    yield ModelCase("nested graphs", nested_graphs, _input(3, 4), form="graph")
    yield from chain.from_iterable([*_linear(), *_norm(), *_plain()])


def _input(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(math.prod(sizes)))


def _row(
    name: str,
    make: Callable[[], nn.Module],
    inputs: Tensor | Inputs | tuple[Tensor, ...],
    *forms: Form,
    variants: list[dict[str, object]] | None = None,
    **fields: object,
) -> Iterator[ModelCase]:
    """Yield a model in some forms, the first of which other variants of it have too."""
    cases = [ModelCase(name, make, inputs).variant(form=form, **fields) for form in forms or ("modules",)]
    yield from cases
    for changes in variants or ():
        yield cases[0].variant(**changes)


_DTYPES: list[dict[str, object]] = [{"dtype": dtype} for dtype in (torch.float64, torch.bfloat16, torch.float16)]
_TRAIN: dict[str, object] = {"training": True}
_META: dict[str, object] = {"device": "meta"}


def _linear() -> Iterator[Iterator[ModelCase]]:
    x = _input(3, 4)
    yield _row(
        "attention", linear.Attention, _input(2, 3, 8), *TRACED, "export", "capture", variants=[*_DTYPES, _TRAIN, _META]
    )
    yield _row("pair", linear.Pair, x, *ALL, variants=[{**_TRAIN, "form": "functions"}])
    yield _row(
        "pair without bias", partial(linear.Pair, bias=False), x, variants=[{"dtype": torch.float64, "form": "export"}]
    )
    yield _row("mixed bias", linear.mixed_bias, x, "modules", "functions", variants=[_TRAIN])
    yield _row(
        "keywords",
        linear.Keywords,
        Inputs(x, scale=_input(1, 4)),
        "modules",
        "export",
        batched=False,
        others=[Inputs(scale=_input(4), x=_input(2, 4))],
    )
    yield _row("called twice", linear.CalledTwice, x, *TRACED, "export")
    yield _row("two names", linear.TwoNames, x, *TRACED)
    yield _row("tied", linear.Tied, torch.tensor([[1, 2, 5], [0, 3, 3]]), *TRACED, "export")
    yield _row("written between", linear.WritesBetween, x, *TRACED, "export")
    yield _row("written through a view", linear.WritesThroughView, x, *TRACED)
    yield _row("hooked", linear.hooked, x)
    yield _row("frozen", lambda: linear.Pair().requires_grad_(False), x, *TRACED, variants=[_TRAIN])
    yield _row("half frozen", linear.half_frozen, x, *TRACED)
    yield _row("subclassed", linear.subclassed, x)
    yield _row("parametrized", linear.parametrized, x)
    yield _row("parameters at the root", linear.AtRoot, x, *TRACED)
    yield _row("hub", linear.Hub, x, "modules", "functions")
    yield _row("sizes", linear.Sizes, x, "modules", "functions", "export-dynamic")
    yield _row("unused result", linear.Unused, x)
    yield _row("blocks", lambda: nn.Sequential(linear.Block()), x, "modules", "functions", "export", variants=[_TRAIN])


def _norm() -> Iterator[Iterator[ModelCase]]:
    image = _input(2, 2, 5, 5)
    half: list[dict[str, object]] = [{"dtype": torch.float64}, {"dtype": torch.bfloat16}]
    yield _row("convolution", norm.Convolution, image, *TRACED, "export", variants=[*half, _TRAIN, _META])
    yield _row("convolutions", lambda: nn.Sequential(norm.Convolution()), image)
    yield _row("convolution, 1d", lambda: norm.chain(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)), _input(2, 2, 6), *TRACED)
    yield _row("convolution, 3d", lambda: norm.chain(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2)), _input(2, 1, 3, 3, 3))
    transposed = partial(nn.ConvTranspose2d, 2, 4, 3, stride=2, groups=2, output_padding=1)
    yield _row("convolution, transposed", lambda: norm.chain(transposed(), nn.BatchNorm2d(4)), image, *TRACED)
    uneven = partial(nn.Conv2d, 2, 3, 2, stride=(2, 1), dilation=(1, 2), padding=(1, 2), padding_mode="reflect")
    yield _row("norm without affine", lambda: norm.chain(uneven(), nn.BatchNorm2d(3, affine=False)), image)
    yield _row("read between", norm.ReadsBetween, image)
    yield _row("shared norm", norm.SharedNorm, image, *TRACED)
    yield _row("norm without statistics", norm.without_statistics, image)
    yield _row("frozen norm", norm.FrozenNorm, image, variants=[_TRAIN])
    yield _row("norm behind linear", _behind_linear, _input(3, 4), *TRACED, "export", variants=[*half, _TRAIN, _META])
    yield _row("norm of rows", norm.OnRows, _input(2, 6, 4), *TRACED)
    yield _row("dropout", norm.Dropping, _input(3, 4), *TRACED, "export", variants=[_TRAIN])


def _behind_linear() -> nn.Module:
    return norm.chain(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.BatchNorm1d(6), nn.Linear(6, 2))


def _plain() -> Iterator[Iterator[ModelCase]]:
    x = _input(3, 4)
    yield _row("arithmetic", plain.Arithmetic, (x, _input(3, 4) + 1.0), "modules", "export", variants=_DTYPES[:1])
    yield _row("quotients", plain.Quotients, x, "modules", "export", variants=_DTYPES)
    yield _row("rounded quotients", plain.RoundedQuotients, x * 5.0, "modules", "export")
    yield _row("in-place operations", plain.InPlace, x, "modules", "functions", "export")
    yield _row("writes its input", plain.WritesInput, x)
    yield _row("views", plain.Views, x)
    yield _row("repeated", plain.Repeated, x, "modules", "export")
    yield _row("by size", plain.BySize, x, "modules", "export-dynamic")
    yield _row("structured", plain.Structured, Inputs(x, mask=_input(3, 4)), "modules", "export")
    yield _row("passed through", plain.Passed, x)
    yield _row("multi-head attention", plain.Opaque, _input(2, 3, 4))
    yield _row("products", plain.Products, x)
    yield _row("many products", partial(plain.Products, 8), x)  # enough for orders to differ between processes
    yield _row("embedding", plain.embedding, torch.tensor([[1, 2, 5], [0, 3, 3]]))
