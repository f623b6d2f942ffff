"""fxopt passes that fold batch normalisation into convolutions and linear layers."""

__version__ = "0.1.0"
