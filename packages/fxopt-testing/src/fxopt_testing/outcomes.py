"""`Outcome`: everything that calling a module does, and how two outcomes differ."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from fxopt_core import faithful_copy
from fxopt_rewrite import (
    Tolerance,
    tolerance,
)
from fxopt_tools import Inputs, verify

_ARGUMENT = "argument"


@dataclass
class Outcome:
    """What one call of a module returned and changed.

    Attributes:
        outputs: paths to what was returned.
        arguments: paths to the arguments, as they are after the call.
        buffers: names to buffers after the call.
        structure: how the result is nested.
        passed_on: pairs of output and argument that are the very same tensor, or share memory.
        gradients: names of inputs and parameters to gradients; None where there is no gradient.
        refused: why there are no gradients; None where there are.
    """

    outputs: dict[str, Any]
    arguments: dict[str, Any]
    buffers: dict[str, Tensor]
    structure: str
    passed_on: frozenset[tuple[str, str]] = frozenset()
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    refused: str | None = None


def outcome_of(graph_module: GraphModule, inputs: Inputs, *, gradients: bool = True) -> Outcome:
    """Call a copy of a module without and with gradients, from the same random state.

    Raises:
        Exception: Whatever the module raises.
    """
    with torch.no_grad():
        outcome = _run(faithful_copy(graph_module), inputs)
    if gradients:
        try:
            outcome.gradients = _gradients(faithful_copy(graph_module), inputs)
        except RuntimeError as error:
            outcome.refused = str(error)
    return outcome


def _run(graph_module: GraphModule, inputs: Inputs) -> Outcome:
    with torch.random.fork_rng(devices=[]), contextlib.redirect_stderr(io.StringIO()):  # torch prints what it raises
        torch.manual_seed(0)
        result = graph_module(*inputs.args, **inputs.kwargs)
    leaves, spec = tree_flatten_with_path(result)
    outputs = {f"output{keystr(path)}": leaf for path, leaf in leaves}
    leaves, _ = tree_flatten_with_path((list(inputs.args), inputs.kwargs))
    arguments = {f"{_ARGUMENT}{keystr(path[1:])}": leaf for path, leaf in leaves}
    buffers = {name: buffer.clone() for name, buffer in graph_module.named_buffers()}
    return Outcome(outputs, arguments, buffers, str(spec), _passed_on(outputs, arguments))


def _passed_on(outputs: dict[str, Any], arguments: dict[str, Any]) -> frozenset[tuple[str, str]]:
    memory: dict[int, list[str]] = {}
    for path, value in arguments.items():
        if _has_memory(value):
            memory.setdefault(value.untyped_storage().data_ptr(), []).append(path)
    return frozenset(
        (path, argument)
        for path, value in outputs.items()
        if _has_memory(value)
        for argument in memory.get(value.untyped_storage().data_ptr(), ())
    )


def _has_memory(value: object) -> bool:
    return isinstance(value, Tensor) and not value.is_meta and value.numel() > 0


def _gradients(graph_module: GraphModule, inputs: Inputs) -> dict[str, Tensor | None]:
    """Return gradients of a fixed sum over all outputs, by inputs and parameters that need some."""
    graph_module.zero_grad()
    known: dict[str, Tensor] = {name: p for name, p in graph_module.named_parameters() if p.requires_grad}

    def given(x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x.clone()
        leaf = x.detach().clone().requires_grad_()
        known[f"{_ARGUMENT} {len(leaves)}"] = leaf
        leaves.append(leaf)
        return leaf.clone(memory_format=torch.preserve_format)  # a leaf that needs a gradient may not be written

    leaves: list[Tensor] = []
    args, kwargs = tree_map_only(Tensor, given, (inputs.args, inputs.kwargs))
    outcome = _run(graph_module, Inputs(*args, **kwargs))
    total = [_weighed(value) for value in outcome.outputs.values() if isinstance(value, Tensor) and value.requires_grad]
    if not total:
        return dict.fromkeys(known)
    found = torch.autograd.grad(torch.stack(total).sum(), list(known.values()), allow_unused=True)
    return dict(zip(known, found, strict=True))


def _weighed(value: Tensor) -> Tensor:
    """Return a sum in which every element counts differently, so that no gradient is zero by chance."""
    weights = torch.arange(value.numel(), dtype=torch.float64, device=value.device).reshape(value.shape).add(1).cos()
    return (value.double() * weights).sum()


@dataclass(frozen=True)
class Difference:
    """One difference between two outcomes.

    Attributes:
        what: "outputs", "effects" or "gradients".
        found: what the second one has.
        expected: what the first one has.
        is_rounding: whether it is one of numbers alone, so that a closer look may excuse it.
    """

    what: str
    found: str
    expected: str
    is_rounding: bool = False


def differences(expected: Outcome, found: Outcome, coarsest: torch.dtype) -> Iterator[Difference]:
    """Yield how two outcomes differ beyond the tolerance of the dtype that the model computes in."""
    if expected.structure != found.structure:
        yield Difference("outputs", f"a result nested as {found.structure}", expected.structure)
        return
    yield from _compared("outputs", expected.outputs, found.outputs, coarsest)
    yield from _compared("effects", expected.arguments, found.arguments, coarsest)
    if expected.passed_on != found.passed_on:
        for output, argument in sorted(found.passed_on ^ expected.passed_on):
            now, before = (f"{output} shares memory with {argument}", f"{output} has memory of its own")
            if (output, argument) in expected.passed_on:
                now, before = before, now
            yield Difference("effects", now, before)
    common = expected.buffers.keys() & found.buffers.keys()
    mine, other = ({f"buffer `{name}`": each.buffers[name] for name in sorted(common)} for each in (expected, found))
    yield from _compared("effects", mine, other, coarsest)
    yield from _gradient_differences(expected, found, coarsest)


def _gradient_differences(expected: Outcome, found: Outcome, coarsest: torch.dtype) -> Iterator[Difference]:
    if expected.refused is not None:
        return  # torch refuses some in-place operations, and what it refuses may exist afterwards
    if found.refused is not None:
        yield Difference("gradients", f"torch refuses to compute gradients: {found.refused}", "gradients, as before")
        return
    common = [name for name in expected.gradients if name in found.gradients]
    for name in common:
        mine, other = expected.gradients[name], found.gradients[name]
        if mine is not None and other is not None:
            yield from _tensors("gradients", f"gradient by `{name}`", mine, other, coarsest)
        elif any(each is not None and each.any() for each in (mine, other)):  # none at all is as good as zeros
            now, before = ("none" if each is None else "one that is not zero" for each in (other, mine))
            yield Difference("gradients", f"the gradient by `{name}` is {now}", before)


def _compared(
    what: str, expected: dict[str, Any], found: dict[str, Any], coarsest: torch.dtype
) -> Iterator[Difference]:
    if list(expected) != list(found):
        yield Difference(what, f"values {', '.join(found) or 'none'}", ", ".join(expected) or "none")
        return
    for path, mine in expected.items():
        other = found[path]
        if isinstance(mine, Tensor) and isinstance(other, Tensor):
            yield from _tensors(what, path, mine, other, coarsest)
        elif type(mine) is not type(other) or (not isinstance(mine, Tensor) and mine != other):
            yield Difference(what, f"{path} is {other!r:.100}", f"{mine!r:.100}")


def _tensors(what: str, path: str, a: Tensor, b: Tensor, coarsest: torch.dtype) -> Iterator[Difference]:
    for name in ("dtype", "shape", "device", "layout"):
        mine, other = getattr(a, name), getattr(b, name)
        if mine != other:
            mine, other = (tuple(each) if name == "shape" else each for each in (mine, other))
            yield Difference(what, f"{path} has {name} {other}", f"{name} {mine}")
            return
    if what != "gradients" and a.requires_grad != b.requires_grad:
        yield Difference(what, f"{path} has requires_grad={b.requires_grad}", f"requires_grad={a.requires_grad}")
    if a.is_meta or not a.numel():
        return
    wide = torch.complex128 if a.is_complex() else torch.float64
    x, y = a.detach().to(wide), b.detach().to(wide)
    within = _allowed(a.dtype, coarsest, 10.0 if what == "gradients" else 1.0)
    finite = x[x.isfinite()].abs()
    scale = max(1.0, finite.max().item() if finite.numel() else 1.0)
    if torch.allclose(y, x, rtol=within.rtol, atol=within.atol * scale, equal_nan=True):
        return
    error = (x - y).abs().nan_to_num(float("inf"))
    place = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    numbers = f"{path} at {list(place)} is {y[place].item():.6g}"
    beyond = f"{x[place].item():.6g}, give or take {within.atol * scale + within.rtol * abs(x[place].item()):.2g}"
    yield Difference(what, numbers, beyond, is_rounding=a.is_floating_point())


def _allowed(dtype: torch.dtype, coarsest: torch.dtype, factor: float) -> Tolerance:
    within = tolerance(dtype)
    if within.is_exact:
        return within
    if torch.finfo(coarsest).eps > torch.finfo(dtype).eps:
        within = tolerance(coarsest)
    return Tolerance(within.rtol * factor, within.atol * factor)


def unlike(
    source: GraphModule,
    result: GraphModule,
    inputs: Inputs,
    expected: Outcome,
    found: Outcome,
    *,
    coarsest: torch.dtype | None = None,
) -> list[Difference]:
    """Return how a result differs from its source; those of numbers only if float64 does not excuse them."""
    if coarsest is None:
        coarsest = coarsest_of(source)
    all_found = list(differences(expected, found, coarsest))
    of_outputs = [each for each in all_found if each.what != "gradients"]
    is_rounding = bool(of_outputs) and all(each.is_rounding for each in of_outputs)
    if is_rounding and verify(faithful_copy(source), faithful_copy(result), inputs).passed:
        return [each for each in all_found if each.what == "gradients"]
    return all_found


def coarsest_of(module: nn.Module, *others: torch.dtype) -> torch.dtype:
    """Return the dtype with the fewest digits: how exact a module is."""
    tensors = (*module.parameters(), *module.buffers())
    dtypes = {*others, *(tensor.dtype for tensor in tensors if tensor.is_floating_point())} or {torch.float32}
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)
