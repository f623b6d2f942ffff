"""Tracing a captured graph module by ``torch.fx``: its nodes are written into the graph that is being made.

Running its code on proxies would lose calls without a proxy among their arguments (writes to buffers, random numbers),
enter contexts while tracing, and have the checks of inputs refuse the proxies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Interpreter, Proxy, Tracer


def retrace(graph_module: GraphModule, values: Sequence[object]) -> Any:
    """Return, as proxies, the outputs of a captured graph module for flat inputs of which some are proxies.

    The tracer decides whether layers of torch become calls or are traced. Other modules become calls: checks of inputs,
    and layers that passes have inserted.
    """
    tracer = next(value.tracer for value in values if isinstance(value, Proxy))
    assert isinstance(tracer, Tracer)  # no other has proxies of calls
    outputs = _Retracing(graph_module, tracer).run(*values, enable_io_processing=False)
    result: Any = graph_module.graph.process_outputs(outputs)
    if isinstance(result, dict) and type(result).__module__.startswith("transformers."):
        return tracer.create_proxy("call_function", type(result), (), dict(result))  # torch makes a dictionary of it
    return result


class _Retracing(Interpreter):
    def __init__(self, graph_module: GraphModule, tracer: Tracer) -> None:
        super().__init__(graph_module)
        self._tracer = tracer
        path = tracer.path_of_module(graph_module)
        self._prefix = f"{path}." if path else ""

    def get_attr(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._tracer.create_proxy("get_attr", f"{self._prefix}{target}", args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._tracer.create_proxy("call_function", target, args, kwargs)

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._tracer.create_proxy("call_method", target, args, kwargs)

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        module = self.fetch_attr(target)
        if type(module).__module__.startswith("torch.nn."):
            return module(*args, **kwargs)  # the tracer decides whether to go into it
        return self._tracer.create_proxy("call_module", f"{self._prefix}{target}", args, kwargs)
