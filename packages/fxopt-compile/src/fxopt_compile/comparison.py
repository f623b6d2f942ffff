"""Whether a rewritten graph computes what dynamo's own does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxopt_core import VerificationError
from fxopt_tools import differing

Run = Callable[..., Any]


def check_same(original: Run, rewritten: Run, values: Sequence[Any], name: str, promised: float | None) -> Any:
    """Run both graphs, the original on copies; return the result of the rewritten one.

    Args:
        original: dynamo's graph.
        rewritten: what the passes made of it, with its inputs.
        values: the inputs of dynamo's graph.
        name: what messages call it.
        promised: the least ratio of signal to error in dB, for passes that approximate.

    Raises:
        VerificationError: Results, or inputs that the graph writes, are different.
    """
    copies = [value.detach().clone() if isinstance(value, Tensor) else value for value in values]
    devices = {each.device.index for each in values if isinstance(each, Tensor) and each.device.type == "cuda"}
    with torch.random.fork_rng(devices=sorted(devices)):
        expected = tree_leaves(original(*copies))
    result = rewritten()
    found = tree_leaves(result)
    places = [f"result {place}" for place in range(len(found))] + [f"input {place}" for place in range(len(values))]
    before, after = (
        {what: each for what, each in zip(places, tree, strict=True) if isinstance(each, Tensor)}
        for tree in ([*expected, *copies], [*found, *values])
    )
    for each in differing(before, after, values, sqnr=promised):
        raise VerificationError(
            f"graph {name}: {each.path} of the rewritten graph {each.problem}. The graph runs as dynamo made it from "
            "now on; find the pass with a shorter pipeline"
        )
    return result
