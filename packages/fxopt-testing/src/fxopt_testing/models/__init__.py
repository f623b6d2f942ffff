"""The zoo: models on which every pass has to hold what it promises."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import cache, partial

import torch
from torch import Tensor, nn

from fxopt_testing.cases import ModelCase
from fxopt_testing.forms import Form
from fxopt_testing.models.generated_models import Generated
from fxopt_testing.models.graph_models import nested_graphs, with_spare_parts
from fxopt_testing.models.linear_models import (
    AtRoot,
    Attention,
    Blocks,
    CalledTwice,
    Frozen,
    HalfFrozen,
    Hooked,
    Hub,
    Keywords,
    MixedBias,
    Pair,
    Parametrized,
    Sizes,
    Subclassed,
    Tied,
    TwoNames,
    Unused,
    WritesBetween,
    WritesThroughView,
)
from fxopt_testing.models.norm_models import (
    Convolution,
    Convolutions,
    Dropping,
    FrozenNorm,
    OnRows,
    ReadsBetween,
    SharedNorm,
    WithoutStatistics,
    chain,
)
from fxopt_testing.models.plain_models import (
    Arithmetic,
    BySize,
    InPlace,
    Opaque,
    Passed,
    Products,
    Quotients,
    Repeated,
    RoundedQuotients,
    Structured,
    Views,
    WritesInput,
)
from fxopt_testing.models.real_models import real_models
from fxopt_tools import Inputs

TRACED: tuple[Form, ...] = ("modules", "functions")
ALL: tuple[Form, ...] = (*TRACED, "export", "export-dynamic")


def zoo(*, thorough: bool = False) -> tuple[ModelCase, ...]:
    """Return the models that every pass is tried on.

    Args:
        thorough: with more generated models, more forms and dtypes of each, and real models where they are installed.

    >>> [case.id for case in zoo()][:3]
    ['spare parts[graph]', 'nested graphs[graph]', 'attention[modules]']
    """
    return _zoo(thorough)


@cache
def _zoo(thorough: bool) -> tuple[ModelCase, ...]:
    cases = list(_everything(thorough))
    if thorough:
        cases += real_models()
    return tuple(case for case in cases if case.missing is None)


def model_case(id: str) -> ModelCase:
    """Return the case of the zoo with this id, as findings name it.

    Raises:
        KeyError: There is none.
    """
    for thorough in (False, True):
        for case in zoo(thorough=thorough):
            if case.id == id:
                return case
    raise KeyError(f"the zoo has no case {id!r}; zoo(thorough=True) has all there are")


def is_of_the_zoo(case: ModelCase) -> bool:
    """Whether `model_case` gives this very case."""
    return any(case is each for thorough in (False, True) for each in zoo(thorough=thorough))


def _everything(thorough: bool) -> Iterator[ModelCase]:
    yield ModelCase("spare parts", with_spare_parts, _input(3, 4), form="graph")
    yield ModelCase("nested graphs", nested_graphs, _input(3, 4), form="graph")
    for case, forms, more in [*_linear(), *_norm(), *_plain()]:
        for form in _thorough_forms(case) if thorough else forms:
            yield case.variant(form=form)
        yield from more
        if thorough:
            yield from _in_other_dtypes(case, more)
    yield from _generated(24 if thorough else 4)


def _thorough_forms(case: ModelCase) -> tuple[Form, ...]:
    if case.name in _NO_EXPORT:
        return (case.form,)
    return (*ALL, "capture") if case.batched else TRACED


def _in_other_dtypes(case: ModelCase, more: list[ModelCase]) -> Iterator[ModelCase]:
    known = {each.id for each in more}
    for changes in ({"dtype": torch.float64}, {"dtype": torch.bfloat16}, {"training": True}, {"device": "meta"}):
        changed = case.variant(**changes)
        if changed.id not in known and not (changed.device == "meta" and case.name in _NO_META):
            yield changed


Row = tuple[ModelCase, tuple[Form, ...], list[ModelCase]]
"""A case, the forms in which it is tried, and other variants."""

_NO_EXPORT = {"multi-head attention", "writes its input", "views", "parameters at the root", "convolution, transposed"}
_NO_META = {"parametrized"}


def _input(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(math.prod(sizes)))


def _row(
    name: str,
    make: Callable[[], nn.Module],
    inputs: Tensor | Inputs | tuple[Tensor, ...],
    *forms: Form,
    variants: list[dict[str, object]] | None = None,
    **fields: object,
) -> Row:
    case = ModelCase(name, make, inputs).variant(form=(forms or ("modules",))[0], **fields)
    return case, forms or ("modules",), [case.variant(**changes) for changes in variants or []]


_DTYPES: list[dict[str, object]] = [{"dtype": dtype} for dtype in (torch.float64, torch.bfloat16, torch.float16)]
_TRAIN: dict[str, object] = {"training": True}
_META: dict[str, object] = {"device": "meta"}


def _linear() -> Iterator[Row]:
    x = _input(3, 4)
    yield _row(
        "attention", Attention, _input(2, 3, 8), *TRACED, "export", "capture", variants=[*_DTYPES, _TRAIN, _META]
    )
    yield _row("pair", Pair, x, *ALL, variants=[{**_TRAIN, "form": "functions"}])
    yield _row("pair without bias", partial(Pair, bias=False), x, variants=[{"dtype": torch.float64, "form": "export"}])
    yield _row("mixed bias", MixedBias, x, "modules", "functions", variants=[_TRAIN])
    yield _row(
        "keywords",
        Keywords,
        Inputs(x, scale=_input(1, 4)),
        "modules",
        "export",
        batched=False,
        others=[Inputs(scale=_input(4), x=_input(2, 4))],
    )
    yield _row("called twice", CalledTwice, x, *TRACED, "export")
    yield _row("two names", TwoNames, x, *TRACED)
    yield _row("tied", Tied, torch.tensor([[1, 2, 5], [0, 3, 3]]), *TRACED, "export")
    yield _row("written between", WritesBetween, x, *TRACED, "export")
    yield _row("written through a view", WritesThroughView, x, *TRACED)
    yield _row("hooked", Hooked, x)
    yield _row("frozen", Frozen, x, *TRACED, variants=[_TRAIN])
    yield _row("half frozen", HalfFrozen, x, *TRACED)
    yield _row("subclassed", Subclassed, x)
    yield _row("parametrized", Parametrized, x)
    yield _row("parameters at the root", AtRoot, x, *TRACED)
    yield _row("hub", Hub, x, "modules", "functions", grow=Hub)
    yield _row("sizes", Sizes, x, "modules", "functions", "export-dynamic")
    yield _row("unused result", Unused, x)
    yield _row("blocks", Blocks, x, "modules", "functions", "export", variants=[_TRAIN], grow=Blocks)


def _norm() -> Iterator[Row]:
    image = _input(2, 2, 5, 5)
    half: list[dict[str, object]] = [{"dtype": torch.float64}, {"dtype": torch.bfloat16}]
    yield _row("convolution", Convolution, image, *TRACED, "export", variants=[*half, _TRAIN, _META])
    yield _row("convolutions", Convolutions, image, grow=Convolutions)
    yield _row("convolution, 1d", lambda: chain(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4)), _input(2, 2, 6), *TRACED)
    yield _row("convolution, 3d", lambda: chain(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2)), _input(2, 1, 3, 3, 3))
    yield _row("convolution, transposed", _transposed, image, *TRACED)
    yield _row("norm without affine", lambda: chain(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3, affine=False)), image)
    yield _row("read between", ReadsBetween, image)
    yield _row("shared norm", SharedNorm, image, *TRACED)
    yield _row("norm without statistics", WithoutStatistics, image)
    yield _row("frozen norm", FrozenNorm, image, variants=[_TRAIN])
    yield _row("norm behind linear", _behind_linear, _input(3, 4), *TRACED, "export", variants=[*half, _TRAIN, _META])
    yield _row("norm of rows", OnRows, _input(2, 6, 4), *TRACED)
    yield _row("dropout", Dropping, _input(3, 4), *TRACED, "export", variants=[_TRAIN])


def _transposed() -> nn.Module:
    return chain(nn.ConvTranspose2d(2, 4, 3, stride=2, groups=2), nn.BatchNorm2d(4))


def _behind_linear() -> nn.Module:
    return chain(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.BatchNorm1d(6), nn.Linear(6, 2))


def _plain() -> Iterator[Row]:
    x = _input(3, 4)
    yield _row("arithmetic", Arithmetic, (x, _input(3, 4) + 1.0), "modules", "export", variants=_DTYPES[:1])
    yield _row("quotients", Quotients, x, "modules", "export", variants=_DTYPES)
    yield _row("rounded quotients", RoundedQuotients, x * 5.0, "modules", "export")
    yield _row("in-place operations", InPlace, x, "modules", "functions", "export")
    yield _row("writes its input", WritesInput, x)
    yield _row("views", Views, x)
    yield _row("repeated", Repeated, x, "modules", "export")
    yield _row("by size", BySize, x, "modules", "export-dynamic")
    yield _row("structured", Structured, Inputs(x, mask=_input(3, 4)), "modules", "export")
    yield _row("passed through", Passed, x)
    yield _row("multi-head attention", Opaque, _input(2, 3, 4))
    yield _row("products", Products, x, grow=Products)
    yield _row("many products", partial(Products, 8), x)  # enough for an order to differ elsewhere, if it can


def _generated(count: int) -> Iterator[ModelCase]:
    for seed in range(count):
        form = ALL[seed % 3]
        yield ModelCase(f"generated {seed}", partial(Generated, seed), _input(3, 4), form=form)
        images = partial(Generated, seed, convolutions=True)
        yield ModelCase(f"generated convolutions {seed}", images, _input(2, 4, 4, 4), form=form)
