"""A region as one program: recorded by TorchScript, and fused by oneDNN Graph, for inputs of one kind.

oneDNN Graph, which ships with torch behind ``torch.jit.enable_onednn_fusion``, prepares a kernel for each group of
operations once, where the operators prepare theirs at each call; between groups, images lie as its kernels like them.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from fxopt_onednn.fusible import Region
from fxopt_onednn.packed_conv import PackedConv2d
from fxopt_onednn.packing import PackedLayer

Program = Callable[..., tuple[Any, ...]]
"""Computes the outputs of a region from those of its inputs that are tensors."""

_RUNS_UNTIL_FUSED = 3
_TIMED_ROUNDS = 5
_TOLERANCE = 1e-3
_LOCK = threading.Lock()


def made_program(graph_module: GraphModule, region: Region, values: Sequence[Any]) -> Program | None:
    """Return the program of a region for inputs such as these, or None where there is none that pays.

    A program is only taken if it computes what the layers compute one by one, laid out alike in memory, and faster.
    While one is made, it is not made for somebody else; who comes meanwhile gets None.
    """
    if not hasattr(torch._C, "_jit_set_llga_enabled") or not _LOCK.acquire(blocking=False):
        return None
    try:
        with torch.inference_mode(False), torch.no_grad():
            return _Attempt(graph_module, region, values).program()
    except Exception:  # whatever TorchScript cannot record, or torch comes without: the layers run one by one
        return None
    finally:
        _LOCK.release()


class _Attempt:
    """One attempt at a program.

    Attributes:
        constants: by node, results in which there is no tensor: sizes, and numbers that were made from them.
        expected: the outputs, as the layers compute them.
    """

    def __init__(self, graph_module: GraphModule, region: Region, values: Sequence[Any]) -> None:
        self._graph_module, self._region, self._values = graph_module, region, values
        self._tensors = [value for value in values if isinstance(value, Tensor)]
        self.constants: dict[Node, Any] = {}
        self._convolves = any(isinstance(_found(graph_module, name), PackedConv2d) for name in _targets(region))
        self._as_they_are = {target: _found(graph_module, target) for target in _targets(region)}
        # A layer may write over an input that nothing else reads any more.
        given = list(map(_like, self._tensors))
        self.expected = self._one_by_one(*given)
        self._written = [not _equal(*pair) for pair in zip(given, self._tensors, strict=True)]
        made = [each for each in self.expected if isinstance(each, Tensor)]
        self._gives_own_memory = not _share([*given, *self._held()], made)

    def program(self) -> Program | None:
        """Return the program, if it is right and pays."""
        if any(not isinstance(each, Tensor) and _has_tensor(each) for each in self.expected):
            return None  # a list of tensors, say
        if not self._gives_own_memory:
            return None
        places = [place for place, each in enumerate(self.expected) if isinstance(each, Tensor)]
        candidates = [self._candidate(places, fusing=True)]
        if not self._convolves:  # for a few rows, torch's own product starts sooner
            candidates.append(self._candidate(places, fusing=False))
        program = self._fastest([candidate for candidate in candidates if candidate is not None])
        if program is None or len(places) == len(self.expected):
            return program
        others = {place: each for place, each in enumerate(self.expected) if place not in places}
        return _filled(program, others, len(self.expected))

    def _candidate(self, places: Sequence[int], *, fusing: bool) -> Program | None:
        """Return a program that was optimised, if it is right."""
        expected = [self.expected[place] for place in places]
        program = self._recorded(places)
        found: Sequence[Tensor] = ()
        with _fusing() if fusing else nullcontext():
            for _ in range(_RUNS_UNTIL_FUSED + 1):
                before, given = found, list(map(_like, self._tensors))
                found = program(*given)
        # TorchScript gives a constant for what depends on weights alone, and `x` itself for `x * 1`.
        if not _are_alike(found, expected) or _share([*before, *given, *self._held()], found):
            return None
        kept = zip(given, self._tensors, self._written, strict=True)
        return program if all(written or _equal(one, other) for one, other, written in kept) else None

    def _held(self) -> list[Tensor]:
        """Return the tensors of the modules that the region calls, and those that it reads."""
        held: list[Tensor] = []
        for found in self._as_they_are.values():
            held += [found] if isinstance(found, Tensor) else [*found.parameters(), *found.buffers()]
        return held

    def _recorded(self, places: Sequence[int]) -> Program:
        """Return what TorchScript records of the outputs at some places, with weights as constants."""
        stand_ins = {target: _stand_in(_found(self._graph_module, target)) for target in _targets(self._region)}
        formats = [_format_of(self.expected[place]) for place in places]

        def computed(*tensors: Tensor) -> tuple[Tensor, ...]:
            outputs = self._computed(tensors, stand_ins)
            laid_out = zip(places, formats, strict=True)
            return tuple(outputs[place].contiguous(memory_format=layout) for place, layout in laid_out)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated, and sizes are meant to be constants
            # Not `torch.jit.trace`, which keeps each function and its constants until the process ends.
            library: Any = torch._C
            names = [f"input_{place}" for place in range(len(self._tensors))]
            graph, _ = library._create_graph_by_tracing(
                computed, tuple(self._tensors), _no_name, True, False, None, names
            )
        program: Program = library._create_function_from_graph("region", graph)
        return program

    def _one_by_one(self, *tensors: Tensor) -> list[Any]:
        """Return the outputs for inputs, as the layers compute them."""
        return self._computed(tensors, self._as_they_are)

    def _computed(self, tensors: Sequence[Tensor], called: Mapping[str, Any]) -> list[Any]:
        """Return the outputs for inputs, node by node."""
        given = iter(tensors)
        inputs = zip(self._region.inputs, self._values, strict=True)
        results: dict[Node, Any] = {node: next(given) if isinstance(value, Tensor) else value for node, value in inputs}
        for node in self._region.nodes:
            results[node] = self.constants[node] if node in self.constants else _result(node, results, called)
            if node not in self.constants and node.op != "get_attr" and not _has_tensor(results[node]):
                self.constants[node] = results[node]
        return [results[node] for node in self._region.outputs]

    def _fastest(self, programs: Sequence[Program]) -> Program | None:
        """Return the program that takes the least time in a few rounds; None where the layers take less."""
        candidates: list[Callable[..., object]] = [self._one_by_one, *programs]
        best = [float("inf") for _ in candidates]
        for _ in range(_TIMED_ROUNDS):
            for place, computed in enumerate(candidates):
                copies = list(map(_like, self._tensors))
                start = time.perf_counter()
                computed(*copies)
                best[place] = min(best[place], time.perf_counter() - start)
        fastest = best.index(min(best))
        return programs[fastest - 1] if fastest else None


def _no_name(value: object) -> str:
    return ""


def _filled(program: Program, others: Mapping[int, Any], count: int) -> Program:
    """Return a program that gives constants as well, by their places among the outputs."""

    def filled(*tensors: Tensor) -> tuple[Any, ...]:
        found = iter(program(*tensors))
        return tuple(others[place] if place in others else next(found) for place in range(count))

    return filled


@contextmanager
def _fusing() -> Iterator[None]:
    """Let TorchScript fuse by oneDNN Graph what it optimises meanwhile; what is fused then stays so."""
    library: Any = torch._C
    before = library._jit_llga_enabled()
    library._jit_set_llga_enabled(True)
    try:
        yield
    finally:
        library._jit_set_llga_enabled(before)


def _result(node: Node, results: Mapping[Node, Any], called: Mapping[str, Any]) -> Any:
    """Return what a node makes of the results of others."""
    args: Any = map_arg(node.args, results.__getitem__)
    kwargs: Any = map_arg(node.kwargs, results.__getitem__)
    if node.op == "get_attr":
        return called[str(node.target)]
    if node.op == "call_module":
        return called[str(node.target)](*args, **kwargs)
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    target: Any = node.target
    return target(*args, **kwargs)


def _targets(region: Region) -> list[str]:
    return [str(node.target) for node in region.nodes if node.op in ("call_module", "get_attr")]


def _found(graph_module: GraphModule, target: str) -> Any:
    return attrgetter(target)(graph_module)


def _stand_in(found: Any) -> Any:
    """Return what computes the same from tensors that no gradient is asked of, which TorchScript takes as constants."""
    if isinstance(found, Tensor):
        return found.detach()
    if isinstance(found, PackedLayer):
        return found.by_torch()
    assert isinstance(found, nn.Module)
    twin = found.__class__.__new__(found.__class__)
    vars(twin).update(vars(found))
    for name in ("_parameters", "_buffers"):
        tensors = {key: None if tensor is None else tensor.detach() for key, tensor in vars(found)[name].items()}
        vars(twin)[name] = tensors
    return twin.forward


def _has_tensor(value: object) -> bool:
    return any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def _like(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.preserve_format)


def _format_of(tensor: Tensor) -> torch.memory_format:
    last = tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _are_alike(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether tensors have the same values but for rounding, and lie in memory alike."""
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype or one.stride() != other.stride():
            return False
        if not one.is_floating_point():
            same = torch.equal(one, other)
        else:
            largest = other[other.isfinite()].abs().max().item() if other.isfinite().any() else 0.0
            same = torch.allclose(one, other, rtol=_TOLERANCE, atol=_TOLERANCE * largest, equal_nan=True)
        if not same:
            return False
    return True


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _share(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether memory is shared, among the second tensors or between the two groups."""
    places = [tensor.untyped_storage().data_ptr() for tensor in others]
    return len(set(places)) < len(places) or not {t.untyped_storage().data_ptr() for t in some}.isdisjoint(places)
