"""Tracing a captured graph module by ``torch.fx``: its nodes are written into the graph that is being made.

Running its code on proxies would lose calls without a proxy among their arguments (writes to buffers, random numbers),
enter contexts while tracing, and have the checks of inputs refuse the proxies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.fx import GraphModule, Node, Proxy, Tracer
from torch.fx.node import map_arg

from fxopt_core import iter_nodes


def retrace(graph_module: GraphModule, values: Sequence[object]) -> Any:
    """Return, as proxies, the outputs of a captured graph module for flat inputs of which some are proxies.

    The tracer decides whether layers of torch become calls or are traced. Other modules become calls: checks of inputs,
    and layers that passes have inserted.
    """
    tracer = next(value.tracer for value in values if isinstance(value, Proxy))
    assert isinstance(tracer, Tracer)  # no other has proxies of calls
    path = tracer.path_of_module(graph_module)
    prefix = f"{path}." if path else ""
    found: dict[Node, Any] = dict(zip(graph_module.graph.find_nodes(op="placeholder"), values, strict=True))
    outputs: Any = None
    for node in iter_nodes(graph_module.graph):
        args, kwargs = map_arg((node.args, node.kwargs), found.__getitem__)
        module: Any = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if node.op == "output":
            outputs = args[0]
        elif type(module).__module__.startswith("torch.nn."):
            found[node] = module(*args, **kwargs)  # the tracer decides whether to go into it
        elif node.op in ("get_attr", "call_module"):
            found[node] = tracer.create_proxy(node.op, f"{prefix}{node.target}", args, kwargs)
        elif node.op != "placeholder":
            found[node] = tracer.create_proxy(node.op, node.target, args, kwargs)
    result: Any = graph_module.graph.process_outputs(outputs)
    if isinstance(result, dict) and type(result).__module__.startswith("transformers."):
        return tracer.create_proxy("call_function", type(result), (), dict(result))  # torch makes a dictionary of it
    return result
