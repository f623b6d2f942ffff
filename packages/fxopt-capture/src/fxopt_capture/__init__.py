"""PyTorch models as torch.fx graph modules that read like the model; archives of them."""

from __future__ import annotations

from fxopt_capture.archive.export import export
from fxopt_capture.archive.files import load, save
from fxopt_capture.call.guards import InputGuards
from fxopt_capture.capture import capture
from fxopt_capture.captured import CapturedModule
from fxopt_capture.huggingface import folders as folders  # which gives captured models their `save_pretrained`
from fxopt_capture.tracing import symbolic_trace

__all__ = ["CapturedModule", "InputGuards", "capture", "export", "load", "save", "symbolic_trace"]
__version__ = "0.1.0"
