"""One set of weights with a rewritten graph, which is derived again once the weights change.

A rewritten graph reads three kinds of tensors. Weights that it reads itself are its inputs, so that they are the
model's own at each call. Layers that passes insert may hold weights unchanged, as packed layers do: there the graph
has tensors with the same memory and version. Weights that passes compute (merged, folded, quantized) are computed again
by the steps that the ledger records, as when a checkpoint of the original model is loaded into a rewritten one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_checkpoints.arithmetic import NewTensors
from fxopt_checkpoints.key_map import KeyMap
from fxopt_checkpoints.trace import key_map
from fxopt_compile._torch import without_autocast
from fxopt_compile.lifting import Weight, alias_of, lift_again, with_attributes
from fxopt_core import FxoptError, Record, Transformation, history
from fxopt_rewrite import Watched

Run = Callable[..., Any]
Values = Sequence[Any]

(_ONE_HOLDER,) = map(sys.getrefcount, (object(),))  # and what counting itself holds


class Binding:
    """A rewritten graph over one set of weights.

    Args:
        graph_module: dynamo's.
        weights: the weights among its inputs.
        tensors: their values now.
        passes: the pipeline.

    Attributes:
        records: what the passes did.
        call: the rewritten graph.
        takes: the indices of the inputs that it takes, in order.
        tensors: the values of the weights that anything is made of. They are kept alive until `is_left` says that
            nothing else does: a weak reference would tell at once, but ``torch.utils.swap_tensors`` fails with one.
    """

    def __init__(
        self, graph_module: GraphModule, weights: Sequence[Weight], tensors: Sequence[Tensor], passes: Transformation
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
        inputs = range(len(graph_module.graph.find_nodes(op="placeholder")))
        others = sorted({*inputs} - {weight.place for weight in weights})
        self.takes = (*(weight.place for weight in read), *others)
        self.call: Run = self._module.forward
        self._places: list[tuple[nn.Module, str, str, Weight]] = []
        self._made: dict[str, Tensor] = {}
        self._find(by_id)
        made = {id(tensor) for tensor in self._made.values()}
        # Whether each tensor is a weight, a constant of dynamo, or made by a step of the ledger. Otherwise, it may hold
        # any weight: all weights are watched, and after a change the passes run again.
        self._is_explained = {id(each) for each in _tensors_of(self._module)} <= made | baked and not self._map.ties
        read_by_passes = {weight for *_, weight in self._places} | set(self._sources(weights))
        self._weights = tuple(each for each in weights if each in read_by_passes or not self._is_explained)
        self.tensors = tuple(tensor for weight, tensor in zip(weights, tensors, strict=True) if weight in self._weights)
        self._own_places = tuple(weight.place for weight in self._weights)
        # Also by four words of each: PEFT writes through `parameter.data`, which changes no version. Merging in the
        # graph would copy weights at each call, and views of merged memory would move parameters.
        self._made_of = Watched(self.tensors)

    def _find(self, by_id: Mapping[int, Weight]) -> None:
        """Note where weights are in layers, and which tensors the passes made."""
        for module_name, module in self._module.named_modules():
            for table in ("_parameters", "_buffers"):  # by name: a layer may replace the dictionary
                for name, tensor in vars(module)[table].items():
                    if tensor is None:
                        continue
                    if id(tensor) in by_id:
                        self._places.append((module, table, name, by_id[id(tensor)]))
                    else:
                        self._made[f"{module_name}.{name}" if module_name else name] = tensor
        keys = {target.key for target in self._map.new_tensors}
        self._made = {key: tensor for key, tensor in self._made.items() if key in keys}

    def _sources(self, weights: Iterable[Weight]) -> Iterator[Weight]:
        """Yield the weights from which steps compute a tensor of this graph."""
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

    def _own(self, values: Values) -> list[Any]:
        return [values[place] for place in self._own_places]

    def is_of(self, values: Values) -> bool:
        """Return whether the weights among a graph's inputs are the tensors that this was made for."""
        return self._made_of.are(self._own(values))

    def is_current(self, values: Values) -> bool:
        """Return whether these are the weights, unchanged since."""
        return self._made_of.hold(self._own(values))

    def shares_memory(self, values: Iterable[Tensor]) -> bool:
        """Return whether a tensor lies in the memory of a weight."""
        return self._made_of.share_memory(values)

    def is_left(self, held: Mapping[int, int]) -> bool:
        """Return whether a weight has moved to other memory, or only bindings hold it: then this one is of no use.

        Args:
            held: how many bindings hold each tensor, by id.
        """
        tensors: tuple[Any, ...] = self.tensors
        counts = list(map(sys.getrefcount, tensors))
        return self._made_of.have_moved(tensors) or any(
            # References from Python other than those of bindings, and references from C++, such as those of autograd.
            count - _ONE_HOLDER < held[id(each)] and each._use_count() == 1
            for each, count in zip(tensors, counts, strict=True)
        )

    def reads(self, ids: Container[int]) -> bool:
        """Return whether anything is derived from a tensor with one of these ids."""
        return any(id(each) in ids for each in self.tensors)

    def refresh(self, values: Values) -> bool:
        """Derive everything again from the present weights; return whether that works and is finite."""
        if not self._is_explained:
            return False
        tensors: list[Tensor] = self._own(values)
        current = {weight.name: tensor for weight, tensor in zip(self._weights, tensors, strict=True)}

        def original(key: str) -> Tensor | None:
            return current[key].detach().contiguous() if key in current else None

        with plainly():
            # Noted first: a write by another thread meanwhile is then seen at the next call.
            noted = Watched(tensors)
            for module, table, name, weight in self._places:
                vars(module)[table][name] = alias_of(current[weight.name])
            try:
                for computed in NewTensors(self._map, original):
                    made = self._made.get(computed.target.name)
                    # A pass would refuse a fold that is not finite.
                    if made is not None and not bool(computed.write(made.detach()).isfinite().all()):
                        return False
            except FxoptError:
                return False
        self._made_of = noted
        return True


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    for each in module.modules():
        yield from (value for value in vars(each).values() if isinstance(value, Tensor))
        yield from (value for value in (*each._parameters.values(), *each._buffers.values()) if value is not None)


@contextmanager
def plainly() -> Iterator[None]:
    """Compute without gradients, autocast and inference mode."""
    with torch.inference_mode(False), torch.no_grad(), without_autocast():
        yield
