"""The backend ``fxopt`` of ``torch.compile``: dynamo captures and guards, fxopt rewrites."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from fxopt_compile._torch import dispatch_modes, fix_numbers, forward_level, functorch_level
from fxopt_compile.binding import Binding
from fxopt_compile.lifting import Inputs, enables_gradients
from fxopt_compile.settings import Settings
from fxopt_core import (
    FxoptError,
    Record,
    Refusal,
    VerificationError,
    iter_nodes,
)
from fxopt_rewrite import (
    Effects,
    State,
    Watched,
    on_refresh,
    state_of,
)
from fxopt_tools import differing
from fxopt_tools.verification.bounds import promise_of

Compiled = Callable[..., Any]
#: How many sets of weights a graph remembers: with `functional_call`, each call may bring another one.
_MOST_SEEN = 1024
_NUMBERS = count()


def fxopt(
    graph_module: GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, object] | None = None,
    mode: str | None = None,
) -> Compiled:
    """Compile one of dynamo's graphs: the backend of ``torch.compile(model, backend="fxopt")``.

    Args:
        graph_module: the graph, whose parameters are inputs.
        example_inputs: the first inputs.
        options: ``pipeline``, the text or the name of the passes, by default ``cpu-inference`` on CPUs, if it is
            installed, and ``inference`` elsewhere; ``then``, ``"eager"`` or ``"inductor"``; ``verify``, whether each
            rewritten graph is compared with the original one on its first inputs.
        mode: as ``torch.compile`` takes it; it affects only inductor, not this backend.

    Raises:
        PassOptionError: An option or a name in the pipeline is unknown.
        VerificationError: At the first call, if ``verify`` finds a different result.
    """
    del mode
    fix_numbers(graph_module)
    graph = LiveGraph(graph_module, example_inputs, Settings.read(options))
    GRAPHS.add(graph)
    return graph.compiled(example_inputs)


class LiveGraph:
    """One of dynamo's graphs, with a rewritten graph for each set of weights that it runs with.

    Weights that the passes read are compared at each call. If they have changed or been replaced, the call runs
    dynamo's own graph; if they are still the same at the next call, that runs a rewritten graph again. Weights that
    change from call to call therefore cost nothing.

    Attributes:
        name: dynamo's number of the graph.
        pipeline: the text of the passes.
        reason: why the graph is left alone, code and sentence; None if it is not.
        records: what the passes did, at first.
        calls: how many calls ran a rewritten graph.
        plain_calls: how many ran dynamo's own.
        refreshes: how often weights were derived again.
    """

    def __init__(self, graph_module: GraphModule, values: Sequence[Any], settings: Settings) -> None:
        self.number = next(_NUMBERS)
        self.name = str(graph_module.meta.get("dynamo_compile_id", "?"))
        self.nodes = len(graph_module.graph.nodes)
        self.settings = settings
        self.reason: Refusal | None = None
        self.records: tuple[Record, ...] = ()
        self.calls = self.plain_calls = self.refreshes = 0
        self._graph_module, self._compiled = graph_module, graph_module.forward
        self._inputs = Inputs.of(graph_module, values)
        self._places = tuple(weight.place for weight in self._inputs.weights)
        self.pipeline, self._passes = settings.passes(value for value in values if isinstance(value, Tensor))
        self._bindings: list[Binding] = []
        self._seen: dict[int, State] = {}
        self._lock = threading.RLock()
        effects = Effects(graph_module)
        writes = any(effects.writes(node) for node in iter_nodes(graph_module.graph))
        # A graph that writes in place may write a weight through an input that shares its memory.
        self._others = sorted({*range(len(values))} - {*self._places}) if writes else []
        self._is_verified = not settings.verify
        self._enables_gradients, self._is_wrong = enables_gradients(graph_module), False
        self._of = Watched([values[place] for place in self._places])

    def compiled(self, values: Sequence[Any]) -> Compiled:
        """Return what dynamo is to call."""
        self.reason = self._why_not(values)
        if self.reason is None:
            with self._lock:
                sweep()
                binding = self._bind(values)
            self.records = binding.records
            if any(record.changed for record in self.records):
                return self.run
            self._bindings.clear()
        if self.settings.then == "inductor":
            from torch._inductor.compile_fx import compile_fx

            self._compiled = cast("Compiled", compile_fx(self._graph_module, list(values)))
        return self._plain

    def _why_not(self, values: Sequence[Any]) -> Refusal | None:
        """Return why nothing is rewritten."""
        if self._inputs.sharded:
            message = "is sharded, or not of one of torch's own classes: its values are not here, or not plain"
            return Refusal(self._inputs.sharded[0], "sharded", f"`{self._inputs.sharded[0]}` {message}")
        if self._needs_gradient(values):
            return Refusal(self.name, "training", "gradients are asked for: torch's own functions compute them")
        return None

    def _needs_gradient(self, values: Sequence[Any]) -> bool:
        """Return whether autograd records what the graph computes with these values."""
        if not (torch.is_grad_enabled() or self._enables_gradients):
            return False
        return any(isinstance(value, Tensor) and value.requires_grad for value in values)

    def _plain(self, *values: Any) -> Any:
        self.plain_calls += 1
        return self._compiled(*values)

    def run(self, *values: Any) -> Any:
        """Run the graph with these inputs."""
        binding = self._binding_of(values)
        if binding is None:
            return self._plain(*values)
        inputs = [values[place] for place in binding.takes]
        self.calls += 1
        return binding.call(*inputs) if self._is_verified else self._compare(binding, values, inputs)

    def _compare(self, binding: Binding, values: Sequence[Any], inputs: Sequence[Any]) -> Any:
        """Run the rewritten graph, and dynamo's own on copies; return the result of the rewritten one.

        Raises:
            VerificationError: Results, or inputs that the graph writes, are different.
        """
        # Wrong until the end: if the comparison itself fails, later calls run dynamo's graph.
        self._is_verified = self._is_wrong = True
        copies = [value.detach().clone() if isinstance(value, Tensor) else value for value in values]
        devices = {each.device.index for each in values if isinstance(each, Tensor) and each.device.type == "cuda"}
        # Restores the random state, so that the rewritten graph draws the same numbers.
        with torch.random.fork_rng(devices=sorted(devices)):
            expected = tree_leaves(self._graph_module.forward(*copies))
        result = binding.call(*inputs)
        found = tree_leaves(result)
        places = [f"result {place}" for place in range(len(found))] + [f"input {place}" for place in range(len(values))]
        before, after = (
            {what: each for what, each in zip(places, tree, strict=True) if isinstance(each, Tensor)}
            for tree in ([*expected, *copies], [*found, *values])
        )
        promises = (promise_of(record) for record in self.records if record.changed)
        promised = min((each for each in promises if each is not None), default=None)
        for each in differing(before, after, values, sqnr=promised):
            raise VerificationError(
                f"graph {self.name}: {each.path} of the rewritten graph {each.problem}. From now on the graph runs as "
                "dynamo made it; find the pass with a shorter pipeline"
            )
        self._is_wrong = False
        return result

    def _binding_of(self, values: Sequence[Any]) -> Binding | None:
        """Return the rewritten graph to run; None for dynamo's own."""
        is_traced = dispatch_modes() or functorch_level() is not None or forward_level() >= 0
        if is_traced or self._is_wrong or self._needs_gradient(values):
            return None
        binding = next((binding for binding in self._bindings if binding.is_current(values)), None)
        if binding is None:
            with self._lock:
                binding = self._made_again(values)
        if self._others and binding is not None:
            others = (values[place] for place in self._others)
            if binding.shares_memory(other for other in others if isinstance(other, Tensor)):
                return None  # the graph may write a weight through another input
        return binding

    def _made_again(self, values: Sequence[Any]) -> Binding | None:
        """Return a rewritten graph for new or changed weights, if they were the same at the last call."""
        binding = next((each for each in self._bindings if each.is_of(values)), None)
        if binding is not None and binding.is_current(values):  # another thread was faster
            return binding
        weights: list[Tensor] = [values[place] for place in self._places]
        # Tensors of inference mode have no version that would show changes.
        if any(weight.is_inference() for weight in weights):
            return None
        state, key = state_of(weights), id(weights[0]) if weights else 0
        is_new = self._seen.pop(key, None) != state
        if is_new and (binding is None or self.settings.then == "eager"):
            if len(self._seen) >= _MOST_SEEN:
                self._seen.clear()
            self._seen[key] = state
            return None
        self.refreshes += 1
        if binding is not None:
            if binding.refresh(values):
                return binding
            self.drop(lambda each: each is binding)
        try:
            return self._bind(values)
        except FxoptError:
            return None

    def _bind(self, values: Sequence[Any]) -> Binding:
        """Return the rewritten graph for these weights, and keep it."""
        tensors = [values[place] for place in self._places]
        binding = Binding(self._graph_module, self._inputs.weights, tensors, self._passes)
        if self.settings.then == "inductor":
            only_inputs: dict[str, Any] = {"guard_filter_fn": _of_inputs}
            binding.call = torch.compile(_function(binding.call), backend="inductor", options=only_inputs)
        self._bindings.append(binding)
        return binding

    def drop(self, is_dropped: Callable[[Binding], bool]) -> None:
        """Drop rewritten graphs."""
        self._bindings = [each for each in self._bindings if not is_dropped(each)]

    def is_of(self, tensors: Mapping[int, Tensor]) -> bool:
        """Return whether the graph was compiled, or is kept, for one of these tensors (by id)."""
        return self._of.share_memory(tensors.values()) or any(each.reads(tensors) for each in self._bindings)


def _of_inputs(guards: Sequence[Any]) -> list[bool]:
    """Keep the guards of inputs and of torch's state: the rewritten graph itself is the binding's, which changes it."""
    return [guard.name.startswith("inputs") or not guard.name for guard in guards]


def _function(run: Compiled) -> Compiled:
    """Return a function with code of its own, which dynamo counts recompilations by.

    Dynamo marks the code of its own graphs: to compile that directly does nothing.
    """

    def call(*inputs: Any) -> Any:
        return run(*inputs)

    call.__code__ = call.__code__.replace(co_consts=call.__code__.co_consts)
    return call


#: All graphs that dynamo still keeps.
GRAPHS: weakref.WeakSet[LiveGraph] = weakref.WeakSet()


def sweep() -> None:
    """Drop rewritten graphs whose weights have moved, as after ``.half()``, or are held by nothing else."""
    graphs = list(GRAPHS)
    # Of all graphs, since models, and the graphs of one model, may share weights.
    held = Counter(id(each) for graph in graphs for binding in graph._bindings for each in binding.tensors)
    for graph in graphs:
        graph.drop(lambda binding: binding.is_left(held))


def _after_collection(phase: str, info: Mapping[str, int]) -> None:
    """Sweep after each full garbage collection, which is what frees most models."""
    if phase == "stop" and info["generation"] == _OLDEST:
        with suppress(RuntimeError):  # another thread has added a graph meanwhile
            sweep()


_OLDEST = len(gc.get_threshold()) - 1
gc.callbacks.append(_after_collection)


@on_refresh
def forget(model: nn.Module) -> None:
    """Drop everything derived from a model's weights."""
    ids = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    for graph in list(GRAPHS):
        graph.drop(lambda binding: binding.reads(ids))
