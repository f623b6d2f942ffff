"""Which operator of torch computes what, under each of its names."""
