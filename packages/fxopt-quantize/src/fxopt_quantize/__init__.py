"""fxopt passes that approximate, with declared accuracy: int8 linear layers and bfloat16, for CPUs."""

from fxopt_quantize.calibration import calibrated
from fxopt_quantize.cast_to_bfloat16 import CastToBfloat16
from fxopt_quantize.quantize_linears import QuantizeLinears
from fxopt_quantize.quantized_linear import QuantizedLinear

__version__ = "0.1.0"

__all__ = ["CastToBfloat16", "QuantizeLinears", "QuantizedLinear", "calibrated"]
