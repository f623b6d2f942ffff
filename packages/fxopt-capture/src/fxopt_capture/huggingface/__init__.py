"""Support for models of the transformers library."""
