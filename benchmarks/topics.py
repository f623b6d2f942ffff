"""The topics, in the order of the page."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks import (
    architectures,
    calls,
    capture,
    correctness,
    cpu_inference,
    efficiency,
    encoders,
    folding,
    memory,
    merging,
    never_slower,
    passes,
    plans,
    quantized,
)
from benchmarks.suite import Topic

TOPICS: Mapping[str, Topic] = {
    "efficiency": efficiency.tables,
    "correctness": correctness.tables,
    "folding": folding.tables,
    "cpu-inference": cpu_inference.tables,
    "quantized": quantized.tables,
    "encoders": encoders.tables,
    "plans": plans.tables,
    "never-slower": never_slower.tables,
    "architectures": architectures.tables,
    "merging": merging.tables,
    "memory": memory.tables,
    "passes": passes.tables,
    "calls": calls.tables,
    "capture": capture.tables,
}
