"""Plugins are foreign code: what they raise is theirs, what the user interrupts is not, and slow ones are named."""

from __future__ import annotations

import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from torch.fx import GraphModule

from fxopt_core.passes.transformation import Transformation
from fxopt_core.registry import watched as watching
from fxopt_core.registry.hookspec import hookimpl
from fxopt_core.registry.registry import Registry


class Fine(Transformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class FinePlugin:
    @hookimpl
    def fxopt_transformations(self) -> Iterable[type[Transformation]]:
        return [Fine]


class OddPlugin:
    """A plugin whose hook runs some code, at once or while its result is read."""

    def __init__(self, run: Callable[[], object], *, midway: bool = False) -> None:
        self.run, self.midway = run, midway

    @hookimpl
    def fxopt_transformations(self) -> Iterable[type[Transformation]]:
        return self.later() if self.midway else [self.run(), Fine][1:]  # type: ignore[return-value]

    def later(self) -> Iterator[type[Transformation]]:
        yield Fine
        self.run()


def point(name: str, load: Callable[[], object]) -> Any:
    return SimpleNamespace(name=name, dist=SimpleNamespace(name=f"dist-{name}", version="1.0"), load=load)


def at_import(run: Callable[[], object]) -> Any:
    def load() -> object:
        run()
        return FinePlugin()

    return point("odd", load)


def in_the_hook(run: Callable[[], object]) -> Any:
    return point("odd", lambda: OddPlugin(run))


def midway(run: Callable[[], object]) -> Any:
    return point("odd", lambda: OddPlugin(run, midway=True))


WAYS = pytest.mark.parametrize("way", [at_import, in_the_hook, midway])


def registry_with(odd: Any) -> Registry:
    class Other(Fine):
        pass

    class Good:
        @hookimpl
        def fxopt_transformations(self) -> Iterable[type[Transformation]]:
            return [Other]

    return Registry([odd, point("good", Good)])


def press(number: int = signal.SIGINT) -> None:
    """Do what Ctrl-C does: a signal arrives while the plugin computes."""
    signal.raise_signal(number)
    time.sleep(0.01)  # the handler runs here at the latest


@pytest.fixture(autouse=True)
def handlers_stay(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test, the handlers of signals are those from before."""
    monkeypatch.delenv("FXOPT_PLUGINS", raising=False)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    yield
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def run() -> NoReturn:
        raise error

    return run


class TestWhatAPluginRaises:
    @WAYS
    @pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit, BaseException, MemoryError])
    def test_is_its_failure(self, way: Callable[..., Any], kind: type[BaseException]) -> None:
        """Interrupts and exits too; the others work."""
        known = registry_with(way(raising(kind("its own"))))
        assert list(known.available()) == ["other"]
        error = known.failed["odd"]
        assert f"'odd' (of dist-odd 1.0) failed to load: {kind.__name__}: its own" in str(error)
        assert isinstance(error.__cause__, kind)

    def test_in_another_thread_too(self) -> None:
        """Signals do not reach other threads, so that whatever is raised there is the plugin's."""
        known, seen = registry_with(at_import(raising(KeyboardInterrupt()))), []
        thread = threading.Thread(target=lambda: seen.append((list(known.available()), list(known.failed))))
        thread.start()
        thread.join()
        assert seen == [(["other"], ["odd"])]

    def test_by_hand_too(self) -> None:
        known = Registry([])
        with pytest.raises(Exception, match="failed to load: SystemExit: 3"):
            known.register(OddPlugin(lambda: sys.exit(3)), name="odd")


class TestWhatTheUserInterrupts:
    @WAYS
    def test_is_interrupted(self, way: Callable[..., Any]) -> None:
        """Ctrl-C goes to the caller, and the next call loads everything."""
        presses = iter([press])
        known = registry_with(way(lambda: [run() for run in presses]))
        with pytest.raises(KeyboardInterrupt):
            known.available()
        assert list(known.available()) == ["fine", "other"]
        assert known.failed == {}

    @pytest.mark.parametrize("turned", [ImportError, SystemExit, KeyboardInterrupt])
    def test_whatever_the_plugin_makes_of_it(self, turned: type[BaseException]) -> None:
        """A plugin that turns Ctrl-C into an error of its own has not failed."""

        def run() -> None:
            try:
                press()
            except KeyboardInterrupt:
                raise turned("stopped") from None

        with pytest.raises(KeyboardInterrupt) as caught:
            registry_with(at_import(run)).available()
        assert caught.value.args == ()

    @pytest.mark.skipif(sys.platform == "win32", reason="has no such signals")
    def test_by_other_signals_too(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A program's handler of TERM may exit; that is no failure of the plugin either."""

        def leave(number: int, frame: object) -> NoReturn:
            raise SystemExit(number)

        former = signal.signal(signal.SIGTERM, leave)
        try:
            with pytest.raises(SystemExit) as caught:
                registry_with(at_import(lambda: press(signal.SIGTERM))).available()
            assert caught.value.code == signal.SIGTERM
            assert signal.getsignal(signal.SIGTERM) is leave
        finally:
            signal.signal(signal.SIGTERM, former)

    def test_a_handler_that_a_plugin_sets_stays(self) -> None:
        """Whatever one may think of that."""

        def own(number: int, frame: object) -> None: ...

        known = registry_with(at_import(lambda: signal.signal(signal.SIGINT, own)))
        try:
            assert list(known.available()) == ["fine", "other"]
            assert signal.getsignal(signal.SIGINT) is own
        finally:
            signal.signal(signal.SIGINT, signal.default_int_handler)


class TestSlowPlugins:
    def test_are_named_while_they_load(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """So that a user of a command that hangs knows whom to ask."""
        monkeypatch.setattr(watching, "PATIENCE", 0.02)
        seen: list[str] = []

        def wait() -> None:
            deadline = time.monotonic() + 10
            while not caught and time.monotonic() < deadline:
                time.sleep(0.005)
            seen.extend(str(warning.message) for warning in caught)

        with pytest.warns(RuntimeWarning, match="plugin 'odd'") as caught:
            assert list(registry_with(at_import(wait)).available()) == ["fine", "other"]
        text = "plugin 'odd' (of dist-odd 1.0) is still being loaded after 0.02 s; FXOPT_PLUGINS can leave it out"
        assert text in seen

    def test_others_are_not(self) -> None:
        """No warning, and no thread left."""
        before = threading.active_count()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert list(registry_with(at_import(lambda: None)).available()) == ["fine", "other"]
        deadline = time.monotonic() + 5
        while threading.active_count() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert threading.active_count() <= before
        assert watching.PATIENCE == 5
