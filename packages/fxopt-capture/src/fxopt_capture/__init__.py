"""Capture PyTorch models as torch.fx graph modules that read like the model."""

__version__ = "0.1.0"
