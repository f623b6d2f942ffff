"""Calls of layers, read alike in every form of graph."""
