"""A run of a module that leaves its inputs, buffers, attributes and the random state unchanged."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from fxopt_core import PreconditionError, kept
from fxopt_tools.inputs import Inputs, copied, version_of
from fxopt_tools.value_tree import parts_of, tensors

SEED = 20_240_917  # any number will do, as long as every run uses it
_CALLS = 3
#: Held while a module runs or is read: threads share the random state, and may share modules, which runs restore.
ONE_AT_A_TIME = threading.RLock()


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        output: the parts of the module's output, with copies of its tensors.
        arguments: the parts of its arguments after the run.
        touched: the paths of arguments that the run wrote to, replaced, added or removed.
        shared: for each output tensor that shares memory with arguments, their paths.
        parameters_written: names of the parameters that the run wrote to.
        buffers: the buffers after the run, by their full names, and weights of embeddings that renormalise themselves.
        buffers_written: names of those that the run wrote to or replaced.
        strides: strides of each output tensor that has some, by its path.
    """

    output: Mapping[str, object]
    arguments: Mapping[str, object]
    touched: frozenset[str]
    shared: Mapping[str, tuple[str, ...]]
    parameters_written: tuple[str, ...]
    buffers: Mapping[str, Tensor]
    buffers_written: frozenset[str]
    strides: Mapping[str, tuple[int, ...]]

    def equals(self, other: Outcome) -> bool:
        """Return whether another run had the same outcome, bit for bit."""
        if self.strides != other.strides:
            return False
        trees = ((self.output, other.output), (self.arguments, other.arguments))
        pairs = [(tensors(one), tensors(another)) for one, another in trees] + [(self.buffers, other.buffers)]
        if any(one.keys() != another.keys() for one, another in pairs):
            return False
        both = [(each, another[path]) for one, another in pairs for path, each in one.items()]
        plain = all(each.layout is torch.strided and not each.is_meta for each, _ in both)
        return plain and all(_same(*each) for each in both)


def shared_otherwise(expected: Outcome, found: Outcome) -> Iterator[tuple[str, str, str]]:
    """Yield outputs that share memory with other arguments than expected: path, those expected, and those found."""
    for path in sorted(expected.shared.keys() | found.shared.keys()):
        was, now = (" and ".join(each.shared.get(path, ("no argument",))) for each in (expected, found))
        if was != now:
            yield path, was, now


def run_thrice(module: nn.Module, inputs: Inputs) -> list[Outcome]:
    """Return the outcomes of three calls, one after the other, and restore the module after the last.

    Fast paths may start later than at the first call, and may be kept in attributes. If the first call has written to
    no buffer, the others get the module's own buffers instead of copies, like later calls in use. A call with the same
    outcome as the first one gives the very same object.
    """
    # Inference tensors have no version counters, by which writes are noticed.
    with ONE_AT_A_TIME, torch.inference_mode(False), kept(module):
        first = run_once(module, inputs, restores=False)
        outcomes = [first]
        for _ in range(_CALLS - 1):
            again = run_once(module, inputs, own_buffers=not first.buffers_written, restores=False)
            outcomes.append(first if again.equals(first) else again)
    return outcomes


def run_once(
    module: nn.Module, inputs: Inputs, *, widened: bool = False, own_buffers: bool = False, restores: bool = True
) -> Outcome:
    """Run a module on a copy of the inputs, without gradients and from the same random state as every other run.

    During the run, copies replace buffers, plain tensors and embeddings that renormalise themselves; other attributes
    of modules are restored afterwards. Parameters that the run writes to are reported, not restored: copying all of
    them would double the model. If ``widened``, the inputs are cast to float64; with ``own_buffers``, buffers are not
    replaced, and those that are written to are reported like parameters; without ``restores``, the caller restores.

    Raises:
        PreconditionError: The inputs cannot be copied, or the module is not initialised.
        Exception: Whatever the module raises.
    """
    with ONE_AT_A_TIME, torch.inference_mode(False), torch.no_grad(), _same_random_numbers(module, inputs):
        arguments = copied(inputs, widened=widened)
        kept_as_they_are = _tensors(module) if own_buffers else dict(module.named_parameters())
        versions = {name: (p, version_of(p)) for name, p in kept_as_they_are.items()}
        with kept(module) if restores else nullcontext():
            output, buffers = _call(module, arguments.inputs, own_buffers=own_buffers)
            parts = parts_of(output, "output", lambda tensor: tensor.detach().clone())  # before the module is restored
            # The tensors themselves: copies would not show their strides and memory.
            returned = tensors(parts_of(output, "output"))
            strides = {path: _strides(each) for path, each in returned.items()}
        written = tuple(name for name, (p, version) in versions.items() if version_of(p) != version)
        shared = _shared(returned, tensors(arguments.before))
        given = {id(tensor) for tensor in tensors(arguments.before).values()}
        after = arguments.inputs.parts()
        for path, tensor in tensors(after).items():  # what the run added may belong to the module
            after[path] = tensor.detach() if id(tensor) in given else tensor.detach().clone()
        state = {name: now.detach() for name, now in buffers.items()}
        unchanged = _tensors(module)
        changed = {name for name, now in state.items() if not _same(now, unchanged[name])}
        return Outcome(parts, after, arguments.touched(), shared, written, state, frozenset(changed), strides)


def gradients_once(module: nn.Module, inputs: Inputs, *, widened: bool = False) -> dict[str, Tensor]:
    """Run a module as `run_once` does, but with gradients; return those of a weighted sum of its outputs.

    They are named "gradient of `x`", for floating-point inputs and for parameters that require gradients; zero if the
    sum does not depend on one. The weights are random, and the same in every run.

    Raises:
        PreconditionError: The inputs cannot be copied, or the module is not initialised.
        Exception: Whatever the module or its backward pass raises.
    """
    with ONE_AT_A_TIME, torch.inference_mode(False), torch.enable_grad(), _same_random_numbers(module, inputs):
        arguments = copied(inputs, widened=widened)
        given = tensors(arguments.before)
        named = [*given.items(), *((name, p) for name, p in module.named_parameters() if p.requires_grad)]
        sources = {f"gradient of `{name}`": each for name, each in named if each.is_floating_point()}
        with kept(module):
            for each in given.values():
                each.requires_grad_(each.is_floating_point())
            # A leaf that needs a gradient may not be written, so the module gets a copy of it.
            leaves = {id(each): each.clone() for each in given.values()}
            args, kwargs = copy.deepcopy((arguments.inputs.args, arguments.inputs.kwargs), leaves)
            output, _ = _call(module, Inputs(*args, **kwargs), own_buffers=False)
            generator = torch.Generator().manual_seed(SEED)
            results = [each for each in tensors(parts_of(output, "output")).values() if each.requires_grad]
            weights = [torch.randn(each.shape, generator=generator).to(each) for each in results]
            found: Sequence[Tensor | None] = [None] * len(sources)
            if results and sources:
                found = torch.autograd.grad(results, list(sources.values()), weights, allow_unused=True)
        pairs = zip(sources.items(), found, strict=True)
        return {path: torch.zeros_like(each) if grad is None else grad for (path, each), grad in pairs}


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors are equal, including NaN; version counters do not tell, since some kernels skip them."""
    if (one.shape, one.dtype, one.layout) != (other.shape, other.dtype, other.layout):
        return False
    if one.is_meta or other.is_meta:
        return one is other
    return bool(((one == other) | ((one != one) & (other != other))).all())


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, with 0 for dimensions of one entry, whose strides mean nothing."""
    if tensor.layout is not torch.strided or not tensor.numel():
        return ()
    return tuple(stride if size > 1 else 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _call(module: nn.Module, inputs: Inputs, *, own_buffers: bool) -> tuple[object, dict[str, Tensor]]:
    """Call a module with copies of tensors that it may write to; return its output, and the copies afterwards."""
    if own_buffers:
        return module(*inputs.args, **inputs.kwargs), dict(module.named_buffers())
    copies: dict[str, Any] = {name: tensor.detach().clone() for name, tensor in module.named_buffers()}
    # Embeddings with `max_norm` write to their own weights in each call.
    for prefix, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None:
            own = child.named_parameters(prefix, recurse=False)
            copies.update((name, tensor.detach().clone()) for name, tensor in own)
    output: object = functional_call(module, copies, inputs.args, inputs.kwargs)
    return output, {name: now for name, now in copies.items() if now is not None}  # None where a buffer was set to that


def _shared(outputs: Mapping[str, Tensor], arguments: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Return the arguments that each output shares memory with."""
    owners: dict[int, tuple[str, ...]] = {}
    for path, tensor in arguments.items():
        owners[_memory(tensor)] = (*owners.get(_memory(tensor), ()), path)
    # 0 is the address of empty tensors and of those without a storage; these share nothing.
    owners.pop(0, None)
    return {path: owners[place] for path, tensor in outputs.items() if (place := _memory(tensor)) in owners}


def _memory(tensor: Tensor) -> int:
    """Return the address of a tensor's memory, or 0 if it has no ordinary storage."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors, and some subclasses
        return 0


@contextmanager
def _same_random_numbers(module: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Start from one fixed random state, and restore the caller's afterwards.

    Raises:
        PreconditionError: A parameter has no data yet.
    """
    lazy = next((name for name, tensor in _tensors(module).items() if is_lazy(tensor)), None)
    if lazy is not None:
        raise PreconditionError(
            f"`{lazy}` of the {type(module).__name__} is not initialised yet, so there is nothing to verify: call the "
            "module once on its inputs first"
        )
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    used = [*module.parameters(), *module.buffers(), *inputs.tensors().values()]
    devices = range(torch.accelerator.device_count()) if any(each.device.type == kind for each in used) else ()
    # torch.manual_seed seeds accelerators too, whose state is restored only where there are tensors on them.
    seed = torch.manual_seed if devices else torch.default_generator.manual_seed
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices, device_type=kind):
            random.seed(SEED)
            seed(SEED)
            yield
    finally:
        random.setstate(state)
