"""The plans that regions of a graph made."""

from __future__ import annotations

from torch.fx import GraphModule

from fxopt_cpu.operators.plan import Plan
from fxopt_cpu.regions.running import _REGIONS


def plans_of(graph_module: GraphModule) -> list[Plan]:
    """Return the current plans of a graph module."""
    _, regions = _REGIONS.get(graph_module, (None, {}))
    return [made.plan for region in regions.values() for made in region._state[1].values() if made is not None]
