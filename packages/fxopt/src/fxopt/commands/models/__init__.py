"""SOURCE and its inputs: what a command reads a model from, and what it calls the model with."""
