"""Shapes, dtypes and kinds of the values of a graph."""
