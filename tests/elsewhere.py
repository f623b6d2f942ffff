"""Another process, which loads graph modules that it has never seen, and saves them again."""

from __future__ import annotations

import io
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import torch
from torch.fx import GraphModule

from fxopt_core import history


@cache
def _process() -> ProcessPoolExecutor:
    """Return the process; it ends with this one."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def saved(graph_module: GraphModule) -> bytes:
    """Return what torch saves."""
    file = io.BytesIO()
    torch.save(graph_module, file)
    return file.getvalue()


def loaded(data: bytes) -> GraphModule:
    """Return what torch loads."""
    graph_module: GraphModule = torch.load(io.BytesIO(data), weights_only=False)
    return graph_module


def _passed_on(data: bytes) -> bytes:
    graph_module = loaded(data)
    assert history(graph_module)
    return saved(graph_module)


def passed_on(graph_module: GraphModule) -> GraphModule:
    """Return what another process has loaded and saved again."""
    return loaded(_process().submit(_passed_on, saved(graph_module)).result(timeout=120))
