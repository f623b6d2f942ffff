"""A model as a program of `torch.export`, and what that program demands of its inputs."""
