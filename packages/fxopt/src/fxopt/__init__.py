"""Fewer and faster operations in PyTorch graphs, with proof: one import for all of fxopt."""

__version__ = "0.1.0"
