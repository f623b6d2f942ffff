"""Regions of layers as one call of ``fxopt::run``."""
