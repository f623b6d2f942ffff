"""fxopt passes on linear layers: merge siblings, fuse biases."""

__version__ = "0.1.0"
