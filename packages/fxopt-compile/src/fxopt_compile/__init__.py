"""Passes in ``torch.compile``: the backend ``fxopt`` for live models, which keep their own weights, and adapters."""

from fxopt_compile.backend import fxopt
from fxopt_compile.history import CompileHistory, GraphHistory, history, undo
from fxopt_compile.torch_passes import as_inductor_pass, as_pass_base

__version__ = "0.1.0"

__all__ = ["CompileHistory", "GraphHistory", "as_inductor_pass", "as_pass_base", "fxopt", "history", "undo"]
