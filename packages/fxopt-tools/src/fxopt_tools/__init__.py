"""Tools around fxopt passes: verification, bisection, measured benefit.

`verify` compares two modules; `Verify` checks each pass of a composition. `bisect` finds the one rewrite to blame,
`bench` measures speed-ups.
`fxopt_tools.verification.closeness` states the criterion of `verify`.
"""

from fxopt_tools.bench import Benchmark, Candidate, Comparison, Contribution, bench, compare_pipelines
from fxopt_tools.bisect import Bisection, Trial, bisect
from fxopt_tools.inputs import Inputs
from fxopt_tools.rewrite_steps import BisectLimit, LeaveOut, RewriteStep
from fxopt_tools.size import Size
from fxopt_tools.speed import Ratio
from fxopt_tools.verification.closeness import Measurement, Worst
from fxopt_tools.verification.instrument import Check, Verify
from fxopt_tools.verification.judge import differing
from fxopt_tools.verification.report import OutputReport, VerificationReport
from fxopt_tools.verification.verify import verify

__version__ = "0.1.0"


__all__ = [
    "Benchmark",
    "BisectLimit",
    "Bisection",
    "Candidate",
    "Check",
    "Comparison",
    "Contribution",
    "Inputs",
    "LeaveOut",
    "Measurement",
    "OutputReport",
    "Ratio",
    "RewriteStep",
    "Size",
    "Trial",
    "VerificationReport",
    "Verify",
    "Worst",
    "bench",
    "bisect",
    "compare_pipelines",
    "differing",
    "verify",
]
