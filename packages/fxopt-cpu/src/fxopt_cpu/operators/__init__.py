"""Operators: schema, what they return under fake tensors, and what they compute, in plain torch."""
