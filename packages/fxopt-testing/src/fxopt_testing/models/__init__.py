"""The zoo: models on which every pass must keep its promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from fxopt_testing.cases import ModelCase
from fxopt_testing.forms import TRACED, Form
from fxopt_testing.models import linear, norm, plain
from fxopt_testing.models.graph import nested_graphs, with_spare_parts
from fxopt_tools import Inputs

ALL: tuple[Form, ...] = (*TRACED, "export", "export-dynamic")


# One tuple for all callers: cases keep what they captured, and `is_of_the_zoo` compares identities.
@cache
def zoo() -> tuple[ModelCase, ...]:
    """Return the models to try every pass on.

    >>> [case.id for case in zoo()][:3]
    ['spare parts[graph]', 'nested graphs[graph]', 'attention[modules]']
    """
    graphs = {"spare parts": with_spare_parts, "nested graphs": nested_graphs}
    cases = [ModelCase(name, make, _input(3, 4), form="graph") for name, make in graphs.items()]
    return (*cases, *_linear(), *_norm(), *_plain())


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


def _input(*sizes: int) -> Tensor:
    # Seeded by the sizes: neither the caller's random state nor the order of the calls matters.
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(math.prod(sizes)))


def _row(
    name: str,
    make: Callable[[], nn.Module],
    inputs: Tensor | Inputs | tuple[Tensor, ...],
    *forms: Form,
    variants: Sequence[Mapping[str, object]] = (),
    **fields: object,
) -> Iterator[ModelCase]:
    """Yield a model in some forms, the first of which other variants of it have too."""
    cases = [ModelCase(name, make, inputs).variant(form=form, **fields) for form in forms or ("modules",)]
    yield from cases
    for changes in variants:
        yield cases[0].variant(**changes)


_Variant: TypeAlias = dict[str, object]
_F64, _BF16, _F16 = (_Variant(dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.float16))
_TRAIN, _META = _Variant(training=True), _Variant(device="meta")


def _linear() -> Iterator[ModelCase]:
    # The ids have a 3, the `padding_idx` of `linear.Tied`.
    x, ids = _input(3, 4), torch.tensor([[1, 2, 5], [0, 3, 3]])
    variants = (_F64, _BF16, _F16, _TRAIN, _META)
    yield from _row("attention", linear.Attention, _input(2, 3, 8), *TRACED, "export", "capture", variants=variants)
    yield from _row("pair", linear.Pair, x, *ALL, variants=[{**_TRAIN, "form": "functions"}])
    biasless = partial(linear.Pair, q_bias=False, k_bias=False)
    yield from _row("pair without bias", biasless, x, variants=[{**_F64, "form": "export"}])
    yield from _row("mixed bias", partial(linear.Pair, k_bias=False), x, *TRACED, variants=[_TRAIN])
    given, other = Inputs(x, scale=_input(1, 4)), Inputs(scale=_input(4), x=_input(2, 4))
    yield from _row("keywords", linear.Keywords, given, "modules", "export", batched=False, others=[other])
    yield from _row("called twice", linear.CalledTwice, x, *TRACED, "export")
    yield from _row("tied", linear.Tied, ids, *TRACED, "export")
    yield from _row("written between", linear.WritesBetween, x, *TRACED, "export")
    yield from _row("written through a view", linear.WritesThroughView, x, *TRACED)
    yield from _row("guarded", linear.Guarded, x)
    yield from _row("frozen", lambda: linear.Pair().requires_grad_(False), x, *TRACED, variants=[_TRAIN])
    yield from _row("half frozen", linear.half_frozen, x, *TRACED)
    yield from _row("parameters at the root", linear.AtRoot, x, *TRACED)
    yield from _row("hub", linear.Hub, x, *TRACED)
    yield from _row("sizes", linear.Sizes, x, *TRACED, "export-dynamic")
    yield from _row("unused result", linear.Unused, x)
    yield from _row("blocks", lambda: nn.Sequential(linear.Block()), x, *TRACED, "export", variants=[_TRAIN])


def _norm() -> Iterator[ModelCase]:
    chain, image, variants = norm.chain, _input(2, 2, 5, 5), (_F64, _BF16, _TRAIN, _META)
    yield from _row("convolution", norm.Convolution, image, *TRACED, "export", variants=variants)
    yield from _row("convolutions", lambda: nn.Sequential(norm.Convolution()), image)
    yield from _row("convolution, 1d", lambda: chain(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)), _input(2, 2, 6), *TRACED)
    yield from _row("convolution, 3d", lambda: chain(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2)), _input(2, 1, 3, 3, 3))
    # Settings other than the defaults: a copy of a layer that lacks one of them computes something else.
    transposed = partial(nn.ConvTranspose2d, 2, 4, 3, stride=2, groups=2, output_padding=1)
    yield from _row("convolution, transposed", lambda: chain(transposed(), nn.BatchNorm2d(4)), image, *TRACED)
    uneven = partial(nn.Conv2d, 2, 3, 2, stride=(2, 1), dilation=(1, 2), padding=(1, 2), padding_mode="reflect")
    yield from _row("norm without affine", lambda: chain(uneven(), nn.BatchNorm2d(3, affine=False)), image)
    yield from _row("read between", norm.ReadsBetween, image)
    yield from _row("shared norm", norm.SharedNorm, image, *TRACED)
    yield from _row("norm without statistics", partial(norm.Convolution, statistics=False), image)
    yield from _row("frozen norm", norm.FrozenNorm, image, variants=[_TRAIN])
    yield from _row("norm behind linear", norm.behind_linear, _input(3, 4), *TRACED, "export", variants=variants)
    yield from _row("norm of rows", lambda: chain(nn.Linear(4, 6), nn.BatchNorm1d(6)), _input(2, 6, 4), *TRACED)
    yield from _row("dropout", norm.dropping, _input(3, 4), *TRACED, "export", variants=[_TRAIN])


def _plain() -> Iterator[ModelCase]:
    x = _input(3, 4)
    yield from _row("arithmetic", plain.Arithmetic, (x, _input(3, 4) + 1.0), "modules", "export", variants=[_F64])
    yield from _row("quotients", plain.Quotients, x, "modules", "export", variants=[_F64, _BF16, _F16])
    yield from _row("rounded quotients", plain.RoundedQuotients, x * 5.0, "modules", "export")
    yield from _row("in-place operations", plain.InPlace, x, *TRACED, "export")
    yield from _row("writes its input", plain.WritesInput, x)
    yield from _row("views", plain.Views, x)
    yield from _row("repeated", plain.Repeated, x, "modules", "export")
    yield from _row("by size", plain.BySize, x, "modules", "export-dynamic")
    yield from _row("structured", plain.Structured, Inputs(x, mask=_input(3, 4)), "modules", "export")
    yield from _row("passed through", plain.Passed, x)
    yield from _row("multi-head attention", plain.Opaque, _input(2, 3, 4))
    yield from _row("products", plain.Products, x)
    yield from _row("many products", partial(plain.Products, 8), x)  # enough for orders to differ between processes
    yield from _row("embedding", plain.embedding, torch.tensor([[1, 2, 5], [0, 3, 3]]))
