"""Running the steps of a key map: new tensors from original ones, and original ones from new ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fxopt_checkpoints.agreement import disagreement, nudged
from fxopt_checkpoints.sharding import holds, is_sharded, write
from fxopt_checkpoints.tensor_map import (
    Assembly,
    Derivation,
    NewTensor,
    OriginalTensor,
    Pieces,
    Step,
    TensorMap,
    listed,
)
from fxopt_core import type_text
from fxopt_core.errors import CheckpointError, NotReversibleError
from fxopt_rewrite import (
    Neutral,
    dtype_kind,
    registered_functions,
    unregistered,
)

#: The arguments of a function, by the names of its parameters.
Inputs = Mapping[str, Tensor | None]


class WrongWayBackError(NotReversibleError, CheckpointError):
    """The inverse function of a pass returns values with which the original model does not compute the same."""


@dataclass(frozen=True)
class Computed:
    """A new tensor, as regions to be written one by one."""

    target: NewTensor
    parts: tuple[tuple[Pieces, Tensor], ...]  # regions, the outermost piece first, and their values
    fills: tuple[tuple[Pieces, float], ...] = ()  # regions and the constants that stand in there
    complete: bool = True  # whether all original tensors that it is made from were given

    def write(self, tensor: Tensor) -> Tensor:
        """Write the regions into a tensor, which casts them to its dtype; return it."""
        regions: Iterable[tuple[Pieces, Tensor | float]] = (*self.parts, *self.fills)
        for pieces, values in regions:
            write(self.target.name, tensor, pieces, values)
        return tensor

    def build(self) -> Tensor:
        """Return a new tensor with the dtype and on the device of its parts."""
        if len(self.parts) == 1 and not self.parts[0][0]:
            return self.parts[0][1].detach()
        return self.write(self.parts[0][1].new_empty(self.target.shape))


class NewTensors:
    """Computes new tensors from original ones, one after the other.

    Args:
        tensor_map: the steps to run.
        original: returns the values of an original tensor by its key; None if it is not given.
        prepare: casts an argument of a function, by its key or label, and moves it to the right device.
        inspect: called with the arguments and results of each function.
    """

    def __init__(
        self,
        tensor_map: TensorMap,
        original: Callable[[str], Tensor | None],
        prepare: Callable[[str, Tensor], Tensor] = lambda label, values: values,
        inspect: Callable[[Derivation, Inputs, list[Tensor]], None] = lambda step, inputs, values: None,
    ) -> None:
        self._map, self._original, self._prepare, self._inspect = tensor_map, original, prepare, inspect
        self._derived: dict[str, Tensor] = {}
        # How many readers are to come: results of functions are dropped after the last one.
        self._uses = Counter(source for step in tensor_map.steps for source in step.sources)

    def __iter__(self) -> Iterator[Computed]:
        """Yield those tensors of the present module that a pass made, and for which any values are given."""
        for step in self._map.steps:
            if isinstance(step, Derivation):
                yield from self._derive(step)
            elif step.target.key is not None:
                computed = self._assemble(step)
                if computed.parts:
                    yield computed

    def _derive(self, step: Derivation) -> Iterator[Computed]:
        inputs = {name: None if label is None else self._input(label) for name, label in step.inputs}
        # An input without a label is absent in the original model, such as a bias; the others have to be given.
        if any(inputs[name] is None for name, label in step.inputs if label is not None):
            return
        made = [
            (target, values)
            for target, values in zip(step.outputs, _call(step, inputs), strict=True)
            if target is not None and values is not None
        ]
        self._inspect(step, inputs, [values for _, values in made])
        for target, values in made:
            if self._uses[target.label]:
                self._derived[target.label] = values
            if target.key is not None:
                yield Computed(target, (((), values),))

    def _input(self, label: str) -> Tensor | None:
        """Return an argument of a function; None if any tensor that it is made from is not given."""
        if label in self._map.assemblies:
            computed = self._assemble(self._map.assemblies[label], prepared=True)
            return computed.build() if computed.complete and computed.parts else None
        return self._leaf(label, prepared=True)

    def _leaf(self, label: str, *, prepared: bool) -> Tensor | None:
        if label in self._map.made:
            self._uses[label] -= 1
            return self._derived.get(label) if self._uses[label] else self._derived.pop(label, None)
        values = self._original(label)
        return values if values is None or not prepared else self._prepare(label, values)

    def _assemble(self, step: Assembly, *, prepared: bool = False) -> Computed:
        parts, fills, complete = [], [], True
        # Parts that are put together from parts themselves are written straight into the outermost tensor.
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


def _call(step: Derivation, inputs: Inputs) -> tuple[Tensor | None, ...]:
    """Return the results of a step's function; check that shapes are as recorded, and that it writes nothing."""
    function, before = _function(step.function, step), _versions(inputs)
    try:
        with torch.no_grad():
            results = function(**inputs, **dict(step.settings))
    except Exception as error:  # whatever a pass's own function raises
        raise CheckpointError(
            f"`{step.function}`, by which pass `{step.pass_name}` computes tensors, failed on those of the "
            f"checkpoint ({type(error).__name__}: {error})"
        ) from error
    results = (results,) if isinstance(results, Tensor) else tuple(results)
    found = [tuple(values.shape) if isinstance(values, Tensor) else None for values in results]
    expected = [None if target is None else target.shape for target in step.outputs]
    named = f"`{step.function}`, by which pass `{step.pass_name}` computes tensors,"
    if found != expected:
        raise CheckpointError(f"{named} gives tensors of shapes {found}, expected {expected}")
    if _versions(inputs) != before:
        raise CheckpointError(f"{named} writes into the tensors that it is given; it has to return new ones")
    return results


def _versions(inputs: Inputs) -> list[int | None]:
    """Return the version counters of tensors."""
    # Tensors of inference mode have no version counter.
    return [None if each is None or each.is_inference() else each._version for each in inputs.values()]


def _function(path: str, step: Derivation) -> Callable[..., Any]:
    # A ledger may be a stranger's: it reaches only functions that installed passes list as their arithmetic.
    functions = registered_functions()
    if path not in functions:
        raise CheckpointError(f"pass `{step.pass_name}` {unregistered(path)}")
    return functions[path]


_REMEDY = (
    "An inverse function has to return a tensor for each input, from which the pass computes the present values "
    "again, or to raise a NotReversibleError: report this to the author of the pass. Until then keep the original "
    "checkpoint, or save graph_module.state_dict()"
)


def trained_stand_in(step: Assembly, fill: Neutral) -> str:
    """Return the message that a region without an original no longer holds its constant."""
    return (
        f"`{step.target.name}` (pass `{step.pass_name}`) holds stand-in values, for which the original model has no "
        f"parameter, and they are no longer {fill.value:g}: they were trained or loaded. Set them to {fill.value:g}, "
        "or save graph_module.state_dict()"
    )


class OriginalTensors:
    """Restores original tensors from new ones, ``current`` by full name; ``dtypes`` are those of functions' arguments.

    Restored tensors are checked: if the functions do not compute the new tensors from them again, it is a problem.
    """

    def __init__(
        self, tensor_map: TensorMap, current: Mapping[str, Tensor], dtypes: Mapping[str, torch.dtype | None]
    ) -> None:
        self._map, self._current, self._dtypes = tensor_map, current, dtypes
        self.problems: list[str] = []  # why original values cannot be restored
        self.pass_name: str | None = None  # of the first problem
        self._is_wrong = False  # whether a function that goes back is wrong
        self._values = {each.label: current[each.name].detach() for each in tensor_map.new_tensors}
        for step in reversed(tensor_map.steps):
            if isinstance(step, Assembly):
                self._take_apart(step)
            else:
                self._restore(step)
        derives = any(isinstance(step, Derivation) for step in tensor_map.steps)
        if not self.problems and derives and not any(map(is_sharded, self._values.values())):
            self._check()

    def error(self, problems: Iterable[str] = ()) -> NotReversibleError | None:
        """Return the error that names all problems, including these, or None if there are none."""
        found = [*self.problems, *problems]
        if not found:
            return None
        cls = WrongWayBackError if self._is_wrong else NotReversibleError
        if self._is_wrong:
            found.append(_REMEDY)
        text = "\n  ".join(found)
        return cls(f"the values of the original model cannot be restored:\n  {text}", pass_name=self.pass_name)

    def has(self, row: OriginalTensor) -> bool:
        """Return whether something holds the values of an original tensor."""
        return self._map.source_of(row.key) in self._values

    def copy_of(self, row: OriginalTensor) -> Tensor:
        """Return a copy of the values of an original tensor; zeros if nothing holds them."""
        if self.has(row):
            return self._values[self._map.source_of(row.key)].clone(memory_format=torch.contiguous_format)
        return torch.zeros(row.shape or (), dtype=row.dtype)

    def _put(self, label: str, values: Tensor) -> None:
        # What the module still has is saved from there.
        row = self._map.by_key.get(label)
        if row is None or not row.kept:
            self._values[label] = values

    def _problem(self, step: Step, text: str) -> None:
        self.problems.append(text)
        self.pass_name = self.pass_name or step.pass_name

    def _wrong(self, step: Derivation, text: str) -> None:
        """Note what is wrong with the functions of a step, which their author has to fix."""
        self._is_wrong = True
        self._problem(step, f"{listed(target.name for target in step.targets)} (pass `{step.pass_name}`): {text}")

    def _take_apart(self, step: Assembly) -> None:
        whole = self._values.get(step.target.label)
        if whole is None:
            return
        for fill in step.fills:
            found = fill.piece.take(whole)
            if not found.is_meta and not holds((found == fill.value).all()):
                self._problem(step, trained_stand_in(step, fill))
        for part in step.parts:
            self._put(part.source, part.piece.take(whole))

    def _restore(self, step: Derivation) -> None:
        if any(target.label not in self._values for target in step.targets):
            return
        # Nothing to restore: the pass keeps the originals beside its results, as for keep_originals=True in int8.
        if all(self._has_copy(source) for source in step.sources):
            return
        names = listed(target.name for target in step.targets)
        if step.restore is None:
            self._problem(
                step,
                f"{names}: pass `{step.pass_name}` computes them by `{step.function}`, and has no inverse function. "
                "Keep the original checkpoint, or save graph_module.state_dict()",
            )
            return
        rows = map(self._map.by_key.get, step.sources)
        unsaved = [row.key for row in rows if row and not (row.persistent or row.kept)]
        if unsaved:
            self._problem(
                step,
                f"{names}: pass `{step.pass_name}` computes them from {listed(unsaved)}, which no state_dict has "
                "(persistent=False), so the original model would lack the value that belongs to the others. "
                "Keep the original checkpoint, or save graph_module.state_dict()",
            )
            return
        function = _function(step.restore, step)
        # Clones, since a faulty function might write into the tensors of the module.
        outputs = [None if target is None else self._values[target.label].clone() for target in step.outputs]
        shapes = {name: self._shape(label) for name, label in step.inputs}
        try:
            with torch.no_grad():
                values = function(*outputs, **dict(step.settings), shapes=shapes)
        except NotReversibleError as error:
            self._problem(step, f"{names} (pass `{step.pass_name}`): {error}")
            return
        except Exception as error:  # whatever a pass's own function raises
            text = f"`{step.restore}` failed ({type(error).__name__}: {error})"
            if any(map(is_sharded, outputs)):  # for which torch lacks some operators
                self._problem(step, f"{names} are sharded, and {text}: save graph_module.state_dict()")
            else:
                self._wrong(step, text)
            return
        wrong = [*_misfits(step, values, shapes, self._dtypes)]
        for text in wrong:
            self._wrong(step, f"`{step.restore}` gives {text}")
        device = next((each.device for each in outputs if each is not None), None)
        for name, label in () if wrong else step.inputs:
            if label is not None:
                self._put(label, values[name].detach().to(device, self._dtypes.get(label) or values[name].dtype))

    def _check(self) -> None:
        """Note where the functions do not compute the present values from the tensors to be saved."""
        new = NewTensors(self._map, self._saved, inspect=self._compare)
        try:
            for _ in new:
                pass
        except CheckpointError as error:  # a function fails, or writes
            self._is_wrong = True
            self.problems.append(str(error))

    def _saved(self, key: str) -> Tensor | None:
        """Return the values under which an original tensor is saved."""
        row = self._map.by_key.get(key)
        return self._current.get(key) if row is None or row.kept else self._values.get(key)

    def _compare(self, step: Derivation, inputs: Inputs, found: list[Tensor]) -> None:
        if all(self._has_copy(source) for source in step.sources):
            return  # the pass keeps the originals, which are saved as they are
        for place, (target, values) in enumerate(zip(step.targets, found, strict=True)):

            def moved(place: int = place) -> Iterator[Tensor]:
                for each in nudged(inputs):
                    yield [values for values in _call(step, each) if values is not None][place]

            expected = self._values.get(target.label)  # None where a later pass has dropped it
            text = None if expected is None else disagreement(values, expected, moved)
            if text is not None:
                self._wrong(
                    step,
                    f"from the results of `{step.restore}`, `{step.function}` computes a `{target.name}` that differs "
                    f"from the module's: {text}",
                )

    def _has_copy(self, source: str) -> bool:
        """Return whether a pass also keeps values that a function read in a new tensor, to restore them from."""
        return any(isinstance(step, Assembly) for step in self._map.consumers.get(source, ()))

    def _shape(self, label: str | None) -> tuple[int, ...] | None:
        return None if label is None else (self._map.by_key.get(label) or self._map.made[label]).shape


def _misfits(
    step: Derivation,
    found: object,
    shapes: Mapping[str, tuple[int, ...] | None],
    dtypes: Mapping[str, torch.dtype | None],
) -> Iterator[str]:
    """Describe the faults in the results of an inverse function, except in their values."""
    if not isinstance(found, Mapping):
        yield f"{type_text(found)}, expected a mapping of names to tensors"
        return
    inputs = {name: label for name, label in step.inputs if label is not None}
    for name, label in inputs.items():
        values, dtype = found.get(name), dtypes.get(label)
        expected = f"as `{name}` (`{label}`), expected {shapes[name]} of {dtype}"
        if not isinstance(values, Tensor):
            yield f"{type_text(values)} {expected}"
        elif tuple(values.shape) != shapes[name] or dtype_kind(values.dtype) != dtype_kind(dtype or values.dtype):
            yield f"{tuple(values.shape)} of {values.dtype} {expected}"
    for name, values in found.items():
        if name not in inputs and values is not None:
            yield f"`{name}`, which is not among the tensors of the original that `{step.function}` takes"


def present_dtypes(tensor_map: TensorMap, current: Mapping[str, Tensor]) -> dict[str, torch.dtype | None]:
    """Return the dtypes that the inputs of steps would have in the original model if it were converted like the module.

    They are those at the time of the pass. If a new tensor has another dtype now, for example after ``half()``, all
    floating-point tensors that it is made from get this dtype.
    """
    dtypes: dict[str, torch.dtype | None] = {row.key: row.dtype for row in tensor_map.originals}
    dtypes |= {target.label: target.dtype for target in tensor_map.made.values()}
    # From the last step to the first: a new dtype goes from a tensor to all that it is made from.
    changed: dict[str, torch.dtype] = {}
    for step in reversed(tensor_map.steps):
        for target in step.targets:
            now = changed.get(target.label) if target.key is None else current[target.key].dtype
            if now is not None and (target.key is None or target.dtype not in (None, now)):
                changed.update(dict.fromkeys(step.sources, now))
                break
    for label, dtype in changed.items():
        former = dtypes[label]
        if former is None or former.is_floating_point:
            dtypes[label] = dtype
    return dtypes


def present_devices(tensor_map: TensorMap, current: Mapping[str, torch.device]) -> dict[str, torch.device | None]:
    """Return the devices of the inputs of steps, by key or label: those of the tensors made from them."""
    devices: dict[str, torch.device | None] = {}
    for step in reversed(tensor_map.steps):
        found = [devices.get(t.label) if t.key is None else current[t.key] for t in step.targets]
        devices.update(dict.fromkeys(step.sources, next((each for each in found if each is not None), None)))
    return devices
