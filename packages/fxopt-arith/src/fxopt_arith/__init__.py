"""fxopt passes on arithmetic: division by a constant becomes a multiplication."""

__version__ = "0.1.0"
