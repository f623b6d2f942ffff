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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
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
        share: the quantile of the calls' seconds that answers a block.
        least: how many seconds a block takes at least.
    """

    task: Task
    note: Note
    share: float = 0.5
    least: float = BLOCK


Make = Callable[[], "Ready | Absent"]
"""Prepares an engine and checks what it computes. It is pickled: take a function of a module, or a partial of one."""
MakeCases = Callable[[], "Mapping[str, Ready | Absent] | Ready | Absent"]
"""The same for an engine that is asked for several kinds of calls."""


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

    def __init__(self, make: MakeCases, threads: int, clock: Clock) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, there = context.Pipe()
        self.process = context.Process(target=serve, args=(make, threads, clock, there))
        self.process.start()
        there.close()  # so that the end of the process is the end of the pipe

    def prepared(self, cases: Iterable[str]) -> dict[str, Note | Absent]:
        """Wait until the engine is prepared; return what the worker says of each case, or why there is none."""
        found = self._answer()
        return {case: found if isinstance(found, Absent) else found[case] for case in cases}

    def block(self, case: str, calls: int) -> float | Absent:
        """Ask for a block of so many calls or more, after a pause; return the seconds of one, or why there are none."""
        time.sleep(PAUSE)
        with suppress(OSError):  # the answer says how the process ended
            self.pipe.send((case, calls))
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


def rounds_apart(makes: Mapping[str, Make], settings: Settings) -> dict[str, Timed | Absent]:
    """Prepare each engine in a process of its own, and measure all in shuffled rounds, after one that is not counted.

    Args:
        makes: functions that prepare the engines, by name.
        settings: how many rounds, the threads of each engine, which clock, the seed of the order.
    """
    return {name: found[""] for name, found in cases_apart(makes, [""], settings).items()}


def fastest(make: Make) -> Ready | Absent:
    """Prepare an engine that takes the fastest call of half a second: other work on the machine only adds time."""
    found = make()
    return found if isinstance(found, Absent) else replace(found, share=0.0, least=0.5)


def cases_apart(
    makes: Mapping[str, MakeCases],
    cases: Sequence[str],
    settings: Settings,
    *,
    calls: int = CALLS,
    together: bool = True,
) -> dict[str, dict[str, Timed | Absent]]:
    """Measure engines as `rounds_apart` does, each with several kinds of calls; return the times by engine and case.

    Args:
        makes: what prepares the engines, by name.
        cases: the names of the calls.
        settings: how many rounds, the threads of each engine, which clock, the seed of the order.
        calls: how many calls a block has at least.
        together: whether the engines are prepared at the same time: faster, and all need their memory at once.
    """
    drawn = random.Random(settings.seed)
    found: dict[tuple[str, str], list[float]] = {(name, case): [] for name in makes for case in cases}
    states: dict[tuple[str, str], Note | Absent] = {}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}

        def wait_for(names: Iterable[str]) -> None:
            states.update({(n, case): state for n in names for case, state in workers[n].prepared(cases).items()})

        for name, make in makes.items():
            workers[name] = Worker(make, settings.threads, settings.clock)
            stack.callback(workers[name].end)
            if not together:
                wait_for([name])
        wait_for(makes if together else ())
        for _ in range(1 + settings.rounds):
            for name, case in drawn.sample([*found], len(found)):
                if isinstance(states[name, case], Absent):
                    continue
                seconds = workers[name].block(case, calls)
                if isinstance(seconds, Absent):
                    states[name, case] = seconds
                else:
                    found[name, case].append(seconds)
    results: dict[str, dict[str, Timed | Absent]] = {name: {} for name in makes}
    for (name, case), state in states.items():
        results[name][case] = state if isinstance(state, Absent) else Timed(tuple(found[name, case][1:]), state)
    return results


def serve(make: MakeCases, threads: int, clock: Clock, pipe: Connection) -> None:
    """Prepare an engine and answer with its notes; then answer each request with the seconds of one call."""
    os.setsid()
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")  # peers warn of deprecations of their own
    set_threads(threads)
    with torch.no_grad():
        try:
            made = make()
            cases = made if isinstance(made, Mapping) else {"": made}
            ready = {case: each for case, each in cases.items() if isinstance(each, Ready)}
            for each in ready.values() if "" in ready else ():
                for _ in range(3):  # the first calls prepare more than others
                    each.task()
            answer: Any = {case: each.note if isinstance(each, Ready) else each for case, each in cases.items()}
        except Exception as error:  # a peer may raise anything
            ready, answer = {}, Absent.because(error)
        gc.collect()
        gc.freeze()
        with suppress(EOFError, BrokenPipeError):  # the asking process is done
            pipe.send(answer)
            while ready:
                case, calls = pipe.recv()
                pipe.send(one_call(ready[case], clock, calls))


def one_call(ready: Ready, clock: Clock, calls: int) -> float:
    """Call a task for as many seconds as it asks for, at least `calls` times; return the quantile of its calls."""
    found: list[float] = []
    started = clock()
    while len(found) < calls or clock() - started < ready.least:
        before = clock()
        ready.task()
        found.append(clock() - before)
    return sorted(found)[round(ready.share * (len(found) - 1))]
