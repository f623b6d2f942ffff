"""fxopt passes on arithmetic: division by a constant becomes a multiplication."""

from fxopt_arith.true_division import ChangeTrueDivToMulByInverse

__version__ = "0.1.0"

__all__ = ["ChangeTrueDivToMulByInverse"]
