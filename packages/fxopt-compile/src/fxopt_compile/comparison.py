"""Whether a rewritten graph computes what dynamo's own does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fxopt_core.errors import VerificationError
from fxopt_rewrite import tolerance

Run = Callable[..., Any]


def check_same(original: Run, rewritten: Run, values: Sequence[Any], name: str, promised: float | None) -> Any:
    """Run both, the original one on copies; return the result of the rewritten one.

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
    for what, one, other in zip(places, [*found, *values], [*expected, *copies], strict=True):
        text = _difference(one, other, promised) if isinstance(other, Tensor) else None
        if text is not None:
            raise VerificationError(
                f"graph {name}: {what} of the rewritten graph is not that of dynamo's own: {text}. The graph runs as "
                "dynamo made it from now on; find the pass with a shorter pipeline"
            )
    return result


def _difference(found: Tensor, expected: Tensor, promised: float | None) -> str | None:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        kinds = (f"{each.dtype} of shape {tuple(each.shape)}" for each in (found, expected))
        return ", expected ".join(kinds)
    if found.is_meta or not found.numel():
        return None
    if promised is not None and found.is_floating_point():
        signal = expected.double()
        error = (found.double() - signal).square().sum()
        ratio = 10 * torch.log10(signal.square().sum() / error).item() if error > 0 else float("inf")
        return None if ratio >= promised else f"signal to error {ratio:.1f} dB, promised {promised:.1f}"
    allowed = tolerance(found.dtype)
    scale = max(1.0, float(expected.abs().nan_to_num(0, 0, 0).max())) if expected.is_floating_point() else 1.0
    if torch.allclose(found, expected, rtol=allowed.rtol, atol=allowed.atol * scale, equal_nan=True):
        return None
    return (
        f"they differ by up to {(found - expected).abs().max().item():.3g}"
        if found.dtype is not torch.bool
        else "they differ"
    )
