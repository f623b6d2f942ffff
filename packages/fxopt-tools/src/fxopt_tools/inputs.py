"""The inputs of a model: the forms in which callers give them, and copies for single runs."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from fxopt_core import PreconditionError, type_text
from fxopt_tools.value_tree import equal, parts_of, tensors


class Inputs:
    """The arguments of one call of a model, positional and by keyword.

    >>> Inputs(1, scale=2.0)
    Inputs(1, scale=2.0)
    """

    __slots__ = ("args", "kwargs")  # paths begin with these names, as in ``args[0]``

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.args = args
        self.kwargs = kwargs

    def __repr__(self) -> str:
        """Return the expression that makes equal inputs."""
        return f"Inputs({', '.join([*map(repr, self.args), *(f'{k}={v!r}' for k, v in self.kwargs.items())])})"

    def parts(self) -> dict[str, object]:
        """Return the tensors and other values among the arguments by their paths: ``args[0]``, ``kwargs['mask']``."""
        return {**parts_of(self.args, "args"), **parts_of(self.kwargs, "kwargs")}

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors among the arguments by their paths."""
        return tensors(self.parts())


OneInput: TypeAlias = "Tensor | tuple[Any, ...] | Mapping[str, Any] | Inputs"


@dataclass(frozen=True)
class Copied:
    """A copy of inputs that one run may write to.

    Attributes:
        inputs: the copy.
        before: its parts by their paths, before the run.
        versions: how often the tensors had been written to.
    """

    inputs: Inputs
    before: Mapping[str, object]
    versions: Mapping[str, int]

    def touched(self) -> frozenset[str]:
        """Return the paths of parts that were written to, replaced, added or removed since."""
        after = self.inputs.parts()
        changed = {path for path in self.before.keys() & after.keys() if self._changed(path, after[path])}
        return frozenset(changed | (self.before.keys() ^ after.keys()))

    def _changed(self, path: str, now: object) -> bool:
        before = self.before[path]
        if isinstance(now, Tensor):
            return now is not before or version_of(now) != self.versions[path]
        return now is not before and not equal(now, before)


def version_of(tensor: Tensor) -> int:
    """Return torch's count of writes to a tensor; 0 for inference tensors, which have none."""
    return 0 if tensor.is_inference() else tensor._version


def read_inputs(inputs: OneInput | Sequence[OneInput]) -> list[Inputs]:
    """Return the calls that a caller's ``inputs`` describe.

    Args:
        inputs: a tensor (one positional argument), a tuple (positional arguments), a mapping (keyword arguments),
            `Inputs` (both), or a list of these.

    Raises:
        PreconditionError: The argument is something else, or an empty list.
    """
    if not isinstance(inputs, list):
        return [_read(inputs, "inputs")]
    if not inputs:
        raise PreconditionError("inputs is an empty list, expected at least one input: nothing would be verified")
    return [_read(item, f"inputs[{place}]") for place, item in enumerate(inputs)]


def _read(item: object, name: str) -> Inputs:
    if isinstance(item, Inputs):
        return item
    if isinstance(item, (Tensor, tuple)):
        return Inputs(*item) if isinstance(item, tuple) else Inputs(item)
    if isinstance(item, Mapping):
        odd = next((key for key in item if not isinstance(key, str)), None)
        if odd is None:
            return Inputs(**item)
        raise PreconditionError(
            f"{name} is a mapping with the key {odd!r}, expected names of keyword arguments: to pass a mapping as one "
            "positional argument, put it into a tuple"
        )
    raise PreconditionError(
        f"{name} is {type_text(item)}, expected a tensor (one positional argument), a tuple (positional "
        "arguments), a mapping (keyword arguments), fxopt_tools.Inputs (both), or a list of these for several inputs: "
        "to pass one argument of another type, put it into a tuple"
    )


def copied(inputs: Inputs, *, widened: bool = False) -> Copied:
    """Copy inputs for one run; tensors that share memory share memory in the copy, too.

    If ``widened``, floating-point tensors are cast to float64, and complex ones to complex128.

    Raises:
        PreconditionError: They cannot be copied.
    """
    memo: dict[int, Any] = {}
    try:
        for tensor in inputs.tensors().values():
            if id(tensor) not in memo:  # one by one, since deepcopy rejects results of differentiable operations
                duplicate: Tensor = copy.deepcopy(tensor.detach(), memo)
                if widened and (duplicate.is_floating_point() or duplicate.is_complex()):
                    duplicate = duplicate.to(torch.complex128 if duplicate.is_complex() else torch.float64)
                memo[id(tensor)] = duplicate.requires_grad_(tensor.requires_grad)
        args, kwargs = copy.deepcopy((inputs.args, inputs.kwargs), memo)
    except Exception as error:
        raise PreconditionError(
            f"the inputs cannot be copied for a run: {type(error).__name__}: {error}. Each run gets a copy, so that a "
            "model that writes to its inputs does not change yours: pass values that copy.deepcopy can copy"
        ) from error
    copy_of = Inputs(*args, **kwargs)
    found = copy_of.parts()
    return Copied(copy_of, found, {path: version_of(value) for path, value in tensors(found).items()})
