"""PyTorch models as torch.fx graph modules that read like the model; archives of `torch.export` in and out."""

from __future__ import annotations

from .archive import load, save
from .capture import capture
from .captured import CapturedModule
from .guards import InputGuards
from .streaming import load_checkpoint
from .tracing import symbolic_trace

__all__ = ["CapturedModule", "InputGuards", "capture", "load", "load_checkpoint", "save", "symbolic_trace"]
__version__ = "0.1.0"
