"""Captured modules as archives."""
