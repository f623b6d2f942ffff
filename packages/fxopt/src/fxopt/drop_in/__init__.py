"""Optimized models where people already have models: in sentence-transformers, pipelines, and folders of both."""
