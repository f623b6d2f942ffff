"""Kernels for inference on a CPU, and the passes that use them."""

from fxopt_kernels.library import isa

__version__ = "0.1.0"

__all__ = ["isa"]
