"""Instruments over fxopt passes: numerical verification."""

__version__ = "0.1.0"
