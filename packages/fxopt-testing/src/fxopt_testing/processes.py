"""What is so in another process, with other hashes."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from functools import cache
from typing import Any

from fxopt_core import Composition, Transformation

_SCRIPT = """
import importlib.util, json, pickle, sys, warnings
warnings.simplefilter("ignore")
given = pickle.load(sys.stdin.buffer)
sys.path[:] = given["path"]
for name, file in given["modules"]:
    try:
        importlib.import_module(name)
    except ImportError:  # a file of tests, which pytest imported by its path
        spec = importlib.util.spec_from_file_location(name, file)
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
made = pickle.loads(given["pass"])
if isinstance(made, tuple):
    from fxopt_core.options import construct
    made = construct(*made)
print(json.dumps(made.signature))
"""


def signature_elsewhere(transformation: Transformation) -> str:
    """Return the signature that an equal pass has in another process; where it fails there, what it says."""
    return _started(_message(transformation))


@cache
def _started(message: bytes) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": "4321"}
    run = subprocess.run(
        [sys.executable, "-c", _SCRIPT], input=message, capture_output=True, env=environment, timeout=300, check=False
    )
    if run.returncode:
        return f"an error: {run.stderr.decode(errors='replace').strip().splitlines()[-1]}"
    found: str = json.loads(run.stdout.splitlines()[-1])
    return found


def _message(transformation: Transformation) -> bytes:
    made: object = transformation
    if not isinstance(transformation, Composition):
        made = (type(transformation), dict(transformation.options))
    names = dict.fromkeys(type(each).__module__ for each in _members(transformation))
    modules = [(name, getattr(sys.modules.get(name), "__file__", None)) for name in names]
    message: dict[str, Any] = {"path": sys.path, "modules": modules, "pass": pickle.dumps(made)}
    return pickle.dumps(message)


def _members(transformation: Transformation) -> list[Transformation]:
    if not isinstance(transformation, Composition):
        return [transformation]
    return [member for each in transformation.transformations for member in _members(each)]
