"""The ``torch.compile`` backend ``fxopt``: passes on live models, whose weights stay their own."""

from fxopt_compile.backend import fxopt
from fxopt_compile.history import CompileHistory, GraphHistory, history, undo

__version__ = "0.1.0"

__all__ = ["CompileHistory", "GraphHistory", "fxopt", "history", "undo"]
