"""Memory layout of images, and the removal of calls that change nothing."""
