"""`infer_shapes`: run a graph on fake tensors and note the value of every node."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from inspect import Parameter, Signature
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import SymInt, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils._python_dispatch import TorchDispatchMode

from fxopt_core import (
    PyTreeCodeGen,
    check_graph_module,
    codegen_of,
    iter_nodes,
    type_text,
)
from fxopt_core.errors import PreconditionError
from fxopt_rewrite._torch import enter_autocast, exit_autocast, suggest_memory_format
from fxopt_rewrite.shapes.kinds import attribute
from fxopt_rewrite.shapes.meta import ONE_AT_A_TIME, alias_of_fake


def infer_shapes(graph_module: GraphModule, *args: object, **kwargs: object) -> GraphModule:
    """Set ``node.meta["val"]`` of every node to its value for these inputs, as a fake tensor: nothing is computed.

    Fake tensors have shape, dtype, device and strides but no memory. The graph runs on a copy of the module tree:
    parameters, buffers, random state and grad mode stay as they are. Sizes are those of the inputs; for symbolic sizes,
    give fake tensors that have them. Passes take the ranks and dtypes for those of every input: what they rewrite
    afterwards is for inputs of these ranks, floating-point where these are, and of these dtypes where a pass asks.

    Args:
        graph_module: a graph in any form.
        args: inputs as the module takes them: real, meta or fake tensors, in any structure. If some tensors of the
            inputs or the module are on a real device, those on ``meta`` count as being on it too.
        kwargs: inputs by name.

    Returns:
        The graph module itself.

    Raises:
        PreconditionError: The module does not take these inputs, or a node cannot run on fake tensors, for example
            because it depends on values; nothing is changed.

    >>> graph_module = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 8), nn.ReLU()))
    >>> [tuple(node.meta["val"].shape) for node in infer_shapes(graph_module, torch.zeros(3, 4)).graph.nodes]
    [(3, 4), (3, 8), (3, 8), (3, 8)]
    """
    check_graph_module(graph_module, "infer_shapes")
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    tensors = [*given, *graph_module.parameters(), *graph_module.buffers()]
    faker = _Faker(_mode_of(tensors), next((tensor.device for tensor in tensors if tensor.device.type != "meta"), None))
    with _undisturbed(faker.mode):
        args, kwargs = pytree.tree_map_only(Tensor, faker.fake, (args, kwargs))
        run = _Run(faker.shadow(graph_module), graph_module, faker, _bind(graph_module.graph, args, kwargs))
        with faker.mode, _EagerStrides():  # type: ignore[no-untyped-call]  # torch's constructor
            run.finish()
    for node, value in run.values.items():
        node.meta["val"] = value
    return graph_module


def fake_values(graph: Graph) -> list[FakeTensor]:
    """Return the fake tensors in ``meta["val"]`` of a graph's nodes."""
    return [value for node in iter_nodes(graph) if isinstance(value := node.meta.get("val"), FakeTensor)]


def describe_values(graph_module: GraphModule, nodes: Iterable[Node], fakes: Sequence[FakeTensor]) -> None:
    """Set ``meta["val"]`` of new and restored nodes, in a graph whose other nodes have or had it.

    No guard is added to symbolic sizes. A node that cannot run on the values of its inputs stays without a value.
    """
    # In the order of the graph, so that a node finds the values of new nodes that it reads.
    nodes = sorted(node for node in nodes if "val" not in node.meta)
    if not nodes or not fakes:
        return
    mode = fakes[0].fake_mode
    faker = _Faker(mode, next((fake.device for fake in fakes if fake.device.type != "meta"), None))
    unguarded = nullcontext() if mode.shape_env is None else mode.shape_env.suppress_guards()
    # A tensor of which no fake one can be made leaves all of them without a value.
    with ONE_AT_A_TIME, _undisturbed(mode), unguarded, suppress(PreconditionError):
        run = _Run(graph_module, graph_module, faker, {})
        targets = {str(node.target) for node in nodes if node.op in ("get_attr", "call_module")}
        named = {target: attribute(graph_module, target) for target in targets}
        # Of a large module, only what these nodes read is copied, and before the mode is entered.
        run.copies = {target: faker.copied(value) for target, value in named.items() if value is not None}
        for node in nodes:
            inputs = {each: each.meta.get("val") for each in node.all_input_nodes}
            known = bool(inputs) or node.op == "get_attr"  # a call without inputs is a factory, or draws
            if known and all(isinstance(value, _VALUES) for value in inputs.values()):
                with suppress(PreconditionError), mode, _EagerStrides():  # type: ignore[no-untyped-call]
                    run.env = {each: run.kept(value) for each, value in inputs.items()}
                    run.run_node(node)
                    if node in run.values:  # not if it is a module
                        node.meta["val"] = run.values[node]


_VALUES = (Tensor, SymInt, int, float, tuple, list)


def _mode_of(tensors: Sequence[Tensor]) -> FakeTensorMode:
    modes = {id(tensor.fake_mode): tensor.fake_mode for tensor in tensors if isinstance(tensor, FakeTensor)}
    if len(modes) > 1:
        raise PreconditionError("infer_shapes is given fake tensors of several modes; make them under one")
    # A fallback kernel would run the operator on real tensors of zeros.
    return modes.popitem()[1] if modes else FakeTensorMode(allow_non_fake_inputs=True, allow_fallback_kernels=False)


@contextmanager
def _undisturbed(mode: FakeTensorMode) -> Iterator[None]:
    """Keep grad mode, random state and the setting of the fake tensor mode as they are."""
    allowed = mode.allow_non_fake_inputs
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.no_grad():
        try:
            mode.allow_non_fake_inputs = True
            yield
        finally:
            mode.allow_non_fake_inputs = allowed


def _alias_of(tensor: Tensor) -> Tensor:
    if tensor.is_inference():  # another one could not require gradients
        return tensor
    alias = tensor.detach()
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(alias, tensor.requires_grad)
    return alias.requires_grad_(tensor.requires_grad and tensor.is_leaf)


class _Faker:
    """Makes fake counterparts of tensors and modules, one for each."""

    def __init__(self, mode: FakeTensorMode, device: torch.device | None) -> None:
        self.mode = mode
        self._device = device
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}
        self._shadows: dict[int, nn.Module] = {}

    def fake(self, tensor: Tensor) -> Tensor:
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
            # Of another tensor over the same memory, as the mode refers to it weakly, and reads its gradient.
            return self.mode.from_tensor(_alias_of(tensor), static_shapes=True)
        except Exception as cause:
            raise PreconditionError(
                f"infer_shapes: no fake tensor can be made of {type_text(tensor)} of {tensor.dtype}, "
                f"{tensor.layout}: {cause}. Nothing was changed"
            ) from cause

    def copied(self, value: Any) -> Any:
        """Return the shadow of a module; of any other value, a copy with fake tensors."""
        return self.shadow(value) if isinstance(value, nn.Module) else pytree.tree_map_only(Tensor, self.fake, value)

    def shadow(self, module: nn.Module) -> nn.Module:
        """Return a module of the same class with fake tensors, so that running it leaves the original as it is."""
        # The tensors of a script module are in a C++ object, out of reach of `vars`.
        if isinstance(module, torch.jit.ScriptModule):
            return module
        if id(module) not in self._shadows:
            shadow: nn.Module = object.__new__(type(module))
            self._shadows[id(module)] = shadow
            # Containers are copied, as running the module may fill them.
            state = {name: self.copied(value) for name, value in vars(module).items()}
            children = module._modules.items()
            state["_modules"] = {name: None if each is None else self.shadow(each) for name, each in children}
            shadow.__dict__.update(state)
        return self._shadows[id(module)]


def _bind(graph: Graph, args: Sequence[object], kwargs: Mapping[str, object]) -> dict[Node, object]:
    """Return the value of each input of a graph."""
    # Not by the signature of `forward`: dynamo's modules have theirs after the first call, edited graphs an old one.
    inputs, codegen = graph.find_nodes(op="placeholder"), codegen_of(graph)
    if isinstance(codegen, PyTreeCodeGen):
        names = (name for name in codegen.pytree_info.orig_args if name != "self")
        signature = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names])
    else:
        signature = Signature(list(map(_parameter, inputs)))
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise PreconditionError(f"infer_shapes: {error}; the graph takes {signature}") from error
    bound.apply_defaults()
    # An export graph has a placeholder for each leaf of its nested inputs.
    values = graph.process_inputs(*bound.args) if isinstance(codegen, PyTreeCodeGen) else bound.arguments.values()
    return dict(zip(inputs, values, strict=True))


def _parameter(node: Node) -> Parameter:
    name = str(node.target)
    if name.startswith("*"):
        return Parameter(name.strip("*"), Parameter.VAR_KEYWORD if name.startswith("**") else Parameter.VAR_POSITIONAL)
    return Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=node.args[0] if node.args else Parameter.empty)


_aten = torch.ops.aten
#: Operators whose results are in the memory format of the input on CPUs, and not always so for fake tensors.
_IN_INPUTS_FORMAT = frozenset({
    _aten.native_group_norm.default, _aten.native_batch_norm.default, _aten.roll.default,
    _aten.channel_shuffle.default, _aten.native_channel_shuffle.default,
})  # fmt: skip


class _EagerStrides(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """Strides results of fake tensors as those of tensors, where torch does not."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _IN_INPUTS_FORMAT or args[0].device.type != "cpu":
            return result
        if func is _aten.roll.default and not any(args[2:]):  # without dimensions, it rolls a flattened copy
            return result
        first, *others = result if isinstance(result, tuple) else (result,)
        first = first.contiguous(memory_format=suggest_memory_format(args[0]))
        return (first, *others) if others else first


class _Run(Interpreter):
    def __init__(self, shadow: nn.Module, original: GraphModule, faker: _Faker, inputs: dict[Node, object]) -> None:
        super().__init__(shadow, garbage_collect_values=False, graph=original.graph)
        # The interpreter would append the traceback of the model to the text of an error; `run_node` names the node.
        self.extra_traceback = False
        self.values: dict[Node, object] = {}
        self._faker = faker
        self._inputs = inputs
        self.copies: dict[str, Any] = {}  # what targets name, where only a part of the module was copied
        self._autocasts: list[torch.autocast] = []

    def finish(self) -> None:
        """Run to the end, and leave autocast regions even if the run fails inside one."""
        # The interpreter skips nodes that have an initial value, so `run_node` never sees the inputs.
        for node, value in self._inputs.items():
            self._note(node, value)
        try:
            self.run(initial_env=dict(self._inputs), enable_io_processing=False)
        finally:
            for region in reversed(self._autocasts):
                region.__exit__(None, None, None)

    def run_node(self, n: Node) -> Any:
        try:
            value = super().run_node(n)
            self._note(n, value)
        except Exception as cause:
            owner = dict(self.submodules).get(str(n.target)) if n.op == "call_module" else None
            target = getattr(n.target, "__name__", n.target) if owner is None else f"{n.target}, {type_text(owner)}"
            raise PreconditionError(
                f"infer_shapes: node `{n.name}` ({n.op} {target}) fails on fake tensors: {type(cause).__name__}: "
                f"{str(cause).strip()}. Nothing was changed; give inputs that the module accepts"
            ) from cause
        return value

    def fetch_attr(self, target: str) -> Any:
        return self.copies[target] if target in self.copies else super().fetch_attr(target)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = super().call_function(target, args, kwargs)
        if target is enter_autocast:
            self._autocasts.append(result)
        elif target is exit_autocast:
            self._autocasts.remove(args[0])
        return result

    def _note(self, node: Node, value: object) -> None:
        if not isinstance(value, nn.Module):
            self.values[node] = self.kept(value)

    def kept(self, value: object) -> object:
        """Return a value whose tensors later in-place operations do not change."""
        known: dict[int, Tensor] = {}

        def keep(tensor: Tensor) -> Tensor:
            if id(tensor) not in known:
                fake = tensor if isinstance(tensor, FakeTensor) else self._faker.fake(tensor)
                known[id(tensor)] = alias_of_fake(fake) if type(fake) is FakeTensor else fake.detach()
            return known[id(tensor)]

        return pytree.tree_map_only(Tensor, keep, value)
