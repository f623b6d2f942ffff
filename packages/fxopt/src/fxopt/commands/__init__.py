"""The command `fxopt`: a file for each of its commands, and what they share. Nothing outside imports this package."""
