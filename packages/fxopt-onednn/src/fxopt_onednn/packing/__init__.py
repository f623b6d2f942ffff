"""Convolutions and linear layers as one oneDNN call each, with packed weights and what surrounds them."""
