"""What is so in another process, with other hashes: signatures, and what passes make of models of the zoo."""

from __future__ import annotations

import atexit
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from fxopt_core import Composition, Transformation

_SCRIPT = """
import os, pickle, sys
answers, sys.stdout = os.fdopen(os.dup(1), "wb"), sys.stderr
given = pickle.load(sys.stdin.buffer)
while given is not None:
    sys.path[:] = given["path"]
    from fxopt_testing.answering import answer
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
    names = dict.fromkeys(type(each).__module__ for each in _members(transformation))
    modules = [(name, getattr(sys.modules.get(name), "__file__", None)) for name in names]
    try:
        pickled = pickle.dumps(made)
    except Exception as error:
        return Elsewhere(error=f"its options cannot be pickled: {error}")
    return _Process.running().ask({"path": sys.path, "modules": modules, "pass": pickled, "models": list(models)})


def _members(transformation: Transformation) -> list[Transformation]:
    if not isinstance(transformation, Composition):
        return [transformation]
    return [member for each in transformation.transformations for member in _members(each)]


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
        """Return the one of this process."""
        return _Process()

    def ask(self, message: dict[str, Any]) -> Elsewhere:
        """Send a message, and return the answer."""
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
