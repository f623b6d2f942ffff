"""The steps of a key map with tensors: new tensors from original ones, and original ones from new ones."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxopt_core.errors import CheckpointError, NotReversibleError
from fxopt_core.key_map import Assembly, Derivation, KeyMap, NewTensor, Step, sources_of, targets_of
from fxopt_core.ledger_rows import Piece

Pieces = tuple[Piece, ...]


@dataclass(frozen=True)
class Computed:
    """A new tensor, as regions that are to be written one by one.

    Attributes:
        target: which one.
        parts: pairs of a region, the outermost piece first, and its values.
        fills: pairs of a region and the constant that stands in there.
        complete: whether all original tensors that go into it were given.
    """

    target: NewTensor
    parts: tuple[tuple[Pieces, Tensor], ...]
    fills: tuple[tuple[Pieces, float], ...] = ()
    complete: bool = True

    def write(self, tensor: Tensor) -> Tensor:
        """Write the regions into a tensor, which casts them to its dtype; return it."""
        with torch.no_grad():
            for pieces, values in self.parts:
                region(tensor, pieces).copy_(values)
            for pieces, value in self.fills:
                region(tensor, pieces).fill_(value)
        return tensor

    def build(self) -> Tensor:
        """Return a new tensor with the dtype and on the device of what goes into it."""
        if len(self.parts) == 1 and not self.parts[0][0]:
            return self.parts[0][1].detach()
        return self.write(self.parts[0][1].new_empty(self.target.shape))


def region(tensor: Tensor, pieces: Pieces) -> Tensor:
    """Return the view of a tensor that nested pieces take."""
    for piece in pieces:
        tensor = piece.take(tensor)
    return tensor


class NewTensors:
    """Computes new tensors from original ones, one after the other.

    Args:
        key_map: how.
        original: returns the values of an original tensor by its key; None where it is not given.
        prepare: returns values as a function is to get them, by key or label: cast, and on the right device.
        inspect: is shown each tensor that a function computes.
    """

    def __init__(
        self,
        key_map: KeyMap,
        original: Callable[[str], Tensor | None],
        prepare: Callable[[str, Tensor], Tensor] = lambda label, values: values,
        inspect: Callable[[Derivation, Tensor], None] = lambda step, values: None,
    ) -> None:
        self._map, self._original, self._prepare, self._inspect = key_map, original, prepare, inspect
        self._derived: dict[str, Tensor] = {}
        self._made = {target.label for step in key_map.steps for target in targets_of(step)}
        self._uses = Counter(source for step in key_map.steps for source in sources_of(step))

    def __iter__(self) -> Iterator[Computed]:
        """Yield the tensors of the module as it is now that a pass made and for which something is given."""
        for step in self._map.steps:
            if isinstance(step, Derivation):
                yield from self._derive(step)
            elif step.target.key is not None:
                computed = self._assemble(step)
                if computed.parts:
                    yield computed

    def _derive(self, step: Derivation) -> Iterator[Computed]:
        inputs = {name: None if label is None else self._input(label) for name, label in step.inputs}
        if any(inputs[name] is None for name, label in step.inputs if label is not None):
            return
        function = function_of(step.function, step)
        try:
            with torch.no_grad():
                results = function(**inputs, **dict(step.settings))
        except Exception as error:  # whatever a pass's own function raises
            raise CheckpointError(
                f"`{step.function}`, by which pass `{step.pass_name}` computes tensors, failed on those of the "
                f"checkpoint ({type(error).__name__}: {error})"
            ) from error
        results = (results,) if isinstance(results, Tensor) else tuple(results)
        check_results(step, results)
        for target, values in zip(step.outputs, results, strict=True):
            if target is None or values is None:
                continue
            self._inspect(step, values)
            if self._uses[target.label]:
                self._derived[target.label] = values
            if target.key is not None:
                yield Computed(target, (((), values),))

    def _input(self, label: str) -> Tensor | None:
        """Return what a function reads; None where something that goes into it is not given."""
        if label in self._map.assemblies:
            computed = self._assemble(self._map.assemblies[label], prepared=True)
            return computed.build() if computed.complete and computed.parts else None
        return self._leaf(label, prepared=True)

    def _leaf(self, label: str, *, prepared: bool) -> Tensor | None:
        if label in self._made:
            self._uses[label] -= 1
            return self._derived.get(label) if self._uses[label] else self._derived.pop(label, None)
        values = self._original(label)
        return values if values is None or not prepared else self._prepare(label, values)

    def _assemble(self, step: Assembly, *, prepared: bool = False) -> Computed:
        parts, fills, complete = [], [], True
        waiting: list[tuple[Assembly, Pieces]] = [(step, ())]
        while waiting:
            each, outer = waiting.pop()
            fills += [((*outer, fill.piece), fill.value) for fill in each.fills]
            for part in each.parts:
                pieces = (*outer, part.piece)
                if part.source in self._map.assemblies:
                    waiting.append((self._map.assemblies[part.source], pieces))
                    continue
                values = self._leaf(part.source, prepared=prepared)
                complete = complete and values is not None
                if values is not None:
                    parts.append((pieces, values))
        return Computed(step.target, tuple(parts), tuple(fills), complete)


class OriginalTensors:
    """Takes original tensors out of new ones.

    Args:
        key_map: how they went in.
        current: the tensors of the module as it is now that a pass made, by full name.
        dtypes: the dtypes of what functions read, by key or label.
    """

    def __init__(
        self, key_map: KeyMap, current: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype | None]
    ) -> None:
        self._map, self._dtypes = key_map, dtypes
        self._made = {target.label: target for step in key_map.steps for target in targets_of(step)}
        self.devices: dict[str, torch.device] = {}
        self.problems: list[str] = []
        self.pass_name: str | None = None
        self._values: dict[str, Tensor] = {}
        for target in self._made.values():
            if target.key is not None:
                self._values[target.label] = current[target.key].detach()

    def run(self) -> dict[str, Tensor]:
        """Return views of the new tensors, or newly computed tensors, by original key; of tied ones, by the first."""
        for step in reversed(self._map.steps):
            for target in targets_of(step):
                if target.label in self._values:
                    self.devices[target.label] = self._values[target.label].device
            if isinstance(step, Assembly):
                self._take_apart(step)
            else:
                self._restore(step)
        return {label: values for label, values in self._values.items() if label not in self._made}

    def _put(self, label: str, values: Tensor) -> None:
        row = self._map.by_key.get(label)
        if row is None or not row.kept:
            self._values[label] = values

    def _problem(self, step: Step, text: str) -> None:
        self.problems.append(text)
        self.pass_name = self.pass_name or step.pass_name

    def _take_apart(self, step: Assembly) -> None:
        whole = self._values.get(step.target.label)
        if whole is None:
            return
        for fill in step.fills:
            found = fill.piece.take(whole)
            if not found.is_meta and not bool((found == fill.value).all()):
                name = step.target.key or step.target.label
                self._problem(
                    step,
                    f"`{name}` (pass `{step.pass_name}`) holds stand-in values, for which the original model has no "
                    f"parameter, and they are no longer {fill.value:g}: they were trained or loaded. Set them to "
                    f"{fill.value:g}, or save graph_module.state_dict()",
                )
        for part in step.parts:
            self._put(part.source, part.piece.take(whole))

    def _restore(self, step: Derivation) -> None:
        names = ", ".join(f"`{target.key or target.label}`" for target in targets_of(step))
        found = [None if target is None else self._values.get(target.label) for target in step.outputs]
        if any(values is None for target, values in zip(step.outputs, found, strict=True) if target is not None):
            return
        if step.restore is None:
            self._problem(
                step,
                f"{names}: pass `{step.pass_name}` computes them by `{step.function}` and has no function that goes "
                "back. Keep the original checkpoint, or save graph_module.state_dict()",
            )
            return
        shapes = {name: self._shape(label) for name, label in step.inputs}
        function = function_of(step.restore, step)
        try:
            with torch.no_grad():
                values = function(*found, **dict(step.settings), shapes=shapes)
        except NotReversibleError as error:
            self._problem(step, f"{names} (pass `{step.pass_name}`): {error}")
            return
        except Exception as error:  # whatever a pass's own function raises
            self._problem(step, f"{names}: `{step.restore}` failed ({type(error).__name__}: {error})")
            return
        for name, label in step.inputs:
            if label is None:
                continue
            restored = values.get(name)
            if restored is None or tuple(restored.shape) != shapes[name]:
                shape = None if restored is None else tuple(restored.shape)
                self._problem(step, f"`{step.restore}` gives {shape} as `{name}` of {names}, expected {shapes[name]}")
                continue
            self._put(label, restored.to(self._dtypes.get(label) or restored.dtype))

    def _shape(self, label: str | None) -> tuple[int, ...] | None:
        if label is None:
            return None
        if label in self._map.by_key:
            return self._map.by_key[label].shape
        return self._made[label].shape


def function_of(path: str, step: Derivation) -> Callable[..., Any]:
    """Return the function with this ``"module:name"``.

    Raises:
        CheckpointError: There is none here.
    """
    module, _, name = path.partition(":")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise CheckpointError(
            f"`{path}`, by which pass `{step.pass_name}` computes tensors, cannot be imported ({error}): install the "
            "package that the pass comes from"
        ) from error
    return found


def check_results(step: Derivation, results: tuple[object, ...]) -> None:
    """Check that a function returned what it was recorded to.

    Raises:
        CheckpointError: It did not.
    """
    found = [tuple(values.shape) if isinstance(values, Tensor) else None for values in results]
    expected = [None if target is None else target.shape for target in step.outputs]
    if found != expected:
        raise CheckpointError(f"`{step.function}` gives tensors of shapes {found}, expected {expected}")


def present_dtypes(key_map: KeyMap, current: Mapping[str, Tensor]) -> dict[str, torch.dtype | None]:
    """Return the dtypes that what steps read would have in the original model, were it as the module is now.

    They are those at the time of the pass. Where a new tensor has another dtype now, after ``half()`` say, all
    floating-point tensors that it comes from have that one.
    """
    dtypes: dict[str, torch.dtype | None] = {row.key: row.dtype for row in key_map.originals}
    dtypes |= {target.label: target.dtype for step in key_map.steps for target in targets_of(step)}
    changed: dict[str, torch.dtype] = {}
    for step in reversed(key_map.steps):
        found = [_change(target, current, changed) for target in targets_of(step)]
        dtype = next((each for each in found if each is not None), None)
        if dtype is not None:
            changed.update(dict.fromkeys(sources_of(step), dtype))
    for label, dtype in changed.items():
        former = dtypes[label]
        if former is None or former.is_floating_point:
            dtypes[label] = dtype
    return dtypes


def present_devices(key_map: KeyMap, current: Mapping[str, Tensor]) -> dict[str, torch.device | None]:
    """Return the devices of what steps read, by key or label: those of what comes of it."""
    devices: dict[str, torch.device | None] = {}
    for step in reversed(key_map.steps):
        found = [devices.get(t.label) if t.key is None else current[t.key].device for t in targets_of(step)]
        devices.update(dict.fromkeys(sources_of(step), next((each for each in found if each is not None), None)))
    return devices


def _change(target: NewTensor, current: Mapping[str, Tensor], changed: Mapping[str, torch.dtype]) -> torch.dtype | None:
    """Return the dtype that a new tensor has now, or would have, if that is another one than when it was made."""
    if target.key is None:
        return changed.get(target.label)
    now = current[target.key].dtype
    return now if target.dtype not in (None, now) else None
