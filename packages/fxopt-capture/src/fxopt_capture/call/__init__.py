"""How a captured module is called: arguments, containers, and the check of inputs."""
