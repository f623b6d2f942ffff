"""The check that a captured graph is valid for its inputs, as a module of the graph that can be pickled."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Proxy
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

from fxopt_core import (
    type_text,
    with_article,
)
from fxopt_core.errors import CaptureError

#: The name of the guards in a captured module: that of torch.export's own check.
GUARDS = "_guards_fn"
#: The memory formats that guards may demand.
LAYOUTS = (torch.contiguous_format, torch.channels_last)
_BROADCAST = "; a size of 1 is fixed where it may be broadcast or the model treats it differently: give 2 or more"
_ADVICE = "capture the model again with such an input, or with `dynamic_shapes` that allow it"
_EACH = "capture the model again with such an input, or give optimize(..., also=[...]) an example of each"
_OTHERS = f'{_ADVICE}; where the model itself fixes it, torch.compile(model, backend="fxopt") takes other sizes'


@dataclass(frozen=True)
class InputSpec:
    """What one input of the graph must be.

    Attributes:
        name: its name for the caller: ``input_ids``, ``states[0]``.
        kind: ``bool``, ``integer``, ``floating`` or ``complex`` for a tensor, None for a constant.
        sizes: a tensor's size per dimension, None where it is dynamic.
        value: what a constant must equal, or the flat values that a tensor must have; None if any will do.
        dtype: the dtype that a tensor must have because the graph converts it or others to it, or because the model
            reads it; None if any of its kind will do.
        read_at: where in its source the model reads a dtype of this kind, from which constants of the graph follow.
        follows: whether an input may have the dtype that the graph module has since been moved to (``.half()``).
        ones: whether a mask must be all ones (True) or must not (False), because graph and model were found to differ
            on the other form. None: the values are not checked.
        layout: the memory format that a tensor must have, because the model reads strides, and graph and model were
            found to differ on another one. None: any strides will do.
    """

    name: str
    kind: str | None
    sizes: tuple[int | None, ...] = ()
    value: object = None
    dtype: torch.dtype | None = None
    read_at: str | None = None
    follows: bool = False
    ones: bool | None = None
    layout: torch.memory_format | None = None


class InputGuards(nn.Module):
    """Refuses inputs for which a captured graph is not valid and would compute wrong results.

    The graph calls it with all its inputs, flat and in order; it returns nothing. It also refuses a change of mode or
    dtype that the graph cannot follow, even if `train` or `to` is called on a module around the graph module.

    Args:
        specs: one per input.
        conditions: relations between their sizes, in Python: ``i[0].size()[1] <= 64``, with ``i`` for the inputs.
        mode: the mode that the graph was captured in, or None if both modes compute the same.
        module_dtype: the dtype of the model's floating-point tensors, or None; moving the module changes it.
        baked: a description of a constant that may come from `module_dtype`; None if the graph follows another dtype.

    >>> guards = InputGuards([InputSpec("x", "floating", (None, 4))], [])
    >>> guards(torch.zeros(3, 4))
    >>> guards(torch.zeros(3, 5))
    Traceback (most recent call last):
    fxopt_core.errors.CaptureError: input `x` has size 5 in dimension 1, where the graph was captured for 4; capture...
    """

    _is_impure = True  # torch's dead-code elimination keeps the call
    only_checks_inputs = True  # fxopt's analysis of effects takes it for harmless
    keeps_kinds = True  # inputs of other kinds of dtypes than in the capture are refused; passes on graphs read it

    def __init__(
        self,
        specs: Sequence[InputSpec],
        conditions: Sequence[str],
        mode: bool | None = None,
        module_dtype: torch.dtype | None = None,
        baked: str | None = None,
    ) -> None:
        super().__init__()
        self.specs = tuple(specs)
        self.conditions = tuple(conditions)
        self.mode = mode
        self.module_dtype = module_dtype
        self.baked = baked
        self._compile()

    def _compile(self) -> None:
        """Make the test of all demands in one expression, which takes a fraction of the time of a loop over them.

        Only refusals need the single tests, which are functions so that torch.compile can trace even the messages.
        """
        demands = list(_demands(self.specs))
        names: dict[str, Any] = {
            **SYMPY_INTERP,
            "Tensor": torch.Tensor,
            "type_text": type_text,
            "bool_dtype": torch.bool,
            "is_shown": _is_shown,
            "has_values": _has_values,
            **{f"value_{index}": spec.value for index, spec in enumerate(self.specs)},
            **{f"dtype_{index}": spec.dtype for index, spec in enumerate(self.specs)},
            **{f"layout_{index}": spec.layout for index, spec in enumerate(self.specs)},
        }
        self._demands = [
            (index, eval(f"lambda i, moved: {code}", names), eval(f"lambda value, spec, moved: f{text!r}"))
            for index, code, text in demands
        ]
        # For messages, a condition has the names of the inputs: ``input_ids.size()[1] <= 64``.
        readable = partial(re.sub, r"\bi\[(\d+)\]", lambda found: self.specs[int(found[1])].name)
        # Conditions of an archive have been checked to be arithmetic on sizes (`check_conditions`).
        self._tests = [(eval(f"lambda i: {code}", names), readable(code)) for code in self.conditions]
        codes = [f"len(i) == {len(self.specs)}", *(code for _, code, _ in demands), *self.conditions]
        test = " and ".join(f"({code})" for code in codes)
        # A condition may divide by a size, which may be 0.
        lines = ["def passes(i, moved):", " try:", f"  return {test}", " except ZeroDivisionError:", "  return False"]
        exec("\n".join(lines), names)
        self._passes: Callable[[Sequence[Any], torch.dtype | None], bool] = names["passes"]

    def forward(self, *inputs: Any) -> None:
        """Check the inputs.

        Raises:
            CaptureError: the graph is not valid for them.
        """
        if not self._passes(inputs, self.module_dtype):
            self._refuse(inputs)

    __call__ = forward  # without torch's search for hooks: this runs before every call of the model

    def _refuse(self, inputs: Sequence[Any]) -> None:
        """Raise the error for the first demand that the inputs do not meet."""
        if any(isinstance(value, Proxy) for value in inputs):
            raise CaptureError("torch.fx cannot trace a captured module again; its graph is ready for passes as it is")
        if len(inputs) != len(self.specs):
            raise CaptureError(f"the captured graph takes {len(self.specs)} inputs, and was given {len(inputs)}")
        for index, holds, describe in self._demands:
            if not holds(inputs, self.module_dtype):
                spec = self.specs[index]
                raise CaptureError(f"input `{spec.name}` {describe(inputs[index], spec, self.module_dtype)}")
        for test, text in self._tests:
            try:
                holds_now = test(inputs)
            except ZeroDivisionError as error:
                raise CaptureError(f"the captured graph is not valid for inputs of size 0; {_ADVICE}") from error
            if not holds_now:
                raise CaptureError(f"the captured graph is valid for inputs with {text} only; {_ADVICE}")

    def accepts(self, inputs: Sequence[object]) -> bool:
        """Return whether `forward` would let these inputs pass."""
        try:
            self.forward(*inputs)
        except CaptureError:
            return False
        return True

    def train(self, mode: bool = True) -> InputGuards:
        """Set the flag, or refuse a mode that the graph was not captured in.

        Raises:
            CaptureError: the model computes something else in that mode.
        """
        check_mode(self.mode, mode)
        return super().train(mode)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> InputGuards:
        """Note the dtype that the captured module is moved to, or refuse it.

        Guards are the first child of a captured module, so that torch has not converted anything when they refuse.
        """
        if self.module_dtype is not None:
            # An empty tensor shows which dtype ``fn`` makes of this one.
            self.moved_to(fn(torch.empty(0, dtype=self.module_dtype)).dtype)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return self

    def moved_to(self, dtype: torch.dtype) -> Callable[[], None]:
        """Note that the module's floating-point tensors get this dtype; return a function that reverts the note.

        Raises:
            CaptureError: the graph has the present dtype as a constant; nothing was changed.
        """
        former = self.module_dtype
        if former not in (None, dtype) and self.baked is not None:
            raise CaptureError(
                f"the captured graph cannot be converted from {former} to {dtype}: {self.baked}. Convert the model, "
                f"and capture it again"
            )
        if former is not None:
            self.module_dtype = dtype
        return partial(setattr, self, "module_dtype", former)

    def extra_repr(self) -> str:
        """Return the conditions, for printing."""
        return ", ".join(text for _, text in self._tests)

    # Functions made by `eval` and `exec` cannot be pickled; `__setstate__` makes them again.
    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_passes", "_demands", "_tests")}

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        super().__setstate__(dict(state))  # type: ignore[no-untyped-call]  # torch leaves it untyped
        self._compile()


def guards_of(captured: nn.Module) -> InputGuards:
    """Return the guards of a captured module."""
    guards = captured._modules[GUARDS]
    assert isinstance(guards, InputGuards)
    return guards


def check_mode(captured: bool | None, mode: bool) -> None:
    """Refuse a mode other than that of the capture, which is None if both modes compute the same."""
    if captured is not None and captured != mode:
        names = {True: "training", False: "evaluation"}
        raise CaptureError(
            f"the graph was captured in {names[captured]} mode, which fixes what dropout, batch norm and similar "
            f"layers do; for {names[mode]} mode, call model.{'train' if mode else 'eval'}() and capture the model again"
        )


def _demands(specs: Sequence[InputSpec]) -> Iterator[tuple[int, str, str]]:
    """Yield the index of an input, an expression over the inputs ``i`` that has to hold, and a text for a violation.

    Expressions also name ``moved``, the dtype of the module. The text is a format of ``value``, ``spec`` and ``moved``.
    """
    for index, spec in enumerate(specs):
        value = f"i[{index}]"
        if spec.kind is None:
            same = f"type({value}) is type(value_{index}) and {value} == value_{index}"
            yield index, same, f"is {{value!r}}, where the graph was captured with {{spec.value!r}}; {_ADVICE}"
            continue
        yield index, f"isinstance({value}, Tensor)", "is {type_text(value)}, where the graph takes a tensor"
        rank = len(spec.sizes)
        text = f"has {{value.ndim}} dimensions, where the graph was captured for {rank}; {_ADVICE}"
        yield index, f"{value}.dim() == {rank}", text
        text = f"has dtype {{value.dtype}}, where the graph was captured for {with_article(spec.kind)} one; {_ADVICE}"
        yield index, _KIND_TESTS[spec.kind].format(value), text
        if spec.dtype is not None:
            moved = f" or {value}.dtype is moved" if spec.follows else ""
            yield index, f"{value}.dtype is dtype_{index}{moved}", _dtype_text(spec)
        for dimension, size in enumerate(spec.sizes):
            if size is not None:
                found = f"has size {{value.shape[{dimension}]}} in dimension {dimension}"
                hint = _BROADCAST if size == 1 else ""
                text = f"{found}, where the graph was captured for {size}{hint}; {_OTHERS}"
                yield index, f"{value}.shape[{dimension}] == {size}", text
        if spec.ones is not None:
            yield index, f"is_shown({value}, {spec.ones})", _MASK_TEXTS[spec.ones]
        if spec.layout is not None:
            wanted = "`{spec.name}.contiguous(memory_format={spec.layout})`"
            text = f"does not have the strides of {{spec.layout}}, on which the model depends; pass {wanted}"
            yield index, f"{value}.is_contiguous(memory_format=layout_{index})", text
        if spec.value is not None:
            text = "holds {value.flatten().tolist()!s:.99}, where the graph was captured with {list(spec.value)!s:.99}"
            yield index, f"has_values({value}, value_{index})", f"{text}, and these values decide sizes; {_EACH}"


def _dtype_text(spec: InputSpec) -> str:
    reason = "contains conversions for that dtype"
    if spec.read_at is not None:
        reason = "has constants that follow from that dtype, as the model reads it at {spec.read_at}"
    wanted = "{moved}" if spec.follows else "{spec.dtype}"
    return (
        f"has dtype {{value.dtype}}, where the graph was captured for {{spec.dtype}} and {reason}; pass {wanted}, or "
        f"capture the model again with {{value.dtype}}"
    )


_MASK_TEXTS = {
    ones: f"is a mask {found}, for which the model computes something else; the graph was captured with a mask "
    f"{shown}; capture the model again with a mask {found}"
    for ones, found, shown in ((True, "with zeros", "of ones"), (False, "of ones", "with zeros"))
}


def _is_shown(mask: torch.Tensor, ones: bool) -> bool:
    """Return whether a mask is all ones, or is not, as `ones` says; an exported program asserts this itself."""
    if torch.compiler.is_exporting():
        has_ones = (mask == 1).all()
        torch._assert_async(has_ones if ones else ~has_ones, f"the mask {'has zeros' if ones else 'is all ones'}")
        return True
    if mask.is_meta or isinstance(mask, FakeTensor):  # of which only the shape is known
        return True
    return bool((mask == 1).all()) if ones else not (mask == 1).all()


def _has_values(tensor: torch.Tensor, values: tuple[int, ...]) -> bool:
    """Return whether an integer tensor has these values, in order; an exported program asserts this itself."""
    if torch.compiler.is_exporting():
        wanted = torch.tensor(values, dtype=tensor.dtype, device=tensor.device)
        torch._assert_async((tensor.flatten() == wanted).all(), f"the values that decide sizes are not {values}")
        return True
    return tensor.is_meta or isinstance(tensor, FakeTensor) or tensor.flatten().tolist() == list(values)


_KIND_TESTS = {
    "bool": "{0}.dtype is bool_dtype",
    "integer": "not ({0}.is_floating_point() or {0}.is_complex() or {0}.dtype is bool_dtype)",
    "floating": "{0}.is_floating_point()",
    "complex": "{0}.is_complex()",
}
