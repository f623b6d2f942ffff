"""One set of weights, and what the passes made of them: kept until the weights change, and then made again.

A rewritten graph reads three kinds of tensors. Weights that it reads itself are its inputs, so that they are the
model's own at each call. Layers that passes put in may hold weights as they are, as packed ones do: there it has
tensors of the same memory and version. What passes compute (merged, folded, quantized weights) is computed again by the
steps that the ledger records, which is how checkpoints of the original model are loaded into a rewritten one.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter, eq
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_checkpoints.arithmetic import NewTensors
from fxopt_checkpoints.key_map import KeyMap
from fxopt_checkpoints.trace import key_map
from fxopt_compile.lifting import Weight, alias_of, lift_again, with_attributes
from fxopt_core.errors import FxoptError
from fxopt_core.ledger.history import history
from fxopt_core.ledger.records import Record
from fxopt_core.passes.transformation import Transformation

Run = Callable[..., Any]
Values = Sequence[Any]
State = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]

_version = attrgetter("_version")
_Word = ctypes.c_uint64 * 1
_SAMPLES = 4


def state_of(tensors: Iterable[Tensor]) -> State:
    """Return what is different once a tensor is another one, was written, or has other memory."""
    found = tuple(tensors)
    return tuple(map(id, found)), tuple(map(_version, found)), tuple(map(Tensor.data_ptr, found))


class Samples:
    """A few numbers of each weight in memory: ``weight.data.mul_(2)`` changes them, and no version.

    They are read where they lie, which is safe as long as the weights have the memory that they had.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._words = [_Word.from_address(place) for each in tensors for place in _places(each)]
        self._values = b"".join(self._words)  # the fastest way to read many words: 30 ns each

    def hold(self) -> bool:
        """Return whether the numbers are what they were."""
        return b"".join(self._words) == self._values


def _places(tensor: Tensor) -> Iterator[int]:
    words = tensor.numel() * tensor.element_size() // 8
    dense = (
        tensor.is_cpu
        and tensor.layout is torch.strided
        and (tensor.is_contiguous() or tensor.mT.is_contiguous() if tensor.dim() > 1 else tensor.is_contiguous())
    )
    if dense and words:
        yield from (tensor.data_ptr() + 8 * place for place in {words * each // _SAMPLES for each in range(_SAMPLES)})


class Binding:
    """A rewritten graph over one set of weights.

    Args:
        graph_module: dynamo's.
        weights: the weights among its inputs.
        tensors: their values now.
        passes: the pipeline.
        forget: is called once one of the weights is gone.

    Attributes:
        records: what the passes did.
        call: the rewritten graph.
        takes: the places of the inputs that it takes, in order.
    """

    def __init__(
        self,
        graph_module: GraphModule,
        weights: Sequence[Weight],
        tensors: Sequence[Tensor],
        passes: Transformation,
        forget: Callable[[Binding], None],
    ) -> None:
        with plainly():
            aliases = {weight: alias_of(tensor) for weight, tensor in zip(weights, tensors, strict=True)}
            original = with_attributes(graph_module, aliases)
            baked = {id(tensor) for tensor in _tensors_of(original)}
            rewritten = passes(original)
            self.records: tuple[Record, ...] = tuple(history(rewritten))
            self._map: KeyMap = key_map(rewritten)
            by_id = {id(alias): weight for weight, alias in aliases.items()}
            self._module, read = rewritten, lift_again(rewritten, by_id)
        others = sorted({*range(_inputs_of(graph_module))} - {weight.place for weight in weights})
        self.takes = (*(weight.place for weight in read), *others)
        self.call: Run = self._module.forward
        self._places: list[tuple[dict[str, Any], str, Weight]] = []
        self._made: dict[str, Tensor] = {}
        self._find(by_id)
        made = {id(tensor) for tensor in self._made.values()}
        self._is_explained = {id(each) for each in _tensors_of(self._module)} <= made | baked and not self._map.ties
        read_by_passes = {weight for _, _, weight in self._places} | set(self._sources(weights))
        self._weights = tuple(
            weights if not self._is_explained else [each for each in weights if each in read_by_passes]
        )
        found = [tensor for weight, tensor in zip(weights, tensors, strict=True) if weight in self._weights]
        this = weakref.ref(self)

        def gone(_: object) -> None:
            binding = this()
            if binding is not None:
                forget(binding)

        self._references = [weakref.ref(tensor, gone) for tensor in found]
        self._own_places = tuple(weight.place for weight in self._weights)
        self._made_of = self._noted(found)

    def _find(self, by_id: Mapping[int, Weight]) -> None:
        """Note where weights are in layers, and which tensors the passes made."""
        for module_name, module in self._module.named_modules():
            for table in (module._parameters, module._buffers):
                for name, tensor in table.items():
                    if tensor is None:
                        continue
                    if id(tensor) in by_id:
                        self._places.append((table, name, by_id[id(tensor)]))
                    else:
                        self._made[f"{module_name}.{name}" if module_name else name] = tensor
        keys = {target.key for target in self._map.new_tensors}
        self._made = {key: tensor for key, tensor in self._made.items() if key in keys}

    def _sources(self, weights: Iterable[Weight]) -> Iterator[Weight]:
        """Yield the weights that steps read which make a tensor of this graph."""
        by_name = {weight.name: weight for weight in weights}
        labels = {target.key: target.label for target in self._map.new_tensors}
        steps = {target.label: step for step in self._map.steps for target in step.targets}
        waiting, seen = [labels[key] for key in self._made], set[str]()
        while waiting:
            label = waiting.pop()
            if label in by_name and label not in steps:
                yield by_name[label]
            elif label in steps and label not in seen:
                waiting += steps[label].sources
            seen.add(label)

    def _noted(self, tensors: Sequence[Tensor]) -> _Made:
        """Return of which weights all is made, if it is made of them now."""
        aliases = [tensor.detach() for tensor in tensors]
        return _Made(*state_of(tensors), Samples(tensors), {_memory(alias): alias for alias in aliases})

    def _own(self, values: Values) -> list[Any]:
        return [values[place] for place in self._own_places]

    def is_of(self, values: Values) -> bool:
        """Return whether the weights among a graph's inputs are the tensors that this was made for."""
        return all(map(eq, map(id, self._own(values)), self._made_of.ids))

    def is_current(self, values: Values) -> bool:
        """Return whether they are, and have not changed since."""
        tensors, made = self._own(values), self._made_of
        return (
            all(map(eq, map(id, tensors), made.ids))
            and all(map(eq, map(_version, tensors), made.versions))
            and all(map(eq, map(Tensor.data_ptr, tensors), made.pointers))
            and made.samples.hold()
        )

    def shares_memory(self, values: Iterable[Tensor]) -> bool:
        """Return whether a tensor lies in the memory of a weight."""
        return any(_memory(value) in self._made_of.memory for value in values)

    def is_left(self) -> bool:
        """Return whether a weight has other memory now, so that what is kept of the former is of no use."""
        tensors = [reference() for reference in self._references]
        pairs = zip(tensors, self._made_of.pointers, strict=True)
        return any(tensor is None or tensor.data_ptr() != pointer for tensor, pointer in pairs)

    def reads(self, ids: Container[int]) -> bool:
        """Return whether anything is made of a tensor with one of these ids."""
        return any(each in ids for each in self._made_of.ids)

    def refresh(self, values: Values) -> bool:
        """Make everything again of the weights as they are; return whether that can be done and is finite."""
        if not self._is_explained:
            return False
        tensors: list[Tensor] = self._own(values)
        current = {weight.name: tensor for weight, tensor in zip(self._weights, tensors, strict=True)}

        def original(key: str) -> Tensor | None:
            return current[key].detach().contiguous() if key in current else None

        with plainly():
            noted = self._noted(tensors)
            for table, name, weight in self._places:
                table[name] = alias_of(current[weight.name])
            try:
                for computed in NewTensors(self._map, original):
                    made = self._made.get(computed.target.name)
                    if made is not None and not bool(computed.write(made.detach()).isfinite().all()):
                        return False
            except FxoptError:
                return False
        self._made_of = noted
        return True


class _Made(NamedTuple):
    """Of which weights all is made."""

    ids: tuple[int, ...]
    versions: tuple[int, ...]
    pointers: tuple[int, ...]
    samples: Samples
    memory: dict[int, Tensor]  # held, so that no other tensor gets its place


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    for each in module.modules():
        yield from (value for value in vars(each).values() if isinstance(value, Tensor))
        yield from (value for value in (*each._parameters.values(), *each._buffers.values()) if value is not None)


def _inputs_of(graph_module: GraphModule) -> int:
    return sum(node.op == "placeholder" for node in graph_module.graph.nodes)


@contextmanager
def plainly() -> Iterator[None]:
    """Compute without gradients, autocast and inference mode."""
    with torch.inference_mode(False), torch.no_grad(), torch._C._DisableAutocast():
        yield
