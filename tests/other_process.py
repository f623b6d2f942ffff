"""What an equal pass is and does in another process, with other hashes: its signature, and what it makes of models.

`elsewhere` asks; in the other process, `answer` is called.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fxopt_core import Composition, Transformation, construct
from fxopt_testing.models import model_case
from fxopt_testing.pictures import picture
from fxopt_testing.trial import members_of

_SCRIPT = """
import os, pickle, sys
answers, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr
given = pickle.load(sys.stdin.buffer)
while given is not None:
    sys.path[:] = given["path"]
    from other_process import answer
    pickle.dump(answer(given), answers)
    answers.flush()
    given = pickle.load(sys.stdin.buffer)
"""


@dataclass(frozen=True)
class Elsewhere:
    """What another process says of an equal pass.

    Attributes:
        signature: its signature.
        pictures: ids of models to what the pass makes of them: the text of each row of a `Picture`.
        error: what it raised there, or None.
    """

    signature: str = ""
    pictures: dict[str, dict[str, str]] = field(default_factory=dict)
    error: str | None = None


def elsewhere(transformation: Transformation, models: Sequence[str] = ()) -> Elsewhere:
    """Return the signature of an equal pass in another process, and what it makes there of models of the zoo."""
    made: object = transformation
    if not isinstance(transformation, Composition):
        made = (type(transformation), dict(transformation.options))
    names = dict.fromkeys(type(each).__module__ for each in members_of(transformation))
    modules = [(name, getattr(sys.modules.get(name), "__file__", None)) for name in names]
    try:
        pickled = pickle.dumps(made)
    except Exception as error:
        return Elsewhere(error=f"its options cannot be pickled: {error}")
    return _Process.running().ask({"path": sys.path, "modules": modules, "pass": pickled, "models": list(models)})


class _Process:
    """A process that answers, started once: importing torch takes seconds."""

    def __init__(self) -> None:
        environment = {**os.environ, "PYTHONHASHSEED": "4321"}
        command = [sys.executable, "-c", _SCRIPT]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, env=environment)
        atexit.register(self._end)

    @staticmethod
    @cache
    def running() -> _Process:
        return _Process()

    def ask(self, message: dict[str, Any]) -> Elsewhere:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(pickle.dumps(message))
            self._process.stdin.flush()
            answer = pickle.load(self._process.stdout)
        except (OSError, EOFError):
            self._end()
            _Process.running.cache_clear()
            return Elsewhere(error="the process has ended")
        assert isinstance(answer, Elsewhere)
        return answer

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()
        atexit.unregister(self._end)


def answer(given: dict[str, Any]) -> Elsewhere:
    """Return what a pass is and does in this process, the other one."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for name, file in given["modules"]:
                _import(name, file)
            made = pickle.loads(given["pass"])
            if isinstance(made, tuple):
                made = construct(*made)
            assert isinstance(made, Transformation)
            pictures = {id: _rows(made, id) for id in given["models"]}
            return Elsewhere(made.signature, pictures)
        except Exception as error:
            return Elsewhere(error=f"{type(error).__name__}: {error}")


def _import(name: str, file: str | None) -> None:
    try:
        importlib.import_module(name)
    except ImportError:  # a file of tests, which pytest imported by its path
        if file is None:
            raise
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _rows(transformation: Transformation, id: str) -> dict[str, str]:
    case = model_case(id)
    try:
        made = transformation(case.capture().graph_module)
    finally:
        case.forget()  # the pass may have written into it
    return {name: repr(value) for name, value in picture(made).items()}
