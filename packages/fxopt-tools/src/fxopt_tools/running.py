"""One run of a module that leaves no trace: not on its inputs, its buffers and attributes, or the random numbers."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from fxopt_core import PreconditionError
from fxopt_tools.inputs import Inputs, copied, version_of
from fxopt_tools.keeping import attributes_kept
from fxopt_tools.structure import Tree, tensors, tree_of

SEED = 20_240_917  # of every run: only that it is the same for all runs matters
_ONE_AT_A_TIME = threading.RLock()  # threads share random numbers, and may share modules


@dataclass(frozen=True)
class Outcome:
    """What a run left behind.

    Attributes:
        output: the tree of what the module returned, with copies of its tensors.
        arguments: the tree of its arguments as they were afterwards.
        touched: the paths in it of what the run wrote into, replaced, added or took away.
        shared: for each tensor of the output that shares memory with arguments, their paths.
        parameters_written: names of the parameters that the run wrote into.
    """

    output: Tree
    arguments: Tree
    touched: frozenset[str]
    shared: Mapping[str, tuple[str, ...]]
    parameters_written: tuple[str, ...]


def run_once(module: nn.Module, inputs: Inputs, *, widened: bool = False) -> Outcome:
    """Run a module on a copy of inputs, without gradients and from the same random state as every other run.

    Buffers, plain tensors, and embeddings that renormalise themselves, are replaced by copies for the time of the run;
    other attributes of modules are brought back. Parameters that the run writes are reported, not restored: copying all
    of them would double the model.

    Args:
        module: what to run, in the mode in which it is.
        inputs: its arguments.
        widened: whether the module computes in float64, and the inputs have to as well.

    Raises:
        PreconditionError: The inputs cannot be copied, or the module is not initialised.
        Exception: Whatever the module raises.
    """
    _check_initialised(module)
    with _ONE_AT_A_TIME, torch.inference_mode(False), torch.no_grad(), _same_random_numbers(module, inputs):
        arguments = copied(inputs, widened=widened)
        versions = {name: (p, version_of(p)) for name, p in module.named_parameters()}
        with attributes_kept(module):
            output = _call(module, arguments.inputs)
        written = tuple(name for name, (p, version) in versions.items() if version_of(p) != version)
        shared = _shared(tensors(tree_of(output), "output"), arguments.tensors())
        tree = tree_of(output, keep=lambda tensor: tensor.detach().clone())
        own = {id(tensor) for tensor in arguments.tensors().values()}  # what the run put in may be the module's
        after = tree_of(arguments.inputs, keep=lambda t: t.detach() if id(t) in own else t.detach().clone())
        return Outcome(tree, after, arguments.touched(), shared, written)


def _call(module: nn.Module, inputs: Inputs) -> object:
    """Call a module with copies of the tensors that it may write; a compiled script takes none, and is mended after."""
    copies = _replaced(module)
    if not any(isinstance(each, torch.jit.ScriptModule) for each in module.modules()):
        output: object = functional_call(module, copies, inputs.args, inputs.kwargs)
        return output
    try:
        return module(*inputs.args, **inputs.kwargs)
    finally:
        for name, tensor in {**dict(module.named_parameters()), **dict(module.named_buffers())}.items():
            if name in copies:
                tensor.copy_(copies[name])


def _shared(outputs: Mapping[str, Tensor], arguments: Mapping[str, Tensor]) -> dict[str, tuple[str, ...]]:
    """Return with which arguments each output shares memory."""
    owners: dict[int, list[str]] = {}
    for path, tensor in arguments.items():
        owners.setdefault(_memory(tensor), []).append(path)
    owners.pop(0, None)
    shared = {path: tuple(owners.get(_memory(tensor), ())) for path, tensor in outputs.items()}
    return {path: paths for path, paths in shared.items() if paths}


def _memory(tensor: Tensor) -> int:
    """Return where the memory of a tensor starts, or 0 where it has none of the usual kind."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (NotImplementedError, RuntimeError):  # sparse tensors, and some subclasses
        return 0


def _replaced(module: nn.Module) -> dict[str, Tensor]:
    """Return copies of the tensors that a run may write, by their full names."""
    replaced = dict(module.named_buffers())
    for prefix, child in module.named_modules():
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)) and child.max_norm is not None:
            names = ((f"{prefix}.{name}" if prefix else name, p) for name, p in child.named_parameters(recurse=False))
            replaced.update(names)
    return {name: tensor.detach().clone() for name, tensor in replaced.items()}


def _check_initialised(module: nn.Module) -> None:
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    lazy = next((name for name, tensor in tensors.items() if is_lazy(tensor)), None)
    if lazy is not None:
        raise PreconditionError(
            f"`{lazy}` of the {type(module).__name__} is not initialised yet, so there is nothing to verify: call the "
            "module once on its inputs first"
        )


@contextmanager
def _same_random_numbers(module: nn.Module, inputs: Inputs) -> Iterator[None]:
    """Start from one fixed random state, and give the caller's back afterwards."""
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    used = [*module.parameters(), *module.buffers(), *inputs.tensors().values()]
    devices = sorted({tensor.device.index or 0 for tensor in used if tensor.device.type == kind})
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices, device_type=kind):
            _seed(kind, devices)
            yield
    finally:
        random.setstate(state)


def _seed(kind: str, devices: list[int]) -> None:
    random.seed(SEED)
    torch.default_generator.manual_seed(SEED)
    for device in devices:  # torch.manual_seed would also seed devices whose state is not given back
        with torch.accelerator.device_index(device):
            torch.get_device_module(kind).manual_seed(SEED)
