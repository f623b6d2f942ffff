"""The graph module that a capture returns."""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Interpreter
from torch.fx.graph import PythonCode

from fxopt_capture._torch import pytree_info
from fxopt_capture.call.arguments import InputBinding
from fxopt_capture.call.guards import GUARDS, InputGuards, check_mode
from fxopt_capture.exporting.failure import first_line
from fxopt_capture.huggingface.clients import add_attributes, without_defaults
from fxopt_core import install_pickling
from fxopt_core.errors import CaptureError
from fxopt_rewrite import runs_in_transform

aten = torch.ops.aten


class CapturedModule(GraphModule):
    """A captured model: a ``torch.fx.GraphModule`` that is called as the model is, in the mode of the capture.

    ``train()`` and ``eval()`` work as usual for the mode of the capture; for the other mode they raise a
    `CaptureError` if the mode changes what the model computes. Copies and pickles, ``torch.save`` included, keep the
    graph with all names, non-persistent buffers, ties, the order of keys, and the checks of calls.
    """

    _input_binding: InputBinding

    def recompile(self) -> PythonCode:
        """Generate ``forward`` from the graph again; it takes calls as the model's ``forward`` does."""
        code = super().recompile()
        forward = _bound(type(self).forward, converts=_converts_format(self._graph))
        if facts := _facts(self._graph):
            forward = _refusing(forward, facts)
        type(self).forward = forward  # torch makes one class for each instance
        add_attributes(self)
        return code

    def train(self, mode: bool = True) -> CapturedModule:
        """Set the training flag of all modules, or refuse a mode that the graph does not hold.

        Raises:
            CaptureError: the graph computes something else in that mode; nothing was changed.
        """
        guards = self._modules.get(GUARDS)
        if isinstance(guards, InputGuards):
            check_mode(guards.mode, mode)
        super().train(mode)
        return self

    def __copy__(self) -> CapturedModule:
        """Return a module that shares graph, tensors and submodules with this one, and has its own dictionaries."""
        copied = CapturedModule(nn.Module(), Graph(), class_name=type(self).__name__)
        for name, value in vars(self).items():
            vars(copied)[name] = value.copy() if isinstance(value, dict | list | set) else value
        copied.recompile()
        return copied

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedModule:
        # torch's own deep copy loses hooks, unread tensors and the order of keys.
        copied = CapturedModule(nn.Module(), Graph(), class_name=type(self).__name__)
        memo[id(self)] = copied
        state: dict[str, Any] = self.__getstate__()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        vars(copied).clear()  # a pickle of the copy has to read the attributes in this order
        with warnings.catch_warnings():
            # torch copies the specifications of inputs and outputs in a way that it deprecates itself.
            warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
            for name, value in state.items():
                is_shared = name.endswith(("_hooks", "_hooks_with_kwargs"))
                vars(copied)[name] = copy.copy(value) if is_shared else copy.deepcopy(value, memo)
        copied.graph = copied._graph  # which makes the copy its owner
        for hook in copied._deepcopy_hooks:
            hook(copied)
        return copied


def _bound(compute: Callable[..., Any], *, converts: bool) -> Callable[..., Any]:
    """Return the generated ``forward`` with the arguments of a call bound to the inputs of the graph.

    A graph that `converts` memory formats runs without these conversions under ``torch.vmap``, which has only one.

    A forward pre-hook could bind them too, but torch then takes a path through ``nn.Module.__call__`` that costs
    several microseconds, and calls of ``forward`` itself would go unchecked.
    """

    @functools.wraps(compute)
    def forward(self: CapturedModule, *args: Any, **kwargs: Any) -> Any:
        if kwargs:
            kwargs = without_defaults(self, kwargs, self._input_binding.form.fixed)
        inputs = self._input_binding(args, kwargs)
        if converts and runs_in_transform():
            return _AnyFormat(self).run(*(args if inputs is None else inputs.values()))
        return compute(self, *args, **kwargs) if inputs is None else compute(self, **inputs)

    return forward


def _converts_format(graph: Graph) -> bool:
    """Return whether a graph has named inputs, and converts values to a memory format."""
    # `memory_format` is the only keyword of `aten.contiguous`.
    converts = any(node.kwargs for node in graph.find_nodes(op="call_function", target=aten.contiguous.default))
    return converts and pytree_info(graph) is None


class _AnyFormat(Interpreter):
    """Runs a graph node by node, without its conversions to other memory formats."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a function."""
        return super().call_function(target, args, {} if target is aten.contiguous.default else kwargs)


def _facts(graph: Graph) -> tuple[str, ...]:
    """Return the messages of a graph's assertions that values are as they were during the capture."""
    asserts = (aten._assert_scalar.default, aten._assert_async.msg)
    nodes = [node for target in asserts for node in graph.find_nodes(op="call_function", target=target)]
    # Both operators take what must hold, and then the message.
    return tuple(str(message) for node in nodes for message in node.args[1:])


def _refusing(forward: Callable[..., Any], facts: tuple[str, ...]) -> Callable[..., Any]:
    """Return a ``forward`` that raises a `CaptureError` if the graph finds values for which it is not valid."""

    @functools.wraps(forward)
    def refusing(self: CapturedModule, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(self, *args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith(facts):
                raise
            raise CaptureError(
                f"the captured {type(self).__name__} is not valid for the values of these inputs, which decide what "
                f"the model computes: {first_line(error)}; capture the model again with such inputs"
            ) from error

    return refusing


def assemble(shell: nn.Module, graph: Graph, guards: InputGuards, binding: InputBinding) -> CapturedModule:
    """Return the captured module of a graph that calls `guards`.

    `shell` holds, under their names, all modules, parameters and buffers of the result; it is used up.
    """
    captured = CapturedModule(nn.Module(), Graph(), class_name=binding.model_name)
    captured.training = guards.training = shell.training
    captured._modules[GUARDS] = guards
    captured._modules.update(shell._modules)
    captured._parameters.update(shell._parameters)
    captured._buffers.update(shell._buffers)
    captured._non_persistent_buffers_set |= shell._non_persistent_buffers_set
    # Before the graph: reading a pickle registers the containers of inputs here, and the graph's attributes name them.
    captured._input_binding = binding
    captured.graph = graph
    install_pickling(captured)
    return captured
