"""The facts about a machine that numbers depend on; no names of hosts or users."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "torch",
    "transformers",
    "timm",
    "optimum",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "openvino",
    "nncf",
    "safetensors",
    "torchao",
    "numpy",
)
Facts = dict[str, str]


def facts(threads: int) -> Facts:
    """Return what is known about the machine, as text by name."""
    return {
        "processor": processor(),
        "processors": str(os.cpu_count()),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "memory": memory(),
        "threads": str(threads),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "commit": commit(),
        **versions(),
    }


def versions() -> Facts:
    """Return the versions of peers and of what models come from; "absent" where one is not installed."""
    return {name: _version(name) for name in PACKAGES}


def processor() -> str:
    """Return the model of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    family = f"family {fields.get('cpu family', '?')}, model {fields.get('model', '?')}"
    return f"{fields.get('model name', 'unknown')} ({family})"


def memory() -> str:
    """Return the size of the memory in GiB."""
    try:
        return f"{os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE') / 2**30:.0f} GiB"
    except (ValueError, OSError, AttributeError):  # a system that does not tell
        return "unknown"


def commit() -> str:
    """Return the commit that is measured, with a mark where files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, or no repository
        return "unknown"
    return done.stdout.strip()


def load() -> str:
    """Return the load averages over 1, 5 and 15 minutes."""
    try:
        return ", ".join(f"{value:.1f}" for value in os.getloadavg())
    except OSError:  # a system that does not tell
        return "unknown"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "absent"
