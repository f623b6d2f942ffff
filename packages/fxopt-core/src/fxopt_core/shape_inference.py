"""`infer_shapes`: run a graph on fake tensors and note what every node gives."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.graph import _PyTreeCodeGen

from fxopt_core.checks import check_graph_module
from fxopt_core.errors import PreconditionError
from fxopt_core.graph import iter_nodes


def infer_shapes(graph_module: GraphModule, *args: object, **kwargs: object) -> GraphModule:
    """Note in ``node.meta["val"]`` what every node gives for these inputs, without computing anything.

    The graph runs on fake tensors, which have shape, dtype, device and strides but no memory, and a copy of the module
    tree takes the place of the modules: parameters, buffers, random state and grad mode stay as they are. Sizes are
    those of the inputs; give fake tensors with symbolic sizes for symbolic ones.

    Args:
        graph_module: a graph in any form.
        args: inputs as the module takes them: real, meta or fake tensors, in any structure. Where tensors of the
            inputs or of the module are on a real device, those on ``meta`` count as being there too.
        kwargs: inputs by name.

    Returns:
        The graph module itself.

    Raises:
        PreconditionError: The module does not take these inputs, or a node cannot run on fake tensors (because it
            depends on values, say); nothing is changed.

    >>> graph_module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    >>> [tuple(node.meta["val"].shape) for node in infer_shapes(graph_module, torch.zeros(3, 4)).graph.nodes]
    [(3, 4), (3, 8), (3, 8), (3, 8)]
    """
    check_graph_module(graph_module, "infer_shapes")
    tensors = [*_tensors_in((args, kwargs)), *graph_module.parameters(), *graph_module.buffers()]
    faker = _Faker(_mode_of(tensors), next((tensor.device for tensor in tensors if tensor.device.type != "meta"), None))
    with _undisturbed(faker.mode):
        args, kwargs = pytree.tree_map_only(Tensor, faker.fake, (args, kwargs))
        run = _Run(faker.shadow(graph_module), graph_module, faker, _bind(graph_module, args, kwargs))
        with faker.mode:
            run.finish()
    for node, value in run.values.items():
        node.meta["val"] = value
    return graph_module


def _tensors_in(structure: object) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(structure) if isinstance(leaf, Tensor)]


def _mode_of(tensors: Sequence[Tensor]) -> FakeTensorMode:
    modes = {id(tensor.fake_mode): tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)}
    if len(modes) > 1:
        raise PreconditionError(
            f"infer_shapes: the inputs and the module hold fake tensors of {len(modes)} fake tensor modes; make all of "
            "them under one mode"
        )
    return modes.popitem()[1] if modes else FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


@contextmanager
def _undisturbed(mode: FakeTensorMode) -> Iterator[None]:
    """Keep grad mode, random state and what the mode allows as they are."""
    allowed = mode.allow_non_fake_inputs
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        try:
            mode.allow_non_fake_inputs = True
            yield
        finally:
            mode.allow_non_fake_inputs = allowed


class _Faker:
    """Makes fake counterparts of tensors, one for each, and of modules."""

    def __init__(self, mode: FakeTensorMode, device: torch.device | None) -> None:
        self.mode = mode
        self._device = device
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}
        self._shadows: dict[int, nn.Module] = {}

    def fake(self, tensor: Tensor) -> Tensor:
        """Return the counterpart of a tensor; the same one whenever it is asked for."""
        if id(tensor) not in self._fakes:
            self._fakes[id(tensor)] = (tensor, self._make(tensor))
        return self._fakes[id(tensor)][1]

    def _make(self, tensor: Tensor) -> Tensor:
        if tensor.device.type == "meta" and self._device is not None and tensor.layout == torch.strided:
            with self.mode:
                return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=self._device)
        if isinstance(tensor, FakeTensor):
            return tensor
        try:
            # Of a tensor that is computed (a pruned weight), torch would read the gradient, and warn of it.
            return self.mode.from_tensor(tensor if tensor.is_leaf else tensor.detach(), static_shapes=True)
        except Exception as cause:
            raise PreconditionError(
                f"infer_shapes: no fake tensor can be made of a {type(tensor).__name__} of {tensor.dtype}, "
                f"{tensor.layout}: {cause}. Nothing was changed"
            ) from cause

    def shadow(self, module: nn.Module) -> nn.Module:
        """Return a module of the same class on fake tensors, so that whatever runs leaves the original as it is."""
        if isinstance(module, torch.jit.ScriptModule):
            return module
        if id(module) not in self._shadows:
            shadow: nn.Module = object.__new__(type(module))
            self._shadows[id(module)] = shadow
            state = {name: self._plain(value) for name, value in module.__dict__.items()}
            state["_modules"] = {name: child and self.shadow(child) for name, child in module._modules.items()}
            shadow.__dict__.update(state)
        return self._shadows[id(module)]

    def _plain(self, value: object) -> object:
        """Return a copy of an attribute's value with fake tensors; lists and dicts may be filled while running."""
        if isinstance(value, Tensor):
            return self.fake(value)
        if type(value) in (list, tuple, set):
            items: Sequence[object] = list(value)  # type: ignore[call-overload]  # the test above tells no type
            return type(value)(self._leaf(item) for item in items)  # type: ignore[call-arg]  # nor here
        if isinstance(value, dict):
            copied = copy.copy(value)
            copied.update((key, self._leaf(item)) for key, item in value.items() if isinstance(item, Tensor))
            return copied
        return value

    def _leaf(self, value: object) -> object:
        return self.fake(value) if isinstance(value, Tensor) else value


def _bind(graph_module: GraphModule, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[Node, object]:
    """Return what each placeholder gets."""
    graph = graph_module.graph
    codegen = graph._codegen
    given = dict(kwargs)
    if isinstance(codegen, _PyTreeCodeGen):
        names = [name for name in codegen.pytree_info.orig_args if name != "self"]
        args = [*args, *(_taken(given, name, graph_module) for name in names[len(args) :])]
    values = iter(graph.process_inputs(*args))
    bound = {
        node: _argument(node, values, given, graph_module) for node in iter_nodes(graph) if node.op == "placeholder"
    }
    surplus = [*given, *(f"one more positional of type {type(value).__name__}" for value in values)]
    if surplus:
        raise PreconditionError(
            f"infer_shapes: the graph takes {_signature(graph_module)}, but was also given {surplus}"
        )
    return bound


def _argument(node: Node, values: Iterator[object], given: dict[str, object], graph_module: GraphModule) -> object:
    name = str(node.target)
    if name.startswith("**"):
        rest = dict(given)
        given.clear()
        return rest
    if name.startswith("*"):
        return list(values)
    for value in values:
        return value
    if name not in given and node.args:
        return node.args[0]
    return _taken(given, name, graph_module)


def _taken(given: dict[str, object], name: str, graph_module: GraphModule) -> object:
    if name not in given:
        raise PreconditionError(
            f"infer_shapes: no value for input `{name}`; the graph takes {_signature(graph_module)}: give it by "
            "position or by name"
        )
    return given.pop(name)


def _signature(graph_module: GraphModule) -> str:
    nodes = (node for node in iter_nodes(graph_module.graph) if node.op == "placeholder")
    return "(" + ", ".join(str(node.target) for node in nodes) + ")"


class _Run(Interpreter):
    """One run over a graph that notes what every node gives."""

    def __init__(self, shadow: nn.Module, original: GraphModule, faker: _Faker, inputs: dict[Node, object]) -> None:
        super().__init__(shadow, graph=original.graph)
        self.extra_traceback = False
        self.values: dict[Node, object] = {}
        self._faker = faker
        self._inputs = inputs
        self._autocasts: list[torch.autocast] = []

    def finish(self) -> None:
        """Run to the end, and leave autocast regions even where the run breaks off inside one."""
        for node, value in self._inputs.items():
            self._note(node, value)
        try:
            self.run(initial_env=dict(self._inputs), enable_io_processing=False)
        finally:
            for region in reversed(self._autocasts):
                region.__exit__(None, None, None)

    def run_node(self, n: Node) -> Any:
        """Run a node and note its value."""
        try:
            value = super().run_node(n)
            self._note(n, value)
        except Exception as cause:
            raise PreconditionError(
                f"infer_shapes: node `{n.name}` ({self._described(n)}) fails on fake tensors: {type(cause).__name__}: "
                f"{str(cause).strip()}. Nothing was changed; give inputs that the module accepts"
            ) from cause
        return value

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function; keep account of autocast regions."""
        result = super().call_function(target, args, kwargs)
        if target is _enter_autocast:
            self._autocasts.append(result)
        elif target is _exit_autocast:
            self._autocasts.remove(args[0])
        return result

    def _note(self, node: Node, value: object) -> None:
        if not isinstance(value, nn.Module):
            self.values[node] = pytree.tree_map_only(Tensor, self._kept, value)

    def _kept(self, tensor: Tensor) -> Tensor:
        """Return a counterpart that later in-place operations leave alone."""
        return self._faker.fake(tensor).detach() if not isinstance(tensor, FakeTensor) else tensor.detach()

    def _described(self, node: Node) -> str:
        target = (
            str(node.target) if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        )
        owner = dict(self.submodules).get(target) if node.op == "call_module" else None
        return f"{node.op} {target}" if owner is None else f"{node.op} {target}, a {type(owner).__name__}"
