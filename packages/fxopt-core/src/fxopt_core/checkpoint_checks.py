"""What a checkpoint of an original model lacks, has too much, or has wrongly, before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fxopt_core.checkpoint_advice import advice
from fxopt_core.errors import CheckpointError
from fxopt_core.key_map import Derivation, KeyMap, OriginalTensor
from fxopt_core.key_tree import is_baked
from fxopt_core.self_loading import SelfLoading, is_unusual


class Checked:
    """The tensors of a checkpoint, and all that is wrong with it.

    Args:
        key_map: what the original model has.
        state_dict: the checkpoint; tied keys that are left out are added to it.
        metadata: its ``_metadata``, or None.

    Attributes:
        given: the tensors that fit, by original key.
        missing: the keys that it lacks.
        unexpected: the keys that it has too much.
        problems: everything else, in sentences.
    """

    def __init__(self, key_map: KeyMap, state_dict: dict[Any, Any], metadata: Mapping[str, Any] | None) -> None:
        self._map, self._state_dict, self._metadata = key_map, state_dict, metadata
        self.given: dict[str, Tensor] = {}
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.problems: list[str] = []
        for group in key_map.ties:
            self._complete([key for key in group if key_map.by_key[key].in_state_dict])

    def _complete(self, group: list[str]) -> None:
        """Give tied keys that a checkpoint leaves out, as safetensors files do, the tensor of their group."""
        present = [key for key in group if key in self._state_dict]
        if not present:
            return
        first = self._state_dict[present[0]]
        for key in present[1:]:
            if not is_same(first, self._state_dict[key]):
                self.problems.append(
                    f"`{present[0]}` and `{key}` are one tensor in the model, and differ here: leave out one of them"
                )
        for key in group:
            self._state_dict.setdefault(key, first)

    def check(self, own: SelfLoading) -> None:
        """Compare keys, types and shapes; what modules load themselves is theirs."""
        known = self._map.by_key
        for key, row in known.items():
            if row.in_state_dict and not (row.kept and own.owns(key)):
                self._check_row(row)
        for key in self._state_dict:
            if not isinstance(key, str):
                self.unexpected.append(str(key))
                continue
            if key in known and (known[key].in_state_dict or is_baked(key)):
                continue
            if (key in known and not known[key].kept) or not own.owns(key):
                self.unexpected.append(key)
        self.missing += own.missing
        self.unexpected += [key for key in own.unexpected if key not in known or known[key].kept]
        self.problems += own.problems

    def _check_row(self, row: OriginalTensor) -> None:
        if row.key not in self._state_dict:
            if not self._may_be_absent(row.key):
                self.missing.append(row.key)
            return
        values = self._state_dict[row.key]
        problem = _problem(values, row)
        if problem is not None:
            self.problems.append(f"`{row.key}` {problem}")
            return
        values = values.detach()
        self.given[row.key] = values[0] if row.shape == () and values.dim() == 1 else values

    def _may_be_absent(self, key: str) -> bool:
        """Return whether torch, too, takes checkpoints without a key: those from before batch norm counted batches."""
        owner, _, name = key.rpartition(".")
        version = (self._metadata or {}).get(owner, {}).get("version")
        return name == "num_batches_tracked" and (version is None or version < 2)

    def error(self, strict: bool, current: Iterable[str]) -> CheckpointError | None:
        """Return the error that names all that is wrong; None where that is nothing."""
        lines = [*self.problems]
        if strict:
            lines += [f"missing: {_listed(self.missing)}"] if self.missing else []
            lines += [f"not in the original model: {_listed(self.unexpected)}"] if self.unexpected else []
            lines += self._advice(current)
        if not lines:
            return None
        text = "\n  ".join(lines)
        return CheckpointError(
            f"this checkpoint does not fit the original model, and nothing of it was loaded:\n  {text}",
            missing_keys=self.missing,
            unexpected_keys=self.unexpected,
        )

    def _advice(self, current: Iterable[str]) -> list[str]:
        """Return what to do about missing and unexpected keys."""
        if set(self.unexpected) & set(current):
            return ["some are keys of the rewritten model: load those with graph_module.load_state_dict"]
        found = advice(self._state_dict, self.missing, self.unexpected)
        if found is None and (self.missing or self.unexpected) and not self.problems:
            found = "strict=False loads what is there"
        return [] if found is None else [found]


def _listed(keys: Iterable[str]) -> str:
    return ", ".join(f"`{key}`" for key in keys)


def _problem(values: object, row: OriginalTensor) -> str | None:
    """Say what is wrong with a value, if anything is."""
    if not isinstance(values, Tensor):
        return f"is of type {type(values).__name__}, expected a tensor of shape {row.shape}"
    if values.layout != torch.strided or values.is_quantized:
        return "is sparse or quantized, expected a dense tensor"
    # As in torch, a number may come as a tensor of one element.
    if tuple(values.shape) != row.shape and not (row.shape == () and tuple(values.shape) == (1,)):
        return f"has shape {tuple(values.shape)}, expected {row.shape}"
    return None


def copying_problem(values: Tensor, target: Tensor, assign: bool) -> str | None:
    """Say why values cannot take the place of those of a tensor, if they cannot."""
    if assign:
        wrong = target.requires_grad and not (values.is_floating_point() or values.is_complex())
        return f"is {values.dtype}, and a parameter that is trained cannot be" if wrong else None
    if target.is_meta and not values.is_meta:
        return "is on the meta device in the model and holds nothing: pass assign=True, which puts new tensors there"
    if target.is_inference() and not torch.is_inference_mode_enabled():
        return "was made in inference mode in the model, and can be written in that mode alone: pass assign=True"
    if values.is_meta and not target.is_meta:
        return "is on the meta device in the checkpoint and holds nothing: read the checkpoint onto another device"
    if is_unusual(values):
        try:
            torch.empty_like(target).copy_(values)
        except Exception as error:  # whatever a subclass makes of it
            return f"is a {type(values).__name__} that cannot be copied ({error})"
    return None


def range_problem(step: Derivation, values: Tensor) -> str | None:
    """Say which computed weights would not be finite, if these are not."""
    if values.is_meta or not values.is_floating_point() or bool(values.isfinite().all()):
        return None
    sources = ", ".join(f"`{label}`" for _, label in step.inputs if label is not None)
    name = next(target.key or target.label for target in step.outputs if target is not None)
    return (
        f"`{name.rpartition('.')[0]}`, computed from {sources}, would not be finite in {values.dtype}; pass "
        f"`{step.pass_name}` refuses such weights (out-of-range). Load them into the original model, which it then "
        "leaves as it is"
    )


def unreachable(key_map: KeyMap, done: Collection[str]) -> list[str]:
    """Return what cannot be computed though no key is missing.

    Args:
        key_map: how tensors are computed.
        done: the labels of those that were.
    """
    found = []
    for step in key_map.steps:
        outputs = [] if not isinstance(step, Derivation) else [each for each in step.outputs if each is not None]
        keys = [each.key for each in outputs if each.key is not None and each.label not in done]
        if keys:
            found.append(
                f"`{keys[0]}` is computed by pass `{step.pass_name}` from tensors that no checkpoint has, such as "
                "buffers that are not persistent; apply the pass to the original model after loading it"
            )
    return found


def is_same(one: object, other: object) -> bool:
    """Return whether two values are equal tensors, bit for bit up to the sign of zeros; NaN equals NaN."""
    if one is other or not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return one is other
    if one.shape != other.shape or one.is_meta or other.is_meta:
        return True  # whether the shapes are right is told elsewhere, and there are no values to compare
    other = other.to(one.device)
    return bool(((one == other) | ((one != one) & (other != other))).all())
