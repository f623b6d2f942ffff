"""A region as one program, recorded by TorchScript and fused by oneDNN Graph, for inputs of one kind.

oneDNN Graph, which ships with torch as ``torch.jit.enable_onednn_fusion``, prepares one kernel for each group of
operations, while the operators prepare theirs at each call. It chooses the memory format of images between groups.
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

from fxopt_cpu._torch import scripts
from fxopt_cpu.layers.packed_conv import PackedConv2d
from fxopt_cpu.layers.packed_layer import PackedLayer
from fxopt_rewrite import tolerance
from fxopt_rewrite.toolbox import Region

Program = Callable[..., tuple[Any, ...]]
"""Computes the outputs of a region from its tensor inputs."""

_RUNS_UNTIL_FUSED = 3
_TIMED_ROUNDS = 5
_TOLERANCE = tolerance(torch.float32)
_LOCK = threading.Lock()


def make_program(graph_module: GraphModule, region: Region, values: Sequence[Any]) -> Program | None:
    """Return the program of a region for inputs like these, or None if there is no faster one.

    Its outputs have to match those of the layers in values and strides. Only one program is made at a time; other
    threads get None meanwhile.
    """
    if scripts is None or not _LOCK.acquire(blocking=False):
        return None
    try:
        with torch.inference_mode(False), torch.no_grad():
            return _Attempt(graph_module, region, values).program()
    except Exception:  # whatever TorchScript cannot record: the layers run one by one
        return None
    finally:
        _LOCK.release()


class _Attempt:
    """One attempt at a program.

    Attributes:
        constants: results without tensors, by node: sizes, and numbers computed from them.
        expected: the outputs of the layers.
    """

    def __init__(self, graph_module: GraphModule, region: Region, values: Sequence[Any]) -> None:
        self._region, self._values = region, values
        self._tensors = [value for value in values if isinstance(value, Tensor)]
        self.constants: dict[Node, Any] = {}
        targets = [str(node.target) for node in region.nodes if node.op in ("call_module", "get_attr")]
        self._as_they_are = {target: attrgetter(target)(graph_module) for target in targets}
        self._convolves = any(isinstance(found, PackedConv2d) for found in self._as_they_are.values())
        # A layer may overwrite an input that nothing reads later.
        given = list(map(_like, self._tensors))
        self.expected = self._one_by_one(*given)
        self._written = [not _equal(*pair) for pair in zip(given, self._tensors, strict=True)]
        made = [each for each in self.expected if isinstance(each, Tensor)]
        self._owns_outputs = not _share([*given, *self._held()], made)

    def program(self) -> Program | None:
        """Return the program, if it is correct and faster."""
        lists = any(not isinstance(each, Tensor) and _has_tensor(each) for each in self.expected)
        if lists or not self._owns_outputs:
            return None
        places = [place for place, each in enumerate(self.expected) if isinstance(each, Tensor)]
        candidates = [self._candidate(places, fusing=True)]
        if not self._convolves:  # for a few rows, torch's own product has less overhead
            candidates.append(self._candidate(places, fusing=False))
        program = self._fastest([candidate for candidate in candidates if candidate is not None])
        if program is None or len(places) == len(self.expected):
            return program
        others = {place: each for place, each in enumerate(self.expected) if place not in places}
        return _with_constants(program, others, len(self.expected))

    def _candidate(self, places: Sequence[int], *, fusing: bool) -> Program | None:
        """Return an optimised program, if it is correct."""
        expected = [self.expected[place] for place in places]
        program = self._recorded(places)
        found: Sequence[Tensor] = ()
        with _fusing() if fusing else nullcontext():
            for _ in range(_RUNS_UNTIL_FUSED + 1):
                before, given = found, list(map(_like, self._tensors))
                found = program(*given)
        # TorchScript returns a constant for what depends on weights alone, and `x` itself for `x * 1`.
        if not _are_alike(found, expected) or _share([*before, *given, *self._held()], found):
            return None
        kept = zip(given, self._tensors, self._written, strict=True)
        unwritten = all(written or _equal(one, other) for one, other, written in kept)
        return program if unwritten and self._keeps_nan(program, places) else None

    def _keeps_nan(self, program: Program, places: Sequence[int]) -> bool:
        """Return whether NaN in the inputs is NaN wherever the layers have it: oneDNN hides it in some activations."""
        given = list(map(_with_nan, self._tensors))
        expected = self._one_by_one(*map(_like, given))
        found = program(*given)
        return all(
            bool((~expected[place].isnan() | one.isnan()).all()) for place, one in zip(places, found, strict=True)
        )

    def _held(self) -> list[Tensor]:
        """Return the tensors that the region reads, those of its modules included."""
        held: list[Tensor] = []
        for found in self._as_they_are.values():
            held += [found] if isinstance(found, Tensor) else [*found.parameters(), *found.buffers()]
        return held

    def _recorded(self, places: Sequence[int]) -> Program:
        """Return what TorchScript records of some outputs, with weights as constants."""
        stand_ins = {target: _stand_in(found) for target, found in self._as_they_are.items()}
        formats = [_format_of(self.expected[place]) for place in places]

        def computed(*tensors: Tensor) -> tuple[Tensor, ...]:
            outputs = self._computed(tensors, stand_ins)
            laid_out = zip(places, formats, strict=True)
            return tuple(outputs[place].contiguous(memory_format=layout) for place, layout in laid_out)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated; sizes are constants on purpose
            # Not `torch.jit.trace`, which keeps every function and its constants until the process ends.
            names = [f"input_{place}" for place in range(len(self._tensors))]
            arguments = (computed, tuple(self._tensors), lambda value: "", True, False, None, names)
            graph, _ = scripts._create_graph_by_tracing(*arguments)
        program: Program = scripts._create_function_from_graph("region", graph)
        return program

    def _one_by_one(self, *tensors: Tensor) -> list[Any]:
        """Return the outputs of the layers."""
        return self._computed(tensors, self._as_they_are)

    def _computed(self, tensors: Sequence[Tensor], called: Mapping[str, Any]) -> list[Any]:
        """Return the outputs, node by node."""
        given = iter(tensors)
        inputs = zip(self._region.inputs, self._values, strict=True)
        results: dict[Node, Any] = {node: next(given) if isinstance(value, Tensor) else value for node, value in inputs}
        for node in self._region.nodes:
            results[node] = self.constants[node] if node in self.constants else _result(node, results, called)
            if node not in self.constants and node.op != "get_attr" and not _has_tensor(results[node]):
                self.constants[node] = results[node]
        return [results[node] for node in self._region.outputs]

    def _fastest(self, programs: Sequence[Program]) -> Program | None:
        """Return the fastest program in a few rounds; None if the layers are faster."""
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


def _with_constants(program: Program, others: Mapping[int, Any], count: int) -> Program:
    """Return a program that also returns constants, by their places among the outputs."""

    def completed(*tensors: Tensor) -> tuple[Any, ...]:
        found = iter(program(*tensors))
        return tuple(others[place] if place in others else next(found) for place in range(count))

    return completed


@contextmanager
def _fusing() -> Iterator[None]:
    """Let TorchScript use oneDNN Graph for what it optimises meanwhile, and from then on."""
    before = scripts._jit_llga_enabled()
    scripts._jit_set_llga_enabled(True)
    try:
        yield
    finally:
        scripts._jit_set_llga_enabled(before)


def _result(node: Node, results: Mapping[Node, Any], called: Mapping[str, Any]) -> Any:
    """Return the result of a node, given those of others."""
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


def _stand_in(found: Any) -> Any:
    """Return a callable or tensor without gradients, whose tensors TorchScript records as constants."""
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


def _with_nan(tensor: Tensor) -> Tensor:
    """Return a copy whose first number is NaN."""
    copy = _like(tensor)
    if copy.numel():
        copy[(0,) * copy.dim()] = torch.nan
    return copy


def _format_of(tensor: Tensor) -> torch.memory_format:
    last = tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    return torch.channels_last if last else torch.contiguous_format


def _are_alike(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    """Return whether tensors have the same values up to rounding, and the same strides."""
    for one, other in zip(found, expected, strict=True):
        if one.shape != other.shape or one.dtype != other.dtype or one.stride() != other.stride():
            return False
        if not one.is_floating_point():
            same = torch.equal(one, other)
        else:
            finite = other[other.isfinite()]
            scale = finite.square().mean().sqrt().item() if finite.numel() else 0.0
            absolute = _TOLERANCE.rtol * scale + _TOLERANCE.atol * max(1.0, scale)  # as the criterion of `verify`
            same = torch.allclose(one, other, rtol=_TOLERANCE.rtol, atol=absolute, equal_nan=True)
        if not same:
            return False
    return True


def _equal(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _share(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return whether memory is shared within the second group, or between the two groups."""
    places = [tensor.untyped_storage().data_ptr() for tensor in others]
    return len(set(places)) < len(places) or not {t.untyped_storage().data_ptr() for t in some}.isdisjoint(places)
