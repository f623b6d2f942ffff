"""Run trials, each in a process of its own with limits of time and memory."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable

from zoo.results import LIMIT
from zoo.trial import Row

MEMORY = 12 << 30


def apart(trial: Callable[[Callable[[Row], None]], None], seconds: float) -> Row:
    """Fork a child that runs a trial, and return the last row that it reported; it is killed after `seconds`."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _child(trial, writer, seconds)
    os.close(writer)
    received, end = b"", time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0 and select.select([reader], [], [], left)[0]:
        if not (part := os.read(reader, 1 << 16)):
            break
        received += part
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.close(reader)
    status = os.waitpid(child, 0)[1]
    rows = [line for line in received.split(b"\n")[:-1] if line]
    return ended(json.loads(rows[-1]) if rows else {}, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0)


def ended(row: Row, number: int) -> Row:
    """Return the last row of a child; if it was not done, with how it ended: by a limit, or by another signal."""
    step = row.pop("running", None)
    if step is None:
        return row
    is_limit = number in (0, signal.SIGKILL, signal.SIGXCPU)
    how = LIMIT if is_limit else f"crashed with {signal.Signals(number).name}"
    if step in ("build", "capture"):
        row["refused"] = [step, LIMIT if is_limit else "crash", how]
    else:
        row["problems"][step] = how
    return row


def _child(trial: Callable[[Callable[[Row], None]], None], writer: int, seconds: float) -> None:
    """Run a trial and end the process; what models print is dropped."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nothing, stream)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds)))
    try:
        trial(lambda row: _write(writer, json.dumps(row).encode() + b"\n"))
    finally:
        os._exit(0)


def _write(writer: int, data: bytes) -> None:
    while data:
        data = data[os.write(writer, data) :]
