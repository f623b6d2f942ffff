"""The graph of an export, made to read like the model."""
