"""Checkpoint files, read tensor by tensor into a rewritten model."""
