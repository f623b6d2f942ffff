"""What models of the transformers library need."""
