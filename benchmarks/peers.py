"""The peers, each imported where it is needed: a missing one is a row that says so, not a failure."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any
from warnings import catch_warnings, simplefilter

from benchmarks.suite import Absent


def peer(module: str) -> Any:
    """Return a module of a peer, which is untyped; or an `Absent` that says why there is none.

    >>> peer("no_such_peer")
    Absent(reason='not installed')
    """
    if find_spec(module.partition(".")[0]) is None:
        return Absent("not installed")
    try:
        with catch_warnings():
            simplefilter("ignore")  # the peer may warn of deprecations of its own
            return import_module(module)
    except Exception as error:  # importing runs the peer's code, which may raise anything
        return Absent(f"does not import with transformers {_version('transformers')}: {Absent.because(error).reason}")


def optimum() -> Any:
    """Return ``optimum.fx.optimization``.

    It can be imported with transformers 5, but the tracer that its guide uses, ``transformers.utils.fx``, is gone. Here
    ``torch.fx.symbolic_trace`` replaces only that tracer.
    """
    return peer("optimum.fx.optimization")


def torch_fuse() -> Any:
    """Return ``torch.fx.experimental.optimization``."""
    return peer("torch.fx.experimental.optimization")


def onnxruntime() -> Any:
    """Return onnxruntime."""
    return peer("onnxruntime")


def openvino() -> Any:
    """Return OpenVINO."""
    return peer("openvino")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
