"""Transformations of torch.fx graphs: contract, ledger, transaction, registry."""

__version__ = "0.1.0"
