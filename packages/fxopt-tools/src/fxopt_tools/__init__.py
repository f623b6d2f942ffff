"""Instruments over fxopt passes: numerical verification.

`verify` compares two modules; `Verify` gates each pass of a composition. The criterion is stated in
`fxopt_tools.measuring`, the tolerances in `fxopt_core.tolerances`.
"""

from fxopt_tools.inputs import Inputs
from fxopt_tools.instrument import Check, Verify
from fxopt_tools.measuring import Measurement, Worst
from fxopt_tools.report import OutputReport, VerificationReport
from fxopt_tools.verification import verify

__version__ = "0.1.0"

__all__ = ["Check", "Inputs", "Measurement", "OutputReport", "VerificationReport", "Verify", "Worst", "verify"]
