"""Whether a checkpoint fits the original model: its keys, its values, tensors computed from them, and advice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fxopt_checkpoints.arithmetic import Computed, Inputs, NewTensors
from fxopt_checkpoints.custom_loading import loads_itself
from fxopt_checkpoints.sharding import holds
from fxopt_checkpoints.tensor_map import Derivation, OriginalTensor, TensorMap, listed
from fxopt_checkpoints.trace import is_baked
from fxopt_core.errors import CheckpointError


def advice(state_dict: Mapping[Any, Any], missing: Collection[str], unexpected: Collection[str]) -> str | None:
    """Return a change that makes a checkpoint fit, if its keys show one: another prefix, or a nested mapping.

    >>> advice({"module.a.bias": 1}, ["a.bias"], ["module.a.bias"])
    "they fit without the prefix `module.`: load {key.removeprefix('module.'): value for key, value in ...items()}"
    >>> advice({"a.bias": 1}, ["model.a.bias"], ["a.bias"])
    "they fit with the prefix `model.`: load {'model.' + key: value for key, value in ...items()}"
    >>> advice({"epoch": 3, "model": {"a.bias": 1}}, ["a.bias"], ["epoch", "model"])
    'its entry `model` is a mapping with such keys: load that one'
    """
    # `unexpected` has all keys as text, so those that are not strings are not found in the checkpoint.
    lacking, others = set(missing), set(unexpected) & state_dict.keys()
    for key in others:
        inside = state_dict[key]
        if isinstance(inside, Mapping) and _explains(len(lacking & set(inside)), lacking):
            return f"its entry `{key}` is a mapping with such keys: load that one"
    for how, longer, shorter in (("without", others, lacking), ("with", lacking, others)):
        prefix = _prefix(longer, shorter)
        if _explains(sum(prefix + key in longer for key in shorter), lacking):
            change = f"key.removeprefix({prefix!r})" if how == "without" else f"{prefix!r} + key"
            return f"they fit {how} the prefix `{prefix}`: load {{{change}: value for key, value in ...items()}}"
    return None


def _explains(fitting: int, lacking: set[str]) -> bool:
    # More than half is enough, since some keys may also be missing.
    return bool(lacking) and 2 * fitting > len(lacking)


def _prefix(longer: set[str], shorter: set[str]) -> str:
    """Return the prefix, up to a dot, under which most of the shorter keys are among the longer ones."""
    cuts = ((key[: dot + 1], key[dot + 1 :]) for key in longer for dot, char in enumerate(key) if char == ".")
    found = Counter(prefix for prefix, rest in cuts if rest in shorter)
    # The order of a set of texts differs from process to process, so names decide between equal counts.
    return max(found, key=lambda prefix: (found[prefix], prefix), default="")


class Validation:
    """The tensors of a checkpoint, and everything that is wrong with it; missing tied keys are added to it."""

    where = ""  # the checkpoint is, for messages

    def __init__(
        self, tensor_map: TensorMap, state_dict: dict[Any, Any], metadata: Mapping[str, Any] | None = None
    ) -> None:
        self.names, self._state_dict, self._metadata = tensor_map, state_dict, metadata or {}
        self.given: dict[str, Tensor] = {}  # what fits, by original key
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.problems: list[str] = []  # everything else, in sentences
        for group in tensor_map.ties:
            self._complete([key for key in group if tensor_map.by_key[key].in_state_dict])

    def _complete(self, group: list[str]) -> None:
        """Add tied keys that a checkpoint omits, as safetensors files do, with the tensor of their group."""
        present = [key for key in group if key in self._state_dict]
        for key in present[1:]:
            if not _is_same(self._stored(present[0]), self._stored(key)):
                both = f"{self._named(present[0])} and {self._named(key)}"
                self.problems.append(f"{both} are one tensor in the model, and differ here: leave out one of them")
        for key in group if present else ():
            self._state_dict.setdefault(key, self._state_dict[present[0]])

    def _named(self, key: str) -> str:
        """Return a key for a message."""
        return f"`{key}`"

    def _stored(self, key: str) -> object:
        """Return the value that the checkpoint has under a key."""
        return self._state_dict[key]

    def check(self, module: nn.Module) -> None:
        """Compare keys, types and shapes, and name submodules that would load themselves."""
        self.problems += [
            f"module `{name}` ({type(each).__name__}) loads its part by its own code, or has tensors of unusual kinds: "
            "load the checkpoint into the original model, and apply the passes to that"
            for name, each in module.named_modules()
            if loads_itself(each)
        ]
        known = self.names.by_key
        for row in known.values():
            # A module with extra state loads itself, and is among the problems already.
            if row.in_state_dict and row.kind != "extra-state":
                self._check_row(row)
        for key in self._state_dict:
            # State dicts of traced modules also have the constants that tracing baked in; these are passed over.
            if key not in known or not (known[key].in_state_dict or is_baked(key)):
                self.unexpected.append(str(key))

    def _check_row(self, row: OriginalTensor) -> None:
        if row.key not in self._state_dict:
            if not self._may_be_absent(row.key):
                self.missing.append(row.key)
            return
        values = self._state_dict[row.key]
        problem = _problem(values, row)
        if problem is None:
            values = values.detach()
            self.given[row.key] = values[0] if row.shape == () and values.dim() == 1 else values
        else:
            self.problems.append(f"{self._named(row.key)} {problem}")

    def _may_be_absent(self, key: str) -> bool:
        """Return whether torch, too, accepts checkpoints without a key, from before batch norm counted batches."""
        owner, _, name = key.rpartition(".")
        version = self._metadata.get(owner, {}).get("version")
        return name == "num_batches_tracked" and (version is None or version < 2)

    def values_of(self, key: str) -> Tensor | None:
        """Return the values given for an original tensor, under any of its tied keys, or None."""
        return next((self.read(name) for name in self.names.aliases.get(key, (key,)) if name in self.given), None)

    def read(self, key: str) -> Tensor:
        """Return the values given under a key."""
        return self.given[key]

    def rehearse(
        self,
        prepare: Callable[[str, Tensor], Tensor],
        strict: bool,
        writing_problem: Callable[[Computed], str | None] = lambda computed: None,
    ) -> set[str]:
        """Compute the new tensors, note everything that would go wrong, and return the names of complete ones.

        ``prepare`` is passed to `NewTensors`; ``writing_problem`` returns why a tensor cannot be written.
        """

        def inspect(step: Derivation, inputs: Inputs, results: list[Tensor]) -> None:
            self.problems += range_problems(step, results)

        done, complete = set(), set()
        for computed in NewTensors(self.names, self.values_of, prepare, inspect):
            done.add(computed.target.label)
            complete |= {computed.target.name} if computed.complete else set()
            problem = writing_problem(computed)
            self.problems += [f"`{computed.target.key}` {problem}"] if problem else []
        # A missing key, or another problem, already explains why a tensor cannot be computed.
        if strict and not self.missing and not self.problems:
            self.problems += _unreachable(self.names, done)
        return complete

    def raise_error(self, strict: bool, current: Iterable[str]) -> None:
        """Raise an error that names everything that is wrong, if anything is; ``current`` are keys of the module."""
        lines = [*self.problems]
        if strict:
            lines += [f"missing: {listed(self.missing)}"] if self.missing else []
            lines += [f"not in the original model: {listed(self.unexpected)}"] if self.unexpected else []
            lines += self._advice(current)
        if lines:
            head = f"{self.where}this checkpoint does not fit the original model, and nothing of it was loaded:"
            raise CheckpointError(
                "\n  ".join([head, *lines]), missing_keys=self.missing, unexpected_keys=self.unexpected
            )

    def _advice(self, current: Iterable[str]) -> list[str]:
        """Return what to do about missing and unexpected keys."""
        if set(self.unexpected) & set(current):
            return ["some are keys of the rewritten model: load those with graph_module.load_state_dict"]
        found = advice(self._state_dict, self.missing, self.unexpected)
        if found is None and (self.missing or self.unexpected) and not self.problems:
            found = "strict=False loads what is there"
        return [] if found is None else [found]


def _problem(values: object, row: OriginalTensor) -> str | None:
    """Describe what is wrong with a value, or return None."""
    if not isinstance(values, Tensor):
        return f"is of type {type(values).__name__}, expected a tensor of shape {row.shape}"
    if values.layout != torch.strided or values.is_quantized:
        return "is sparse or quantized, expected a dense tensor"
    # As in torch, a number may come as a tensor of one element.
    if tuple(values.shape) != row.shape and not (row.shape == () and tuple(values.shape) == (1,)):
        return f"has shape {tuple(values.shape)}, expected {row.shape}"
    return None


def copying_problem(values: Tensor, target: Tensor) -> str | None:
    """Describe why values cannot replace those of a tensor, or return None."""
    if target.is_meta and not values.is_meta:
        return "is on the meta device in the model and holds nothing: load_checkpoint fills it from a file"
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in inference mode in the model: load under torch.inference_mode()"
    if values.is_meta and not target.is_meta:
        return "is on the meta device in the checkpoint and holds nothing: read the checkpoint onto another device"
    return None


def range_problems(step: Derivation, results: Iterable[Tensor]) -> Iterator[str]:
    """Describe computed weights that would not be finite, by the first one."""
    floats = (values for values in results if values.is_floating_point() and not values.is_meta)
    wrong = next((values for values in floats if not holds(values.isfinite().all())), None)
    if wrong is not None:
        yield (
            f"`{step.targets[0].name.rpartition('.')[0]}`, computed from {listed(step.sources)}, would not be finite "
            f"in {wrong.dtype}; pass `{step.pass_name}` refuses such weights (out-of-range). Load them into the "
            "original model, which it then leaves as it is"
        )


def _unreachable(tensor_map: TensorMap, done: Collection[str]) -> Iterator[str]:
    """Describe tensors that cannot be computed though no key is missing; ``done`` has the labels of the others."""
    for step in tensor_map.steps:
        keys = [target.key for target in step.targets if target.key is not None and target.label not in done]
        if isinstance(step, Derivation) and keys:
            yield (
                f"`{keys[0]}` is computed by pass `{step.pass_name}` from tensors that no checkpoint has, such as "
                "buffers that are not persistent; apply the pass to the original model after loading it"
            )


def _is_same(one: object, other: object) -> bool:
    """Return whether two values are equal tensors, bit for bit up to the sign of zeros; NaN equals NaN."""
    if one is other or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other
    if one.shape != other.shape or one.is_meta or other.is_meta:
        return True  # wrong shapes are found elsewhere, and there are no values to compare
    other = other.to(one.device)
    return bool(((one == other) | ((one != one) & (other != other))).all())
