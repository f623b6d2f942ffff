"""Engines in processes of their own: each sleeps until it is asked for a block of calls.

In one process they disturb each other: a pool of threads spins for some milliseconds after a call, on the core that the
next engine needs. So every engine has a worker in a session of its own (Linux may share processors by session). All are
prepared before the first block. Each round asks all of them in a new random order, after a pause in which the pools
fall asleep. A worker answers a block with the median of its calls.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import random
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from benchmarks.suite import Absent, Clock, Measured, Settings, Task, set_threads

PAUSE = 0.1  # seconds before a block
BLOCK, CALLS = 0.05, 5  # a block takes so many seconds and so many calls, at least
PATIENCE = 900.0  # seconds for an answer
Note = Mapping[str, str]


@dataclass(frozen=True)
class Ready:
    """A prepared engine in a worker.

    Attributes:
        task: one call of the engine.
        note: what a table says about it, by name.
    """

    task: Task
    note: Note


Make = Callable[[], "Ready | Absent"]
"""Prepares an engine and checks what it computes. It is pickled: take a function of a module, or a partial of one."""


@dataclass(frozen=True)
class Timed:
    """The times of an engine.

    Attributes:
        seconds: of one call, round by round.
        note: what the worker says about the engine.
    """

    seconds: tuple[float, ...]
    note: Note

    def ratio(self, other: Timed) -> Measured:
        """Return how many times as fast as the other it is, within rounds."""
        return Measured.ratio(other.seconds, self.seconds)


class Worker:
    """A process with an engine, which sleeps until it is asked."""

    def __init__(self, make: Make, threads: int, clock: Clock) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=serve, args=(make, threads, clock, there))
        self.process.start()
        there.close()  # so that the end of the process is the end of the pipe

    def prepared(self) -> Note | Absent:
        """Wait until the engine is prepared; return what the worker says about it, or why there is no engine."""
        found: Note | Absent = self._answer()
        return found

    def block(self) -> float | Absent:
        """Ask for a block, after a pause; return the seconds of one call, or why there are none."""
        time.sleep(PAUSE)
        with suppress(OSError):  # the answer says how the process ended
            self.pipe.send(BLOCK)
        found: float | Absent = self._answer()
        return found

    def _answer(self) -> Any:
        try:
            return self.pipe.recv() if self.pipe.poll(PATIENCE) else Absent(f"no answer in {PATIENCE:.0f} s")
        except (EOFError, OSError):
            self.process.join()
            return Absent(f"its process ended with {self.process.exitcode}")

    def end(self) -> None:
        """End the process."""
        self.pipe.close()
        self.process.join(5)
        self.process.kill()
        self.process.join()


def rounds_apart(makes: Mapping[str, Make], settings: Settings, device: str = "cpu") -> dict[str, Timed | Absent]:
    """Prepare each engine in a process of its own, and measure all in shuffled rounds, after one that is not counted.

    Args:
        makes: functions that prepare the engines, by name.
        settings: how many rounds, the threads of each engine, which clock, the seed of the order.
        device: what the engines compute on.
    """
    drawn = random.Random(settings.seed)
    found: dict[str, list[float]] = {name: [] for name in makes}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name, make in makes.items():
            workers[name] = Worker(make, settings.threads, settings.clock(device))
            stack.callback(workers[name].end)
        states = {name: worker.prepared() for name, worker in workers.items()}
        for _ in range(1 + settings.rounds):
            for name in drawn.sample([*makes], len(makes)):
                if isinstance(states[name], Absent):
                    continue
                seconds = workers[name].block()
                if isinstance(seconds, Absent):
                    states[name] = seconds
                else:
                    found[name].append(seconds)
    return {
        name: state if isinstance(state, Absent) else Timed(tuple(found[name][1:]), state)
        for name, state in states.items()
    }


def serve(make: Make, threads: int, clock: Clock, pipe: Connection) -> None:
    """Prepare an engine and answer with its note; then answer each request for seconds with those of one call."""
    os.setsid()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # peers warn of deprecations of their own
    set_threads(threads)
    with torch.no_grad():
        try:
            ready = make()
            if not isinstance(ready, Absent):
                for _ in range(3):  # the first calls prepare more than others
                    ready.task()
        except Exception as error:  # a peer may raise anything
            ready = Absent.because(error)
        gc.collect()
        gc.freeze()
        with suppress(EOFError, BrokenPipeError):  # the asking process is done
            pipe.send(ready if isinstance(ready, Absent) else ready.note)
            while not isinstance(ready, Absent):
                pipe.send(one_call(ready.task, pipe.recv(), clock))


def one_call(task: Task, least: float, clock: Clock) -> float:
    """Call a task for this many seconds; return the median of its calls."""
    found: list[float] = []
    started = clock()
    while len(found) < CALLS or clock() - started < least:
        before = clock()
        task()
        found.append(clock() - before)
    return median(found)
