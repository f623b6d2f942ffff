"""A model as a program of `torch.export`, and the conditions of this program on its inputs."""
