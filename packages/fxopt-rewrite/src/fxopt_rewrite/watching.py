"""Detecting changed weights, so that copies derived from them (packed, merged, folded, quantized) are made again.

`Watched` answers whether tensors have changed; `refresh` is for changes that it cannot see. It holds no references to
the tensors: a strong reference would keep their memory, and a weak one makes ``torch.utils.swap_tensors`` fail.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from fxopt_core.errors import PreconditionError
from fxopt_rewrite._torch import is_gone

State = list[tuple[int, int, int, tuple[int, ...], torch.Size]]

#: How many words of a tensor are compared, and the bytes of a word. No version counter shows writes through
#: ``data``, such as ``weight.data.mul_(2)``; PEFT writes to weights in this way.
_SAMPLES, _WORD = 4, 8


def state_of(tensors: Iterable[Tensor]) -> State:
    """Return a key that changes once a tensor is replaced, written, moved to other memory or reshaped."""
    return [(id(each), each._version, each.data_ptr(), each.stride(), each.shape) for each in tensors]


class Watched:
    """The state of tensors at one moment: identities, versions, shapes, strides, memory, and a few of their values.

    The values are read at four places of each dense CPU tensor: ``weight.data.mul_(2)`` and writes by NumPy, DLPack or
    another process change them, but no version. Such writes to single values elsewhere go unnoticed (`refresh`).
    The check runs at each call, and takes about half a microsecond for a tensor.

    Args:
        tensors: made outside of inference mode, and not of a class that hides its memory.

    Raises:
        RuntimeError: A tensor has no version, or no memory of its own.

    >>> weight = nn.Parameter(torch.ones(4, 4))
    >>> watched = Watched([weight])
    >>> before = watched.hold([weight])
    >>> _ = weight.data.mul_(2)
    >>> before, watched.hold([weight]), watched.are([weight])
    (True, False, True)
    """

    __slots__ = ("_numbers", "_references", "_state", "_storages", "_words")

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._state = state_of(tensors)
        # While a storage is referred to, even weakly, no other one gets its place, so that addresses tell them apart.
        self._references: list[Any] = list(map(StorageWeakRef, map(Tensor.untyped_storage, tensors)))
        self._storages: list[int] = [each.cdata for each in self._references]
        self._words = [(ctypes.c_char * size).from_address(at) for each in tensors for at, size in _samples(each)]
        self._numbers = b"".join(self._words)  # the fastest way to read many: 30 ns each

    def hold(self, tensors: Iterable[Tensor]) -> bool:
        """Return whether these are the watched tensors, unchanged."""
        same = state_of(tensors) == self._state and not any(map(is_gone, self._storages))
        return same and b"".join(self._words) == self._numbers  # read last: the memory is theirs

    @classmethod
    def joined(cls, parts: Iterable[Watched]) -> Watched:
        """Return the states of several joined into one, each as of its own moment."""
        made = cls(())
        for part in parts:
            for name in ("_state", "_references", "_storages", "_words"):
                getattr(made, name).extend(getattr(part, name))
            made._numbers += part._numbers
        return made

    def are(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether these are the watched tensors, changed or not."""
        return list(map(id, tensors)) == [each for each, *_ in self._state]

    def have_moved(self, tensors: Sequence[Tensor]) -> bool:
        """Return whether one of the tensors has other memory now."""
        return [each.data_ptr() for each in tensors] != [pointer for _, _, pointer, *_ in self._state]

    def share_memory(self, others: Iterable[Tensor]) -> bool:
        """Return whether one of these tensors lies in the memory that a watched tensor had."""
        return any(other.untyped_storage()._cdata in self._storages for other in others)


def _samples(tensor: Tensor) -> Iterator[tuple[int, int]]:
    """Yield addresses and byte counts of the values to compare."""
    size = tensor.numel() * tensor.element_size()
    if not tensor.is_cpu or tensor.layout is not torch.strided or not size:
        return
    # Only of tensors whose elements fill one block of memory: between those of other views may lie other tensors.
    transposed = tensor.mT if tensor.dim() > 1 else tensor
    fills = size == tensor.untyped_storage().nbytes()
    if fills or tensor.is_contiguous() or transposed.is_contiguous():
        words = max(size // _WORD, 1)
        for place in {words * each // _SAMPLES for each in range(_SAMPLES)}:
            yield tensor.data_ptr() + _WORD * place, min(_WORD, size)


Forget = Callable[[nn.Module], object]
_FORGETTING: list[Forget] = []


def on_refresh(forget: Forget) -> Forget:
    """Register a function that is called with each module given to `refresh`, for data kept outside of layers."""
    _FORGETTING.append(forget)
    return forget


def refresh(module: nn.Module) -> None:
    """Drop everything derived from weights (packed, merged, folded, compiled); the next call derives it again.

    It is for changes that `Watched` cannot notice: single values written through NumPy, DLPack, ``parameter.data`` or
    by another process. It calls ``forget_derived()``, without arguments, on each layer that has this method.

    Args:
        module: a graph module, a model that was compiled with the backend ``fxopt``, a model that holds some of these,
            or a single layer.

    Raises:
        PreconditionError: The argument is not a module.

    >>> layer = nn.Linear(2, 2)  # has nothing to forget
    >>> refresh(layer)
    """
    if not isinstance(module, nn.Module):
        raise PreconditionError(f"refresh is given a {type(module).__name__}, expected a module: a model or a layer")
    for each in module.modules():
        forget: Any = getattr(each, "forget_derived", None)
        if callable(forget):
            forget()
    for also in _FORGETTING:
        also(module)
