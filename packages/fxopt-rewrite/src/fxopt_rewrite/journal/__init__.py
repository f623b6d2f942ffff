"""Edits of a graph as they are recorded, and the one replay that takes them back."""
