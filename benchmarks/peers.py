"""The peers, each imported where it is needed: one that is missing is a row that says so, and no failure."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any
from warnings import catch_warnings, simplefilter

from benchmarks.suite import Absent


def peer(module: str) -> Any:
    """Return a module of a peer, which is untyped; or an `Absent` that says why it cannot be had.

    >>> peer("no_such_peer")
    Absent(reason='not installed')
    """
    if find_spec(module.partition(".")[0]) is None:
        return Absent("not installed")
    try:
        with catch_warnings():
            simplefilter("ignore")  # the peer may deprecate what it likes
            return import_module(module)
    except Exception as error:  # importing runs the peer's code, which may raise anything
        return Absent(f"does not import with transformers {_version('transformers')}: {Absent.because(error).reason}")


def optimum() -> Any:
    """Return ``optimum.fx.optimization``.

    It imports beside transformers 5; what is gone is the tracer that its guide uses, ``transformers.utils.fx``. Here
    ``torch.fx.symbolic_trace`` stands in for that, and nothing else does.
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
