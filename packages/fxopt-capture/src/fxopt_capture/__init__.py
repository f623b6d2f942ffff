"""Capture PyTorch models as torch.fx graph modules that read like the model."""

from __future__ import annotations

from .capture import capture
from .captured import CapturedModule

__all__ = ["CapturedModule", "capture"]
__version__ = "0.1.0"
