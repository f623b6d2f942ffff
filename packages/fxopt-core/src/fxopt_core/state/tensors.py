"""What a snapshot keeps of one tensor: the object, its storage and flags, and enough to notice writes into it.

`p.data = other`, `.double()`, `requires_grad_()` and their like change a tensor without touching the dictionaries of
its module. They are undone from an alias, a second tensor over the same memory. Writes into that memory are noticed by
the version counter, which `p.data.mul_(2)` and inference tensors escape; undoing them takes a copy (`protect`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fxopt_core.errors import FxoptError
from fxopt_core.state.containers import put_back

Rebuild: TypeAlias = Callable[[], Tensor]
_PLAIN = (Tensor, nn.Parameter)


class Owner(Protocol):
    """The record of what holds a tensor: of a module, or, for a gradient, of a tensor."""

    @property
    def name(self) -> str:
        """Its full name."""

    def loosen(self) -> None:
        """Hold it only weakly from here on."""


class _Form(NamedTuple):
    """What a tensor that took a released one's place has to look like."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> _Form:
        lazy = is_lazy(tensor)
        return cls(torch.Size() if lazy else tensor.shape, tensor.dtype, tensor.device)


class TensorState:
    """One tensor object as it was, in the module (for a gradient: the tensor) that `owner` records.

    `others` are further modules that hold it, tied or shared.
    """

    others: list[Owner] | None = None
    inner: Sequence[TensorState] = ()
    grad: TensorState | None = None
    hooks: tuple[dict[int, Any], dict[int, Any]] | None = None
    attributes: Mapping[str, Any] = MappingProxyType({})
    saved: Tensor | None = None
    rebuild: Rebuild | None = None
    reference: weakref.ref[Tensor] | None = None
    form: _Form | None = None
    place: tuple[object, ...] | None = None

    def __init__(self, tensor: Tensor, owner: Owner, key: str) -> None:
        self.owner = owner
        self.key = key
        self.cls = type(tensor)
        self.tensor: Tensor | None = tensor
        alias: Tensor = tensor.data
        self.alias: Tensor | None = alias
        self.version = None if tensor.is_inference() else tensor._version
        self.nbytes = _nbytes(alias)
        self.requires_grad = tensor.requires_grad
        self.leaf = tensor.is_leaf
        attributes = tensor.__dict__
        if attributes:
            self.attributes = dict(attributes)
            self.inner = [TensorState(v, self, k) for k, v in attributes.items() if isinstance(v, Tensor)]
        hooks = tensor._backward_hooks
        if hooks is not None:
            self.hooks = hooks, dict(hooks)
        if self.leaf and tensor.grad is not None:
            self.grad = TensorState(tensor.grad, self, "grad")

    @property
    def name(self) -> str:
        """Full name of the tensor, the first one if it has several."""
        return f"{self.owner.name}.{self.key}" if self.owner.name else self.key

    def protect(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Copy the contents. Tensors over one storage share its copy, which `storages` holds by the storage's id."""
        assert self.alias is not None
        storage = plain_storage(self.alias)
        if storage is None:
            self.saved = self.alias.clone()
        else:
            if storage._cdata not in storages:
                storages[storage._cdata] = storage.clone()  # type: ignore[no-untyped-call]  # torch's lacks a type
            self.saved = over_storage(storages[storage._cdata], self.alias)
        for state in self._parts():
            state.protect(storages)

    def release(self, rebuild: Rebuild) -> None:
        """Hold the tensor, and the modules that hold it, only weakly; a protected one comes back from its copy."""
        if self.tensor is None:
            return
        copy = self.saved
        self.rebuild = rebuild if copy is None else lambda: copy
        assert self.alias is not None
        self.form, self.place = _Form.of(self.alias), _place(self.alias)
        self.reference = weakref.ref(self.tensor)
        self.tensor = self.alias = None
        for owner in (self.owner, *(self.others or ())):
            owner.loosen()

    def close(self) -> None:
        """Let go of the records of inner tensors and of the gradient, which refer to this one."""
        for part in self._parts():
            part.close()
        self.inner, self.grad = (), None

    def also_in(self, module: Owner) -> None:
        """Record a further module that holds the tensor."""
        self.others = self.others or []
        self.others.append(module)

    def loosen(self) -> None:
        """Nothing: a gradient or an inner tensor is not released on its own."""

    def restore(self, done: set[int]) -> Iterator[str]:
        """Put object, memory, flags and gradient back; yield the name if contents may have remained overwritten.

        `done` collects the storages whose contents were already copied back.
        """
        tensor = self.known()
        if tensor is None:
            tensor = self._rebuilt()
        elif not self._contents_back(tensor, done):
            yield self.name
        self.tensor = tensor
        for state in self._parts():
            yield from state.restore(done)
        if not self._flags_back(tensor):
            yield self.name

    def known(self) -> Tensor | None:
        """Return the tensor, or None where it is gone."""
        return self.reference() if self.tensor is None and self.reference is not None else self.tensor

    def _parts(self) -> Iterator[TensorState]:
        yield from self.inner
        if self.grad is not None:
            yield self.grad

    def _rebuilt(self) -> Tensor:
        data = self._data()
        self.version = None
        return nn.Parameter(data, self.requires_grad) if issubclass(self.cls, nn.Parameter) else data

    def _data(self) -> Tensor:
        """Return the contents of a released tensor, in memory of their own."""
        assert self.rebuild is not None
        data = self.rebuild().detach()
        if _Form.of(data) != self.form:
            raise FxoptError(
                f"tensor {self.name!r} was released, and what stands in for it is {_Form.of(data)} where {self.form} "
                "was expected; release a tensor with a function that returns it as it was"
            )
        return data

    def _contents_back(self, tensor: Tensor, done: set[int]) -> bool:
        if self.alias is None:
            if _Form.of(tensor) != self.form or _place(tensor) != self.place:
                tensor.data = self._data()  # a pass let it share the memory of what it made, say
            return self._unwritten(tensor)
        unwritten = self._unwritten(tensor)
        if not _same_memory(tensor, self.alias):
            tensor.data = self.alias
        if _nbytes(self.alias) != self.nbytes:
            unwritten = False
            self.alias.untyped_storage().resize_(self.nbytes or 0)
        if self.saved is None:
            return unwritten
        _copy_back(self.alias, self.saved, done)
        return True

    def _unwritten(self, tensor: Tensor) -> bool:
        return self.version is None or tensor.is_inference() or tensor._version == self.version

    def _flags_back(self, tensor: Tensor) -> bool:
        if type(tensor) is not self.cls:
            tensor.__class__ = self.cls
        put_back(vars(tensor), dict(self.attributes))
        hooks = None if self.hooks is None else self.hooks[0]
        if tensor._backward_hooks is not hooks:
            tensor._backward_hooks = hooks
        if self.hooks is not None:
            put_back(*self.hooks)
        if not self.leaf:
            return True
        if not tensor.is_leaf:
            if tensor._is_view():
                return False  # torch refuses to detach a view in place
            tensor.detach_()
        if tensor.requires_grad != self.requires_grad:
            tensor.requires_grad_(self.requires_grad)
        gradient = None if self.grad is None else self.grad.tensor
        if tensor.grad is not gradient:
            tensor.grad = gradient
        return True


def plain_storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory of a plain tensor; sparse, meta and wrapper tensors have none of their own."""
    plain = type(tensor) in _PLAIN and tensor.layout is torch.strided and not tensor.is_meta
    return tensor.untyped_storage() if plain else None


def _place(tensor: Tensor) -> tuple[object, ...] | None:
    """Which memory a plain tensor lies in, and how, without keeping that alive."""
    storage = plain_storage(tensor)
    return None if storage is None else (storage._cdata, storage.nbytes(), tensor.storage_offset(), tensor.stride())


def _nbytes(tensor: Tensor) -> int | None:
    storage = plain_storage(tensor)
    return None if storage is None else storage.nbytes()


def over_storage(storage: torch.UntypedStorage, like: Tensor) -> Tensor:
    """Return a tensor over this memory with the dtype, sizes, strides and offset of another one."""
    return like.new_empty(0).set_(storage, like.storage_offset(), like.size(), like.stride())


def _same_memory(tensor: Tensor, alias: Tensor) -> bool:
    if tensor.layout is not alias.layout or _Form.of(tensor) != _Form.of(alias) or tensor.layout is not torch.strided:
        return False
    if plain_storage(alias) is None and not alias.is_meta:
        return True  # a wrapper keeps its memory in inner tensors, which are recorded on their own
    return (
        tensor.untyped_storage()._cdata == alias.untyped_storage()._cdata
        and tensor.storage_offset() == alias.storage_offset()
        and tensor.stride() == alias.stride()
    )


def _copy_back(alias: Tensor, saved: Tensor, done: set[int]) -> None:
    storage = plain_storage(alias)
    if storage is None:
        alias.copy_(saved)
    elif storage._cdata not in done:
        done.add(storage._cdata)
        raw = torch.empty(0, dtype=torch.uint8, device=alias.device)
        there, here = raw.set_(storage), raw.new_empty(0).set_(saved.untyped_storage())
        if not torch.equal(there, here):  # memory that is mapped read-only must not be written without need
            there.copy_(here)
