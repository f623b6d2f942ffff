"""Instruments over fxopt passes: verification, time, statistics, dumps, bisection, reproducers, measured benefit.

`verify` compares two modules; `Verify` gates each pass of a composition; `Timing`, `Statistics` and `Dumps` watch all
passes that run while they are instrumented. `bisect` finds the one rewrite that is to blame, `Reproducers` keeps what
failed, `bench` and `tune` measure what helps. What `verify` compares by is stated in `fxopt_tools.measuring`, its
tolerances in `fxopt_core.tolerances`.
"""

from fxopt_tools.benchmark import Benchmark, Contribution, bench
from fxopt_tools.bisection import Bisection, Trial, bisect
from fxopt_tools.dumps import Dumps
from fxopt_tools.inputs import Inputs
from fxopt_tools.instrument import Check, Verify
from fxopt_tools.limits import BisectLimit, LeaveOut
from fxopt_tools.measuring import Measurement, Worst
from fxopt_tools.observation import Observation, observing
from fxopt_tools.report import OutputReport, VerificationReport
from fxopt_tools.reproducers import Reproducers, write_reproducer
from fxopt_tools.reproducing import Reproduction, reproduce
from fxopt_tools.sampling import Ratio, Times
from fxopt_tools.statistics import PassStatistics, Size, Statistics
from fxopt_tools.steps import RewriteStep
from fxopt_tools.timing import TimedPass, TimedRun, Timing
from fxopt_tools.tuning import Decision, Tuning, tune
from fxopt_tools.verification import verify

__version__ = "0.1.0"

__all__ = [
    "Benchmark",
    "BisectLimit",
    "Bisection",
    "Check",
    "Contribution",
    "Decision",
    "Dumps",
    "Inputs",
    "LeaveOut",
    "Measurement",
    "Observation",
    "OutputReport",
    "PassStatistics",
    "Ratio",
    "Reproducers",
    "Reproduction",
    "RewriteStep",
    "Size",
    "Statistics",
    "TimedPass",
    "TimedRun",
    "Times",
    "Timing",
    "Trial",
    "Tuning",
    "VerificationReport",
    "Verify",
    "Worst",
    "bench",
    "bisect",
    "observing",
    "reproduce",
    "tune",
    "verify",
    "write_reproducer",
]
