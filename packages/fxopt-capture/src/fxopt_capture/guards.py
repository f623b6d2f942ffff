"""The check that inputs are ones which a captured graph is valid for, as a module of the graph that pickles."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils import _pytree as pytree

from fxopt_core.errors import CaptureError

from .direct_plan import DirectPlan
from .dtype_kinds import kind_of

GUARDS = "_guards_fn"
"""The name of the guards in a captured module: that of torch.export's own check."""
_ADVICE = "capture the model again with such an input, or with `dynamic_shapes` that allow it"


@dataclass(frozen=True)
class InputSpec:
    """What one input of the graph must be.

    Attributes:
        name: how the caller calls it: ``input_ids``, ``states[0]``.
        kind: ``bool``, ``integer``, ``floating`` or ``complex`` for a tensor, None for a constant.
        sizes: a tensor's size per dimension, None where it is dynamic.
        value: what a constant must equal.
        dtype: the one that a tensor must have because the graph converts it or others to it, or because the model reads
            it, None where any of its kind does.
        read_at: where in its source the model reads a dtype of this kind, from which constants of the graph follow.
        follows: whether an input may have the dtype that the graph module was moved to since (``.half()``).
    """

    name: str
    kind: str | None
    sizes: tuple[int | None, ...] = ()
    value: object = None
    dtype: torch.dtype | None = None
    read_at: str | None = None
    follows: bool = False


@dataclass(frozen=True)
class Condition:
    """A relation between sizes of inputs that the graph relies on.

    Attributes:
        code: a Python expression over the sequence of inputs, ``i``: ``i[0].size()[1] <= 64``.
        text: the same for readers: ``input_ids.size()[1] <= 64``.
    """

    code: str
    text: str


class InputGuards(nn.Module):
    """Refuses inputs that a captured graph is not valid for, instead of computing something wrong with them.

    It is called by the graph with all its inputs, flat and in order, and returns nothing. It also refuses a change of
    mode that the graph cannot follow, for graph modules that `train` reaches by way of their children.

    Args:
        specs: one per input.
        conditions: relations between their sizes.
        mode: the mode whose computation the graph holds, or None where both modes compute the same.
        module_dtype: that of the model's floating-point tensors, None if it has none; moving the module changes it.

    >>> guards = InputGuards([InputSpec("x", "floating", (None, 4))], [])
    >>> guards(torch.zeros(3, 4))
    >>> guards(torch.zeros(3, 5))
    Traceback (most recent call last):
    fxopt_core.errors.CaptureError: input `x` has size 5 in dimension 1, where the graph was captured for 4; capture...
    """

    _is_impure = True  # torch's dead-code elimination keeps the call
    only_checks_inputs = True  # fxopt's analysis of effects takes it for harmless

    def __init__(
        self,
        specs: Sequence[InputSpec],
        conditions: Sequence[Condition],
        mode: bool | None = None,
        module_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.specs = tuple(specs)
        self.conditions = tuple(conditions)
        self.mode = mode
        self.module_dtype = module_dtype
        self._failing = _compiled(self.conditions)
        self.plan = DirectPlan()

    def forward(self, *inputs: Any) -> None:
        """Check the inputs.

        Raises:
            CaptureError: the graph is not valid for them.
        """
        for spec, value in zip(self.specs, inputs, strict=True):
            if spec.kind is None:
                _check_constant(spec, value)
            else:
                _check_tensor(spec, value, self.module_dtype)
        try:
            failing = self._failing(inputs)
        except ZeroDivisionError as error:
            raise CaptureError(f"the captured graph is not valid for inputs of size 0; {_ADVICE}") from error
        if failing is not None:
            raise CaptureError(
                f"the captured graph is valid for inputs with {self.conditions[failing].text} only; {_ADVICE}"
            )

    def accepts(self, inputs: Sequence[object]) -> bool:
        """Whether `forward` would let these inputs pass."""
        try:
            self.forward(*inputs)
        except CaptureError:
            return False
        return True

    def train(self, mode: bool = True) -> InputGuards:
        """Set the flag, or refuse a mode that the graph does not hold.

        Raises:
            CaptureError: the graph computes something else in that mode.
        """
        check_mode(self.mode, mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> InputGuards:
        """Note the dtype that the module is moved to, with all others in it."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if self.module_dtype is not None:
            self.module_dtype = fn(torch.empty(0, dtype=self.module_dtype)).dtype
        return self

    def extra_repr(self) -> str:
        """Return the conditions, for printing."""
        return ", ".join(condition.text for condition in self.conditions)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_failing", "plan")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(dict(state))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._failing = _compiled(self.conditions)
        self.plan = DirectPlan()


@dataclass(frozen=True)
class GuardedCall:
    """A forward pre-hook that checks the inputs of a graph which does not call its guards itself."""

    guards: InputGuards

    def __call__(self, module: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Check the inputs.

        Raises:
            CaptureError: the graph is not valid for them.
        """
        self.guards(*pytree.tree_leaves((args, dict(kwargs))))


def check_mode(captured: bool | None, mode: bool) -> None:
    """Refuse a switch to a mode that a captured graph does not hold.

    Args:
        captured: the mode that it was captured in, or None where it computes the same in both.
        mode: the one asked for.

    Raises:
        CaptureError: they differ.
    """
    if captured is not None and captured != mode:
        names = {True: "training", False: "evaluation"}
        raise CaptureError(
            f"the graph was captured in {names[captured]} mode, and what dropout, batch norm and the like do is part "
            f"of it; to have it in {names[mode]} mode, call model.{'train' if mode else 'eval'}() and capture the "
            f"model again"
        )


def _check_tensor(spec: InputSpec, value: object, module_dtype: torch.dtype | None) -> None:
    if not isinstance(value, torch.Tensor):
        raise CaptureError(f"input `{spec.name}` is a {type(value).__name__}, where the graph takes a tensor")
    if value.dim() != len(spec.sizes):
        raise CaptureError(
            f"input `{spec.name}` has {value.dim()} dimensions, where the graph was captured for {len(spec.sizes)}; "
            f"{_ADVICE}"
        )
    if kind_of(value.dtype) != spec.kind:
        raise CaptureError(
            f"input `{spec.name}` has dtype {value.dtype}, where the graph was captured for a {spec.kind} one; "
            f"{_ADVICE}"
        )
    if spec.dtype is not None and value.dtype != (module_dtype if spec.follows else spec.dtype):
        _check_dtype(spec, value.dtype, module_dtype)
    for dimension, size in enumerate(spec.sizes):
        if size is not None and value.size(dimension) != size:
            hint = (
                "; a size of 1 in one of several inputs is taken to be broadcast, give 2 or more" if size == 1 else ""
            )
            raise CaptureError(
                f"input `{spec.name}` has size {value.size(dimension)} in dimension {dimension}, where the graph was "
                f"captured for {size}{hint}; {_ADVICE}"
            )


def _check_dtype(spec: InputSpec, found: torch.dtype, module_dtype: torch.dtype | None) -> None:
    if spec.follows and found == spec.dtype:
        return
    reason = "has conversions for that dtype in it"
    if spec.read_at is not None:
        reason = f"has constants that follow from that dtype, as the model reads it at {spec.read_at}"
    moved = module_dtype if spec.follows and module_dtype != spec.dtype else spec.dtype
    raise CaptureError(
        f"input `{spec.name}` has dtype {found}, where the graph was captured for {spec.dtype} and {reason}; pass "
        f"{moved}, or capture the model again with {found}"
    )


def _check_constant(spec: InputSpec, value: object) -> None:
    if type(value) is not type(spec.value) or value != spec.value:
        raise CaptureError(
            f"input `{spec.name}` is {value!r}, where the graph was captured with {spec.value!r}; {_ADVICE}"
        )


def _compiled(conditions: Sequence[Condition]) -> Callable[[Sequence[Any]], int | None]:
    """Return a function from the inputs to the index of the first condition that fails, or None."""
    lines = [f"    if not ({condition.code}): return {index}" for index, condition in enumerate(conditions)]
    namespace: dict[str, Any] = {**SYMPY_INTERP}
    exec("\n".join(["def failing(i):", *lines, "    return None"]), namespace)
    function: Callable[[Sequence[Any]], int | None] = namespace["failing"]
    return function
