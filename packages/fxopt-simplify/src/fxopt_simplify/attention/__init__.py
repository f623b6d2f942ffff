"""Attention that is written out, read as one operation."""
