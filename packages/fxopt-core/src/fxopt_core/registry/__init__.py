"""Passes found through entry points, and pipelines as text."""
