"""`Thawing`: the parameters or buffers of a layer, some of which exist only as panels until they are read.

A packed weight is its panels; a plain copy beside them would double a model's memory. So the plain tensor is dropped
once a layer is packed (it is *frozen*), and made again, bit for bit, as soon as anything reads the dictionary: an
attribute of the module, ``parameters()``, ``state_dict()``, a conversion, a copy, a pickle, a pass. All of these
call methods of the dictionary, and each method that returns or takes a value *thaws* it first. So the difference is
invisible, and no method of ``nn.Module`` is replaced.

Thawing and writes to the dictionary are reported to `fxopt_core.changes`, by whose marker a region checks that its
panels still match the weights. `Layer` reports changes of attributes.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fxopt_core import changed
from fxopt_cpu._torch import storage_count, without_functions, without_modes
from fxopt_rewrite import Watched

_LOCK = threading.RLock()
#: These bypass `Thawing`: they neither restore a dropped tensor nor report a change.
_READ: Any = dict.__getitem__
_WRITE: Any = dict.__setitem__
#: Methods of a dictionary that neither give nor take a value.
_HARMLESS = frozenset({"__contains__", "__len__", "keys", "__new__", "__init__", "__sizeof__", "fromkeys"})
#: Methods that change a dictionary.
_WRITING = frozenset({"__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"})


class Thawing(dict[str, Any]):
    """The parameters or buffers of a layer; see the module.

    >>> held = Thawing({"weight": nn.Parameter(torch.ones(2))})
    >>> held.freeze({"weight": lambda: torch.ones(2)})
    True
    >>> held.frozen, held["weight"].tolist(), held.frozen
    (True, [1.0, 1.0], False)
    >>> weight = held["weight"]
    >>> held.freeze({"weight": lambda: torch.ones(2)})  # somebody holds it
    False
    """

    __slots__ = ("_by", "_made", "_thawed")

    _by: Mapping[str, Callable[[], Tensor]]
    _made: Mapping[str, _Maker]
    _thawed: Callable[[list[Tensor]], object]

    @property
    def frozen(self) -> bool:
        """Whether some tensors exist only as panels; false once a rollback has written to the dictionary."""
        made: Mapping[str, object] = getattr(self, "_made", {})
        # None stands for a dropped tensor.
        return bool(made) and all(dict.get(self, key, self) is None for key in made)

    def freeze(self, made: Mapping[str, Callable[[], Tensor]], thawed: Callable[[list[Tensor]], object] = len) -> bool:
        """Drop tensors that nothing else refers to, all of them or none; return whether they were dropped.

        Args:
            made: by name, the functions that make the values of the tensors again.
            thawed: called with the tensors once they are made again.
        """
        with _LOCK:
            if self.frozen:
                return True
            if not self.droppable(*made):
                return False
            makers: dict[str, _Maker] = {}
            for key, make in made.items():
                old = _READ(self, key)
                makers[key] = _Maker(make, type(old) is nn.Parameter, old.requires_grad, old.stride(), dict(vars(old)))
                del old
            # Before the values go: other threads read `frozen` without the lock.
            self._made, self._by, self._thawed = makers, made, thawed
            for key in makers:
                _WRITE(self, key, None)
            return True

    def frozen_by(self, made: Mapping[str, Callable[[], Tensor]]) -> bool:
        """Return whether the panels that `freeze` was given with these makers are all that exists."""
        with _LOCK:
            return self.frozen and self._by is made

    def thaw(self) -> None:
        """Make the plain tensors again."""
        with _LOCK:
            if not self.frozen:
                return
            # The reader may be in inference mode, whose tensors have no version, or under modes that make tensors
            # without values, such as `torch.device("meta")`.
            with torch.inference_mode(False), torch.no_grad(), without_functions(), without_modes():
                found = {key: make() for key, make in self._made.items()}
                # The panels stand for the new tensors as well, until one of these is written to.
                self._thawed(list(found.values()))
            for key, tensor in found.items():
                _WRITE(self, key, tensor)
            self._made = {}
            changed()

    def __iter__(self) -> Iterator[str]:  # or else C code that copies dictionaries would see what is in this one
        """Return the names."""
        return super().__iter__()

    def strides(self, key: str) -> tuple[int, ...]:
        """Return the strides of a tensor without making it."""
        with _LOCK:
            found: tuple[int, ...] = self._made[key].strides if self.frozen else _READ(self, key).stride()
            return found

    def droppable(self, *keys: str) -> bool:
        """Return whether nothing but this dictionary refers to tensors that are not frozen."""
        return all(_is_droppable(self, key) for key in keys)

    def __getitem__(self, key: str) -> Any:
        """Return a tensor; no other thread can drop it meanwhile."""
        if torch.compiler.is_compiling():  # it asks for all parameters of a module first, and knows no locks
            return super().__getitem__(key)
        with _LOCK:
            self.thaw()
            return super().__getitem__(key)

    def items(self) -> Any:
        """Return the items, which keep their tensors from being dropped."""
        return self.copy().items()

    def values(self) -> Any:
        """Return the values, which are kept from being dropped."""
        return self.copy().values()

    def __reduce_ex__(self, protocol: object) -> tuple[Any, ...]:
        """Copy and pickle as a dictionary of plain tensors."""
        return dict, (dict(self.items()),)


class Layer(nn.Module):
    """A layer that reports changes of its attributes; its parameters and buffers report theirs once they are `Thawing`.

    Not noticed: attributes written into ``__dict__`` itself, and methods replaced on its class.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, and report it."""
        if vars(self).get(name, self) is value:  # as `eval()` does before each call
            return
        try:
            super().__setattr__(name, value)
        finally:
            changed()

    def __delattr__(self, name: str) -> None:
        """Delete an attribute, and report it."""
        try:
            super().__delattr__(name)
        finally:
            changed()

    def forget_derived(self) -> None:
        """Drop everything derived from the weights; the next call derives it again."""

    def _apply(self, fn: Any, recurse: bool = True) -> Layer:
        """Drop everything derived from weights that are converted or moved; scales and rounding stay in float32."""
        self.forget_derived()
        kept = {key: self._buffers[key] for key in ("scale", "rounding") if key in self._buffers}
        applied: Layer = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # untyped in torch
        for key, tensor in kept.items():
            moved = self._buffers[key]
            if tensor is not None and moved is not None and moved.dtype != tensor.dtype:
                self._buffers[key] = tensor.to(moved.device)
        return applied

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over the attributes of a file or a copy, and report it."""
        try:
            super().__setstate__(state)  # type: ignore[no-untyped-call]  # untyped in torch
        finally:
            changed()


def thawing(module: nn.Module, name: str) -> Thawing:
    """Return the parameters, buffers or children of a module, in a dictionary that reports changes from now on."""
    held = vars(module)[name]
    if type(held) is not Thawing:  # at first, and after a rollback to the former dictionary
        held = vars(module)[name] = Thawing(held)
    return held


@dataclass(slots=True, eq=False)
class Packed:
    """What some tensors of a layer were packed into.

    Attributes:
        made_of: the tensors, as they were.
        makers: by name, the functions that make their values again.
        panels: the weight.
        scale: the scales of integers, by feature of the result; None for floating-point weights.
        sums: the sums of the integers, by feature, and of their products with the inputs' shifts; None likewise.
        rounding: factors and shifts of inputs; None where they are rounded by their largest numbers.
        trains: whether the weight required a gradient.
    """

    made_of: Watched
    makers: Mapping[str, Callable[[], Tensor]]
    panels: Tensor
    scale: Tensor | None = None
    sums: Tensor | None = None
    rounding: Tensor | None = None
    trains: bool = False

    def freeze(self, held: Thawing) -> bool:
        """Drop the plain tensors of a layer if nothing else refers to them; return whether they were dropped."""
        return held.freeze(self.makers, self._thawed)

    def stands_for(self, held: Thawing, *, drops: bool) -> bool:
        """Return whether the tensors of a layer have not changed.

        If `drops`, they are dropped where nothing else refers to them.
        """
        if held.frozen:  # perhaps by another thread, into panels of other values
            return held.frozen_by(self.makers)
        with _LOCK:  # no other thread drops or makes the tensors meanwhile
            present: list[Any] = [dict.get(held, key) for key in self.makers]
            if any(each is None for each in present) or not self.made_of.hold(present):
                return held.frozen_by(self.makers)
            del present
            if drops and held.droppable(*self.makers):
                # Single numbers may have been written unseen: dropping the tensor would lose them.
                if not all(torch.equal(_READ(held, key), make()) for key, make in self.makers.items()):
                    return False
                self.freeze(held)
            return True

    def _thawed(self, tensors: list[Tensor]) -> None:
        self.made_of = Watched(tensors)


class _Maker(NamedTuple):
    """Makes a dropped tensor again, with its class, ``requires_grad``, strides and attributes."""

    values: Callable[[], Tensor]
    is_parameter: bool
    trains: bool
    strides: tuple[int, ...]
    attributes: dict[str, Any]

    def __call__(self) -> Tensor:
        values = self.values()
        if values.stride() != self.strides:
            values = torch.empty_strided(values.shape, self.strides, dtype=values.dtype).copy_(values)
        made = nn.Parameter(values, self.trains) if self.is_parameter else values
        vars(made).update(self.attributes)
        return made


def _is_droppable(held: Thawing, key: str) -> bool:
    """Return whether nothing but a dictionary refers to a tensor, or to its memory.

    There are four kinds of reference: names in Python, C++ objects (graphs of autograd), views and other tensors on the
    same memory, and other processes. A gradient, hooks and weak references would be lost, too.
    """
    tensor = _READ(held, key)
    if type(tensor) not in (nn.Parameter, Tensor) or sys.getrefcount(tensor) > 3:  # the dictionary, here, the argument
        return False
    if tensor._use_count() > 1 or tensor.grad is not None or tensor._backward_hooks:
        return False
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last)
    if not (last or tensor.is_contiguous()):
        return False
    storage = tensor.untyped_storage()
    # Two references: the tensor's own, and `storage` here.
    return storage_count(storage._cdata) <= 2 and not tensor.is_shared() and tensor.is_cpu


def _thawed_first(name: str) -> Callable[..., Any]:
    of_dict = getattr(dict, name)

    def method(self: Thawing, *args: Any, **kwargs: Any) -> Any:
        with _LOCK:  # so that no other thread drops what this one is about to get
            self.thaw()
            try:
                return of_dict(self, *args, **kwargs)
            finally:
                if name in _WRITING:
                    changed()

    method.__name__, method.__doc__ = name, of_dict.__doc__
    return method


# Taken from the running Python's `dict`, so that a method of a later version does not return None for a tensor.
_methods = {name for name in vars(dict) if callable(getattr(dict, name))} - _HARMLESS
for _name in _methods - set(vars(Thawing)) - {"__getattribute__", "__class_getitem__", "__hash__"}:
    setattr(Thawing, _name, _thawed_first(_name))
