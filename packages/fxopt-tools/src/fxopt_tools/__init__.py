"""Tools around fxopt passes: verification, time, statistics, dumps, bisection, reproducers, measured benefit.

`verify` compares two modules; `Verify` checks each pass of a composition; `Timing`, `Statistics` and `Dumps` watch all
passes that run while they are entered. `bisect` finds the one rewrite to blame, `write_reproducer` keeps what failed,
`bench` measures what helps. `fxopt_tools.verification.closeness` states the criterion of `verify`.
"""

from fxopt_tools.bench import Benchmark, Candidate, Comparison, Contribution, bench, compare_pipelines
from fxopt_tools.bisect import Bisection, Trial, bisect
from fxopt_tools.inputs import Inputs
from fxopt_tools.reproducers import reproduce, write_reproducer
from fxopt_tools.rewrite_steps import BisectLimit, LeaveOut, RewriteStep
from fxopt_tools.verification.closeness import Measurement, Worst
from fxopt_tools.verification.instrument import Check, Verify
from fxopt_tools.verification.report import OutputReport, VerificationReport
from fxopt_tools.verification.verify import verify
from fxopt_tools.watch.dumps import Dumps
from fxopt_tools.watch.observation import Observation, observing
from fxopt_tools.watch.pass_statistics import PassStatistics, Size, Statistics
from fxopt_tools.watch.timing import TimedRun, Timing

__version__ = "0.1.0"


__all__ = [
    "Benchmark",
    "BisectLimit",
    "Bisection",
    "Candidate",
    "Check",
    "Comparison",
    "Contribution",
    "Dumps",
    "Inputs",
    "LeaveOut",
    "Measurement",
    "Observation",
    "OutputReport",
    "PassStatistics",
    "RewriteStep",
    "Size",
    "Statistics",
    "TimedRun",
    "Timing",
    "Trial",
    "VerificationReport",
    "Verify",
    "Worst",
    "bench",
    "bisect",
    "compare_pipelines",
    "observing",
    "reproduce",
    "verify",
    "write_reproducer",
]
