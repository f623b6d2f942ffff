"""Which dimensions of the inputs are dynamic, and example inputs that are large enough in them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.export import Dim, ShapesCollection
from torch.utils import _pytree as pytree

from fxopt_capture.call.arguments import CallForm
from fxopt_capture.exporting.images import SMALLEST, Place
from fxopt_core import type_text
from fxopt_core.errors import CaptureError

DimensionsOf = Callable[[str, torch.Tensor], Sequence[int]]


def batch_dimension(name: str, tensor: torch.Tensor) -> Sequence[int]:
    """Return the dimensions that are dynamic unless something is known about the model: the first."""
    return (0,) if tensor.dim() else ()


def automatic_shapes(
    inputs: Mapping[str, object], dimensions_of: DimensionsOf, images: Collection[Place] = ()
) -> ShapesCollection:
    """Return dynamic shapes that let torch find out which of the given dimensions, and of `images`, can be dynamic.

    Dimensions of size 0 or 1 stay static: the example does not show how they vary with others.
    """
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for place, (name, tensor) in enumerate(_named_leaves(inputs)):
        if not isinstance(tensor, torch.Tensor):
            continue
        dynamic = {dim: Dim.AUTO for dim in dimensions_of(name, tensor) if tensor.size(dim) > 1}
        dynamic |= {dim: Dim.AUTO(min=SMALLEST) for leaf, dim in images if leaf == place}
        if dynamic:
            shapes[tensor] = dynamic
    return shapes


def widened(inputs: Mapping[str, object], dimensions_of: DimensionsOf) -> dict[str, object]:
    """Return example inputs with dynamic dimensions enlarged from 1 to 2, if the sizes of 1 are clearly not broadcast.

    If all tensors have size 1 in their first dimension, it is a batch of one, and every tensor is concatenated with
    itself; likewise in the second dimension if it is dynamic. Otherwise a size of 1 may be for broadcasting, and stays.
    """
    result = dict(inputs)
    for dim in (0, 1):
        tensors = [(name, leaf) for name, leaf in _named_leaves(result) if isinstance(leaf, torch.Tensor)]
        sizes = [tensor.size(dim) for name, tensor in tensors if dim in dimensions_of(name, tensor)]
        if sizes and all(size == 1 for size in sizes):
            result = {name: _doubled(name, value, dim, dimensions_of) for name, value in result.items()}
    return result


def _doubled(name: str, value: object, dim: int, dimensions_of: DimensionsOf) -> object:
    def double(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor.detach()] * 2, dim) if dim in dimensions_of(name, tensor) else tensor

    return pytree.tree_map_only(torch.Tensor, double, value)


def _named_leaves(inputs: Mapping[str, object]) -> list[tuple[str, object]]:
    return [(name, leaf) for name, value in inputs.items() for leaf in pytree.tree_leaves(value)]


def requested_shapes(form: CallForm, dynamic_shapes: Any, inputs: Mapping[str, object]) -> Any:
    """Return the caller's dynamic shapes by input name, with None for inputs that they leave out."""
    if isinstance(dynamic_shapes, ShapesCollection):
        return dynamic_shapes
    if isinstance(dynamic_shapes, Mapping):
        named = dict(dynamic_shapes)
    elif isinstance(dynamic_shapes, tuple | list):
        # The tuple also has entries for constants that were given, in the order of ``forward``.
        names = [*form.inputs, *(name for name in form.fixed if name not in form.implied)]
        order = {parameter.name: index for index, parameter in enumerate(form.parameters)}
        named = dict(zip(sorted(names, key=lambda name: order.get(name, len(order))), dynamic_shapes, strict=False))
    else:
        raise CaptureError(
            f"dynamic_shapes is {type_text(dynamic_shapes)}; give a dictionary from argument names to shapes, "
            f"a tuple in the order of the arguments, or a torch.export.ShapesCollection"
        )
    # torch.export takes None for an argument that is not a tensor, so None is right for any name.
    unknown = [name for name, spec in named.items() if name not in form.inputs and spec is not None]
    if unknown:
        raise CaptureError(
            f"dynamic_shapes names {unknown[0]!r}, which is not among the tensor inputs of this capture: "
            f"{', '.join(form.inputs)}"
        )
    for name, shape in named.items():
        value = inputs.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(shape, Mapping):
            continue
        absent = [dim for dim in shape if dim not in range(value.dim())]  # which torch would ignore
        if absent:
            raise CaptureError(
                f"dynamic_shapes names dimension {absent[0]!r} of `{name}`, which has {value.dim()} dimensions; they "
                f"are counted from 0"
            )
    return {name: named.get(name) for name in form.inputs}


def dimensions_requested(shapes: Any) -> DimensionsOf:
    """Return the dimensions that a caller's shapes make dynamic, for inputs that are tensors themselves."""

    def dimensions_of(name: str, tensor: torch.Tensor) -> Sequence[int]:
        spec = shapes.get(name) if isinstance(shapes, dict) else None
        entries = spec.items() if isinstance(spec, dict) else enumerate(spec or ())
        return [dim for dim, size in entries if size is not None and size is not Dim.STATIC and type(size) is not int]

    return dimensions_of


def distinct_tensors(inputs: Mapping[str, object], others: Iterable[torch.Tensor] = ()) -> dict[str, object]:
    """Return inputs with copies of the tensors that appear more than once, and of those made in inference mode.

    ``torch.export`` treats inputs that are the same object as one input: ``model(x, x)`` would give a graph that reads
    only one of the two, whatever it is called with later.

    Args:
        inputs: example inputs by name.
        others: the model's own tensors; an input that is one of them is copied, too.

    >>> x = torch.ones(2)
    >>> found = distinct_tensors({"query": x, "keys": [x, x]})
    >>> found["query"] is x, found["keys"][0] is x, found["keys"][0] is found["keys"][1]
    (True, False, False)
    """
    seen = {id(tensor) for tensor in others}

    def distinct(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_inference() and id(tensor) not in seen:
            seen.add(id(tensor))
            return tensor
        with torch.inference_mode(False):
            return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    result: dict[str, object] = pytree.tree_map_only(torch.Tensor, distinct, dict(inputs))
    return result
