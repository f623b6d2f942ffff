"""The passes that put the kernels' layers into graphs."""
