"""`calibrated`: calls with representative data, from which passes take the ranges of inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from fxopt_core import PreconditionError, kept, type_text

_KEY = "fxopt_calibration"  # in the meta of a graph module: the calls
_OPERANDS = ("input", "weight", "other", "mat2")  # of functions that multiply, an input before a weight
Call = tuple[tuple[Any, ...], Mapping[str, Any]]


@contextmanager
def calibrated(graph_module: GraphModule, calls: Iterable[Any]) -> Iterator[GraphModule]:
    """Give `FuseLinears` and `FuseConvolutions` data for ``activations="static"``, within a ``with`` block.

    A pass runs the calls on the graph as it finds it, merged layers included, and records the range of each element of
    a layer's input; buffers that the calls change are restored. A hundred typical images, or texts without padding,
    will do. A layer whose input had fewer than 512 rows in all is refused (`no-range`).

    Args:
        graph_module: the graph module that the pass is to rewrite.
        calls: the inputs of each call: a tensor, a tuple of arguments, a mapping of named ones, or a pair of both.

    Raises:
        PreconditionError: A call has another form.

    >>> from fxopt_cpu import FuseLinears
    >>> model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU()).eval()
    >>> graph_module = torch.fx.symbolic_trace(model)
    >>> with calibrated(graph_module, [torch.randn(600, 256)]):
    ...     graph_module = FuseLinears(weights="int8", activations="static")(graph_module)
    >>> graph_module.get_submodule("0_panels")
    PanelLinear(in_features=256, out_features=512, bias=True, activation=gelu, static)
    """
    # In `meta` and not in an option of the pass, because options are plain values.
    graph_module.meta[_KEY] = [_call(each) for each in calls]
    try:
        yield graph_module
    finally:
        graph_module.meta.pop(_KEY, None)


def _call(given: object) -> Call:
    if isinstance(given, Mapping):
        return (), given
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], tuple) and isinstance(given[1], Mapping):
        return given
    if isinstance(given, Tensor | tuple):
        return (given,) if isinstance(given, Tensor) else given, {}
    expected = "a tensor, a tuple of arguments, or a mapping of arguments by name"
    raise PreconditionError(f"a call to calibrate with is {type_text(given)}, expected {expected}")


def ranges_of(
    graph_module: GraphModule, depths: Mapping[int, tuple[int, int]]
) -> tuple[Mapping[int, Tensor], Mapping[int, int]]:
    """Return the range (2, in) of each element of a weight's input, and how many rows it had, by the weight's ``id``.

    Weights that no call reaches are left out. ``depths`` has, by the same ``id``, the number of elements and their
    dimension of the input, counted from the end.

    Raises:
        PreconditionError: The graph module has no data.
    """
    calls: list[Call] | None = graph_module.meta.get(_KEY)
    if not calls:
        raise PreconditionError(
            "activations='static' needs data to calibrate with: give fxopt.optimize(..., calibrate=...) some, or run "
            "the pass within `with fxopt_cpu.calibrated(graph_module, calls):`"
        )
    graph_module.recompile()  # passes before this one have left outdated code
    ranges = _Ranges(depths)
    with kept(graph_module, buffers=True), torch.no_grad(), ranges:
        for args, kwargs in calls:
            graph_module(*args, **kwargs)
    return ranges.found, ranges.rows


class _Ranges(TorchFunctionMode):
    """Records the inputs of products: the argument before a weight in the call of a function."""

    def __init__(self, depths: Mapping[int, tuple[int, int]]) -> None:
        super().__init__()
        self.depths = depths
        self.found: dict[int, Tensor] = {}
        self.rows: Counter[int] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record the input, and compute."""
        named = kwargs or {}  # in any order
        values = (*args, *(named[name] for name in dict.fromkeys((*_OPERANDS, *named)) if name in named))
        for input, weight in pairwise(values):
            size, dim = self.depths.get(id(weight), (0, 0))
            fits = size and isinstance(input, Tensor) and input.dim() >= -dim and input.shape[dim] == size
            if fits and input.numel():
                rows = input.detach().movedim(dim, -1).flatten(0, -2)
                self.rows[id(weight)] += len(rows)
                former = self.found.get(id(weight), rows[:0].float())  # of calls before
                rows = torch.cat((torch.stack((rows.amin(0), rows.amax(0))).float(), former))
                self.found[id(weight)] = torch.stack((rows.amin(0), rows.amax(0)))
        return func(*args, **(kwargs or {}))
