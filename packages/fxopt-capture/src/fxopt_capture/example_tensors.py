"""Example inputs as the export needs them: each tensor an object of its own, that autograd takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch.utils import _pytree as pytree


def distinct_tensors(inputs: Mapping[str, object], others: Iterable[torch.Tensor] = ()) -> dict[str, object]:
    """Return inputs with copies of the tensors that appear more than once, and of those made in inference mode.

    ``torch.export`` takes inputs that are the same object for one input: ``model(x, x)`` would give a graph that reads
    one of the two alone, whatever it is called with later.

    Args:
        inputs: example inputs by name.
        others: tensors that the model has itself, which an input may not be either.

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
