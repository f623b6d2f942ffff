"""Captured modules as `.pt2` archives."""
