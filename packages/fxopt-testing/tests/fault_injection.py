"""Fault injection: make a function fail at any call that it makes, and prove that the attempt leaves no trace.

The calls are those that Python's profiler sees code of fxopt, torch.fx and torch.nn make: calls of functions of fxopt
and torch, and of built-in ones, such as torch's operations and the methods of tensors, dictionaries and lists. A call
fails before it has done anything, or after it has done everything.

Some calls never fail: those that end what something else began (leaving a ``with`` block, resetting a context
variable), since no caller can do without them; those that torch makes while it enters or leaves a context of its own,
which no caller could repair; and those inside torch's operations, where torch keeps state of its own.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from inspect import CO_GENERATOR
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Literal, TypeAlias

import torch
from footprints import Footprint
from step_counts import profiler
from torch import nn
from torch.fx import GraphModule

import fxopt_testing
from fxopt_testing.pictures import bits_of, picture

Moment: TypeAlias = Literal["before", "after"]
Action: TypeAlias = Callable[[GraphModule], object]
Make: TypeAlias = Callable[[], Sequence[nn.Module]]

_TORCH = str(Path(torch.__file__).parent)
_OWN = (str(Path(__file__).parent), str(Path(fxopt_testing.__file__).parent))
_OTHER, _CALLED, _CALLING = range(3)
_ENDINGS = frozenset({"__exit__", "reset"})
_BEGINNINGS = frozenset({"__enter__", "set"})  # what has begun and failed nevertheless, nobody would end
_SWITCHES = frozenset({"__enter__", "__exit__"})


class InjectedFault(Exception):
    """Raised where a fault is injected."""


class InjectedInterrupt(KeyboardInterrupt):
    """Raised where an interrupt is injected: no `Exception`."""


@dataclass(frozen=True)
class Call:
    """One call that an action makes.

    Attributes:
        number: its number among all calls, from 1.
        callee: what is called.
        caller: where, as file and line.
        through: the innermost place in code of fxopt on the way there.
    """

    number: int
    callee: str
    caller: str
    through: str

    @property
    def place(self) -> tuple[str, str, str]:
        """What the calls of one place have in common."""
        return self.callee, self.caller, self.through

    def __str__(self) -> str:
        return f"call {self.number}, {self.callee} at {self.caller}, through {self.through}"


Choice: TypeAlias = Callable[[Sequence[Call]], Sequence[Call]]


def every(calls: Sequence[Call]) -> Sequence[Call]:
    """Choose all calls."""
    return calls


def at_each_place(calls: Sequence[Call]) -> Sequence[Call]:
    """Choose the first and the last call of every place."""
    first = {call.place: call.number for call in reversed(calls)}
    last = {call.place: call.number for call in calls}
    chosen = {*first.values(), *last.values()}
    return [call for call in calls if call.number in chosen]


def some(limit: int) -> Choice:
    """Choose at most so many calls, evenly over those that `at_each_place` chooses."""

    def choose(calls: Sequence[Call]) -> Sequence[Call]:
        chosen = at_each_place(calls)
        step = max(1.0, len(chosen) / limit)
        return [chosen[int(number * step)] for number in range(min(limit, len(chosen)))]

    return choose


@dataclass
class FaultReport:
    """The result of injecting faults.

    Attributes:
        calls: how many calls the action makes.
        injected: how many faults were injected.
        traces: what the faults left behind; empty if there was nothing.
    """

    calls: int = 0
    injected: int = 0
    traces: list[str] = field(default_factory=list)


class Injector:
    """Counts the calls that a function makes, and raises at one of them, before or after it has done its work."""

    def __init__(self, moment: Moment) -> None:
        self._after = moment == "after"
        self._kinds = _Kinds(_ENDINGS | _BEGINNINGS if self._after else _ENDINGS)

    def calls(self, function: Callable[[], object]) -> list[Call]:
        """Return the calls that a function makes; of those that end after the last one has begun, none."""
        found: list[Call] = []
        begun = 0

        def note(frame: FrameType, built_in: object, begins: bool) -> None:
            nonlocal begun
            if begins:
                begun = len(found)
            if begins is not self._after:
                found.append(_described(len(found) + 1, frame, built_in))

        with self._profiled(note):
            function()
        return found[:begun] if self._after else found

    def fail(self, function: Callable[[], object], number: int, error: BaseException) -> None:
        """Run a function and raise at the call with this number.

        Raises:
            BaseException: whatever the function raises then.
        """
        count = 0

        def note(frame: FrameType, built_in: object, begins: bool) -> None:
            nonlocal count
            if begins is not self._after:
                count += 1
                if count == number:
                    sys.setprofile(None)
                    raise error

        with self._profiled(note):
            function()

    @contextmanager
    def _profiled(self, note: Callable[[FrameType, object, bool], None]) -> Iterator[None]:
        kinds, starts, after = self._kinds, _Starts(), self._after
        switching: FrameType | None = None

        def profile(frame: FrameType, event: str, built_in: Any) -> None:
            nonlocal switching
            if switching is not None:
                switching = None if event == "return" and frame is switching else switching
                return
            if event == "call" and _switches(frame):
                switching = frame
                return
            kind = kinds[frame.f_code]
            if event in ("c_call", "c_return"):
                if kind == _CALLING and built_in.__name__ not in kinds.left_out:
                    note(frame, built_in, event == "c_call")
            elif kind and frame.f_back is not None and kinds[frame.f_back.f_code] == _CALLING:
                start = starts[frame.f_code]
                if start is None or (not after and frame.f_lasti <= start):  # to resume a generator is no call
                    note(frame, None, event == "call")

        former, collecting, hook = profiler(), gc.isenabled(), sys.unraisablehook
        sys.unraisablehook = lambda unraisable: None  # what fails where nothing can be raised is survived
        gc.disable()  # what is collected, and when, is not up to the function
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(former)
            sys.unraisablehook = hook
            if collecting:
                gc.enable()


class _Kinds(dict[CodeType, int]):
    """For the code of a function: whether calls of it count, and whether the calls that it makes count, too."""

    def __init__(self, left_out: frozenset[str]) -> None:
        super().__init__()
        self.left_out = left_out

    def __missing__(self, code: CodeType) -> int:
        file = code.co_filename
        calling = "fxopt_" in file or file.startswith((f"{_TORCH}/fx/", f"{_TORCH}/nn/"))
        calling = calling and not file.startswith(_OWN)  # what the kit does around an action does not fail
        # What weak references call when their objects end, and when that is, is not up to the function either.
        is_called = file.startswith(_TORCH) and not file.endswith("/utils/weak.py")
        kind = _CALLING if calling else _CALLED if is_called else _OTHER
        self[code] = kind = _OTHER if code.co_name in self.left_out else kind
        return kind


class _Starts(dict[CodeType, "int | None"]):
    """For the code of a generator, the instruction at which it is when it starts; for other code, None."""

    def __missing__(self, code: CodeType) -> int | None:
        start: int | None = None
        if code.co_flags & CO_GENERATOR:
            start = next((step.offset for step in dis.get_instructions(code) if step.opname == "RESUME"), -1)
        self[code] = start
        return start


def _switches(frame: FrameType) -> bool:
    """Whether a context of torch begins or ends here: a method of it, or the generator that it is made of."""
    code = frame.f_code
    if code.co_flags & CO_GENERATOR and frame.f_back is not None:
        caller = frame.f_back.f_code
        switches = caller.co_name in _SWITCHES and caller.co_filename == contextlib.__file__
    else:
        switches = code.co_name in _SWITCHES
    return switches and code.co_filename.startswith(_TORCH)


def _described(number: int, frame: FrameType, built_in: Any) -> Call:
    caller = frame.f_back if built_in is None else frame
    callee = frame.f_code.co_name if built_in is None else getattr(built_in, "__qualname__", repr(built_in))
    through = caller
    while through is not None and "fxopt_" not in through.f_code.co_filename:
        through = through.f_back
    return Call(number, callee, _place(caller), _place(through))


def _place(frame: FrameType | None) -> str:
    return "outside" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def inject_faults(
    make: Make,
    action: Action,
    inputs: tuple[Any, ...],
    *,
    choose: Choice = at_each_place,
    moment: Moment = "before",
    error: type[BaseException] = InjectedFault,
    identities: bool = True,
) -> FaultReport:
    """Make an action on a graph module fail at its calls, and look for what it leaves behind.

    After each fault, the graph module and the other modules must be what they were, bit for bit, and the graph module
    must compute what it did. Finally the action runs without a fault on the module that has been through all of them,
    and must give what it gives on an untouched twin.

    Args:
        make: makes a graph module, an equal one each time, followed by other modules that have to stay as they are,
            such as the model it was captured from.
        action: what is to fail; returns a graph module, or None if that is the one it was given.
        inputs: the graph module's positional arguments.
        choose: chooses the calls to fail at.
        moment: whether a call fails before or after it has done its work.
        error: what is raised.
        identities: whether objects have to be the very same ones; see `Footprint`.
    """
    injector = Injector(moment)
    expected = _result(action, make(), inputs)  # what is imported and cached once is so from here on
    counted = make()
    calls = injector.calls(lambda: action(_graph_module(counted)))
    report = FaultReport(calls=len(calls))
    subject = _Subject(make(), inputs, identities)
    for call in choose(calls):
        report.injected += 1
        if not _stays_intact(subject, injector, action, call, error, report):
            subject = _Subject(make(), inputs, identities)
    if _result(action, subject.modules, inputs) != expected:
        report.traces.append("after all faults, the action gives something else than on an untouched twin")
    return report


def _stays_intact(
    subject: _Subject, injector: Injector, action: Action, call: Call, error: type[BaseException], report: FaultReport
) -> bool:
    """Inject a fault, add to the report what it left, and return whether the subject serves for another one."""
    try:
        injector.fail(lambda: action(subject.graph_module), call.number, error(f"injected at {call}"))
    except BaseException as raised:
        traces = subject.traces()
        if not _comes_from(raised, error):
            traces.append(f"{type(raised).__name__} does not come from the fault: {raised}")
        report.traces += [f"{call}: {trace}" for trace in traces[:5]]
        return not traces
    return False  # the action survived, as it may where it only tries something


class _Subject:
    """Modules with their footprint, and what the graph module computes."""

    def __init__(self, modules: Sequence[nn.Module], inputs: tuple[Any, ...], identities: bool) -> None:
        self.modules = modules
        self.graph_module = _graph_module(modules)
        self._inputs, self._identities = inputs, identities
        self._outputs = called(self.graph_module, inputs)
        self._before = Footprint(*modules, identities=identities)

    def traces(self) -> list[str]:
        found = self._before.differences(Footprint(*self.modules, identities=self._identities))
        try:
            outputs = called(self.graph_module, self._inputs)
        except Exception as error:
            return [*found, f"the module fails: {type(error).__name__}: {error}"]
        return found if outputs == self._outputs else [*found, "the module computes something else"]


def called(graph_module: GraphModule, inputs: tuple[Any, ...]) -> list[object]:
    """Return the bits of what a module gives; it gets inputs of its own, in case it writes them."""
    return bits_of(graph_module(*copy.deepcopy(inputs)))


def _graph_module(modules: Sequence[nn.Module]) -> GraphModule:
    assert isinstance(modules[0], GraphModule)
    return modules[0]


def _result(action: Action, modules: Sequence[nn.Module], inputs: tuple[Any, ...]) -> list[object]:
    made = action(_graph_module(modules)) or modules[0]
    assert isinstance(made, GraphModule)
    made.recompile()  # which the action may leave to others
    return [picture(made), called(made, inputs)]


def _comes_from(raised: BaseException | None, error: type[BaseException]) -> bool:
    """Whether an error is an injected one, or was raised because of one."""
    while raised is not None:
        if isinstance(raised, error) or "injected at call" in str(raised):  # torch puts some errors into words
            return True
        raised = raised.__cause__ or raised.__context__
    return False
