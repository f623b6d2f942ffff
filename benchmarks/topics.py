"""The topics, in the order of the page."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks import capture, correctness, merging
from benchmarks.suite import Topic

TOPICS: Mapping[str, Topic] = {
    "correctness": correctness.tables,
    "merging": merging.tables,
    "capture": capture.tables,
}
