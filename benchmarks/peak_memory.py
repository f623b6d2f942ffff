"""The peak memory of a piece of work, measured in a process of its own.

The process's resident memory is read before anything is prepared (modules are imported by then), and its highest value
while the work runs. Linux lets a process reset that highest value; elsewhere it includes the preparation.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

ROOT = Path(__file__).parent.parent
Json = str | int | float | bool | None
_MARK = "peak-memory: "


@dataclass(frozen=True)
class Peak:
    """The needs of a process, in bytes of resident memory and seconds.

    Attributes:
        baseline: before anything was prepared.
        before: before the work, with everything prepared.
        highest: the most while it worked.
        after: when it was done, with its result alive.
        seconds: of the work.
        result: what the work returned, where that is text, a number or None.
    """

    baseline: int
    before: int
    highest: int
    after: int
    seconds: float
    result: Json = None

    @property
    def added(self) -> int:
        """The most beyond the baseline, prepared things included."""
        return self.highest - self.baseline


def peak_of(function: Callable[..., Callable[[], object]], *arguments: Json, threads: int = 2) -> Peak:
    """Measure ``function(*arguments)()`` in a new process; what the first call does is preparation and is not counted.

    Args:
        function: of a module; it prepares, and returns the work.
        arguments: values that JSON can hold.
        threads: torch's threads in that process.

    Raises:
        RuntimeError: The process failed; the message ends with its last output.
    """
    call = [function.__module__, function.__qualname__, json.dumps(arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "benchmarks.peak_memory", *call]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    for line in reversed(done.stdout.splitlines()):
        if line.startswith(_MARK):
            return Peak(**json.loads(line.removeprefix(_MARK)))
    raise RuntimeError(f"{'.'.join(call[:2])} ended with {done.returncode}: {done.stderr.strip()[-1000:]}")


def measured(function: Callable[..., Callable[[], object]], arguments: list[Json]) -> Peak:
    """Prepare and work in this process, and return what that needed."""
    gc.collect()
    baseline = resident()
    work = function(*arguments)
    gc.collect()
    before = resident()
    reset_highest()
    started = perf_counter()
    result = work()
    seconds = perf_counter() - started
    highest, after = highest_resident(), resident()
    plain = result if isinstance(result, str | int | float | bool) else None
    return Peak(baseline, before, max(highest, after), after, seconds, plain)


def resident() -> int:
    """Return the bytes of resident memory."""
    return _status("VmRSS") or _most()


def highest_resident() -> int:
    """Return the most bytes of resident memory since the last reset."""
    return _status("VmHWM") or _most()


def reset_highest() -> None:
    """Reset the highest value, where the system can."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    except OSError:  # another system, or a process that may not
        return


def _status(name: str) -> int | None:
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    for line in text.splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _most() -> int:
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most if sys.platform == "darwin" else most * 1024


def main() -> None:
    """Measure what the arguments name: module, function, JSON of arguments."""
    module, name, arguments = sys.argv[1:]
    function: Any = getattr(import_module(module), name)
    print(_MARK + json.dumps(asdict(measured(function, json.loads(arguments)))))


if __name__ == "__main__":
    main()
