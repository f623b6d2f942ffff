from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
from torch.fx import GraphModule

from fxopt_core import (
    PassInfo,
    Registry,
    ReversibleTransformation,
    Transformation,
    hookimpl,
)
from fxopt_core.errors import (
    DuplicatePassError,
    PluginLoadError,
    UnknownPassError,
)


class MergeThings(ReversibleTransformation):
    """a, b -> ab.

    More about it.
    """

    preserves_computation = True

    def __init__(self, *, min_group: int = 2, where: tuple[str, ...] = ()) -> None:
        self.min_group, self.where = min_group, where

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class Other(Transformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class Renamed(Other):
    name = "quite-another"


class Unfinished(Transformation):
    """It has no transform."""


class Demanding(Other):
    def __init__(self, path: str) -> None:
        self.path = path


def plugin_of(*classes: Any, pipelines: Mapping[str, str] | None = None, name: str = "made") -> Any:
    """Return a plugin as a module: how plugins mostly come."""
    module = types.ModuleType(name)

    @hookimpl
    def fxopt_transformations() -> Iterable[type[Transformation]]:
        return classes

    @hookimpl
    def fxopt_pipelines() -> Mapping[str, str]:
        return pipelines or {}

    vars(module)["fxopt_transformations"] = fxopt_transformations
    if pipelines is not None:
        vars(module)["fxopt_pipelines"] = fxopt_pipelines
    return module


@dataclass
class Distribution:
    name: str
    version: str = "1.0"


@dataclass
class Point:
    """An entry point that was never installed."""

    name: str
    loader: Callable[[], Any]
    dist: Any = None
    loads: list[str] = field(default_factory=list)

    def load(self) -> Any:
        self.loads.append(self.name)
        return self.loader()


def point(name: str, plugin: Any, dist: str = "") -> Any:
    return Point(name, lambda: plugin, Distribution(dist or f"dist-{name}"))


def failing(name: str, error: BaseException) -> Any:
    def load() -> Any:
        raise error

    return Point(name, load, Distribution(f"dist-{name}"))


@pytest.fixture(autouse=True)
def _no_allow_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FXOPT_PLUGINS", raising=False)


@pytest.fixture
def good() -> Any:
    return point("good", plugin_of(MergeThings, pipelines={"merge-twice": "merge-things,merge-things"}))


class TestAvailable:
    def test_what_is_known_of_a_pass(self, good: Any) -> None:
        info = Registry([good]).available()["merge-things"]
        options = info.options
        assert info == PassInfo(
            name="merge-things",
            summary="a, b -> ab.",
            family="good",
            distribution="dist-good",
            version="1.0",
            reversible=True,
            preserves_computation=True,
            options=options,
            transformation=MergeThings,
        )
        assert [(o.name, o.annotation, o.default) for o in options.values()] == [
            ("min_group", int, 2),
            ("where", tuple[str, ...], ()),
        ]
        assert isinstance(hash(info), int)

    def test_sorted_by_name(self) -> None:
        known = Registry([point("a", plugin_of(Other, MergeThings)), point("b", plugin_of(Renamed))])
        assert list(known.available()) == ["merge-things", "other", "quite-another"]
        assert known.failed == {}

    def test_loaded_once_and_on_first_use(self, good: Any) -> None:
        known = Registry([good])
        assert good.loads == []
        known.available(), known.pipelines(), known.create("merge-things"), repr(known)
        assert good.loads == ["good"]

    def test_many_threads_load_once(self, good: Any) -> None:
        known = Registry([good])
        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(lambda _: list(known.available()), range(8))) == [["merge-things"]] * 8
        assert good.loads == ["good"]


class TestCreate:
    def test_an_option_may_be_called_name(self) -> None:
        class Named(Other):
            def __init__(self, *, name: str = "") -> None:
                self.label = name

        assert Registry([point("p", plugin_of(Named))]).create("named", name="x").options["name"] == "x"

    def test_a_named_pipeline_is_no_pass(self, good: Any) -> None:
        with pytest.raises(UnknownPassError, match="named pipeline"):
            Registry([good]).create("merge-twice")


class TestAllowList:
    @pytest.mark.parametrize(
        ("value", "expected"),
        [
            (None, ["merge-things", "other"]),
            ("", []),
            (" , ", []),
            ("good", ["merge-things"]),
            (" other , good ", ["merge-things", "other"]),
            ("absent", []),
        ],
    )
    def test_names(self, value: str | None, expected: list[str], good: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        if value is not None:
            monkeypatch.setenv("FXOPT_PLUGINS", value)
        other = point("other", plugin_of(Other))
        known = Registry([good, other])
        assert list(known.available()) == expected
        assert known.failed == {}
        assert bool(good.loads) == ("merge-things" in expected)

    def test_registering_is_exempt(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FXOPT_PLUGINS", "")
        known = Registry([])
        known.register(plugin_of(Other), name="mine")
        assert list(known.available()) == ["other"]

    def test_unknown_names_come_with_it(self, good: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FXOPT_PLUGINS", "goood,other")
        with pytest.raises(UnknownPassError, match=r"(?s)did you mean other.*FXOPT_PLUGINS allows .* only: goood"):
            Registry([good, point("other", plugin_of(Other))]).create("othr")

    def test_it_settles_a_conflict(self, good: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FXOPT_PLUGINS", "good")
        known = Registry([good, point("evil", plugin_of(MergeThings))])
        assert known.available()["merge-things"].family == "good"
        assert known.failed == {}


def marked(function: Any, attribute: str = "fxopt_transformations") -> Any:
    """Return a plugin with one marked function."""
    module = types.ModuleType("marked")
    vars(module)[attribute] = hookimpl(function)
    return module


def raises_in_hook() -> Any:
    raise OSError("the disk is full")


def exits_in_hook() -> Any:
    sys.exit(3)


def raises_midway() -> Any:
    yield Other
    raise OSError("the disk is full")


def unmarked() -> Any:
    module = types.ModuleType("unmarked")
    vars(module)["fxopt_transformations"] = lambda: [Other]
    return module


class NeedsAnObject:
    @hookimpl
    def fxopt_transformations(self) -> list[type[Transformation]]:
        return [Other]


def asks_the_registry() -> Any:
    return list(_ASKED[0].available())


_ASKED: list[Registry] = []

BROKEN: list[tuple[Any, str]] = [
    (failing("broken", ImportError("no torch")), "ImportError: no torch"),
    (failing("broken", SystemExit(2)), "SystemExit: 2"),
    (marked(raises_in_hook), "OSError: the disk is full"),
    (marked(exits_in_hook), "SystemExit: 3"),
    (marked(raises_midway), "OSError: the disk is full"),
    (Point("broken", asks_the_registry, Distribution("dist-broken")), "while plugins are being loaded"),
    (marked(lambda: None), "returned a value of type NoneType, expected an iterable"),
    (marked(lambda: [Other, None]), "gave a value of type NoneType, expected a subclass"),
    (marked(lambda: [Other()]), "gave a value of type Other, expected a subclass"),
    (marked(lambda: [len]), "expected a subclass of Transformation"),
    (marked(lambda: [int]), "gave type builtins.int"),
    (marked(lambda: [Unfinished]), "TypeError: Can't instantiate abstract class Unfinished"),
    (marked(lambda: [Demanding]), "missing 1 required positional argument: 'path'"),
    (marked(lambda: [type("Bad", (Other,), {"name": "a,b"})]), "'a,b' is not a valid name"),
    (marked(lambda config: []), "PluginValidationError"),
    (marked(lambda: [Other], "fxopt_kernels"), "PluginValidationError: unknown hook 'fxopt_kernels'"),
    (NeedsAnObject, "missing 1 required positional argument: 'self'"),
    (marked(lambda: None, "fxopt_pipelines"), "returned a value of type NoneType, expected an iterable"),
    (marked(lambda: {"a": 3}, "fxopt_pipelines"), "pipeline 'a' is a value of type int"),
    (marked(lambda: {3: "a"}, "fxopt_pipelines"), "3 is not a valid name"),
    (marked(lambda: {"a b": "other"}, "fxopt_pipelines"), "'a b' is not a valid name"),
    (marked(lambda: {"a": "other{"}, "fxopt_pipelines"), "PipelineSyntaxError: found the end of the text"),
    (types.ModuleType("empty"), "it has no hook, as fxopt_transformations, fxopt_pipelines,"),
    (None, "it has no hook"),
    (unmarked(), "decorate the function with @fxopt_core.hookimpl"),
]


class TestBrokenPlugins:
    @pytest.mark.parametrize(("plugin", "message"), BROKEN)
    def test_break_nothing_else(self, plugin: Any, message: str, good: Any) -> None:
        entry: Any = plugin if isinstance(plugin, Point) else point("broken", plugin)
        known = Registry([entry, good])
        _ASKED[:] = [known]
        assert list(known.available()) == ["merge-things"]
        assert list(known.failed) == ["broken"]
        error = known.failed["broken"]
        assert type(error) is PluginLoadError
        assert message in str(error)
        assert "'broken' (of dist-broken 1.0)" in str(error)
        assert type(error.__cause__).__name__ in str(error)

    @pytest.mark.parametrize("plugin", [marked(raises_midway), marked(lambda: [Unfinished])])
    def test_registering_raises(self, plugin: Any, good: Any) -> None:
        known = Registry([good])
        with pytest.raises(PluginLoadError, match=r"'broken' .registered in this process. failed to load"):
            known.register(plugin, name="broken")
        assert list(known.available()) == ["merge-things"]
        assert known.failed == {}


def same_named() -> type[Transformation]:
    return type("MergeThings", (Other,), {})


class TestConflicts:
    def test_nobody_gets_a_pass_that_two_claim(self) -> None:
        known = Registry([point("a", plugin_of(MergeThings, Other)), point("b", plugin_of(same_named(), Renamed))])
        assert list(known.available()) == ["other", "quite-another"]
        for name, dist in [("a", "dist-b"), ("b", "dist-a")]:
            assert "'merge-things'" in str(known.failed[name])
            assert dist in str(known.failed[name])
            assert isinstance(known.failed[name].__cause__, DuplicatePassError)
        for use in (known.create, known.pipeline, known.lookup):
            with pytest.raises(DuplicatePassError, match=r"'a' \(of dist-a 1.0\).*'b' \(of dist-b 1.0\)"):
                use("merge-things")

    def test_within_one_plugin(self) -> None:
        known = Registry([point("a", plugin_of(MergeThings, same_named(), Other))])
        assert list(known.available()) == ["other"]
        assert list(known.failed) == ["a"]

    def test_a_pass_against_a_pipeline(self) -> None:
        known = Registry([point("a", plugin_of(Other)), point("b", plugin_of(Renamed, pipelines={"other": ""}))])
        assert list(known.available()) == ["quite-another"]
        assert known.pipelines() == {}
        with pytest.raises(DuplicatePassError, match=r"as a pass by plugin 'a'.*as a pipeline by plugin 'b'"):
            known.pipeline("other")

    def test_two_plugins_of_one_name(self, good: Any) -> None:
        known = Registry([point("x", plugin_of(Other), "one"), good, point("x", plugin_of(Renamed), "two")])
        assert list(known.available()) == ["merge-things"]
        message = r"'x' \(of one 1.0\) and by plugin 'x' \(of two 1.0\)"
        assert list(known.failed) == ["x"]
        with pytest.raises(PluginLoadError, match=message):
            raise known.failed["x"]
        with pytest.raises(DuplicatePassError, match=message):
            known.create("x")
        with pytest.raises(DuplicatePassError, match=r"one.*two.*register the other"):
            known.register(plugin_of(Other), name="x")
        with pytest.raises(UnknownPassError, match=r"these plugins failed.*: x"):
            known.create("other")

    def test_a_pass_may_be_named_as_two_plugins_are(self) -> None:
        twins = [point("other", plugin_of(Renamed), dist) for dist in ("one", "two")]
        known = Registry([*twins, point("good", plugin_of(Other))])
        assert known.create("other") == Other()


class TestRegister:
    def test_a_module_an_object_and_a_class(self) -> None:
        class Plugin:
            @hookimpl
            def fxopt_pipelines(self) -> Mapping[str, str]:
                return {"fast": "other"}

        class Static:
            @staticmethod
            @hookimpl
            def fxopt_transformations() -> list[type[Transformation]]:
                return [Renamed]

        known = Registry([])
        known.register(plugin_of(Other, name="some_module"))
        known.register(Plugin())
        known.register(Static)
        assert {info.name: info.family for info in known.available().values()} == {
            "other": "some_module",
            "quite-another": "Static",
        }
        assert known.pipeline("fast") == Other()
        assert known.available()["other"].distribution == ""

    def test_a_taken_pass_registers_nothing(self, good: Any) -> None:
        known = Registry([good])
        with pytest.raises(DuplicatePassError, match=r"'merge-things'.*dist-good 1.0.*'mine' \(registered in this"):
            known.register(plugin_of(Other, same_named()), name="mine")
        assert list(known.available()) == ["merge-things"]
        assert known.failed == {}
        known.register(plugin_of(Other), name="mine")
        assert list(known.available()) == ["merge-things", "other"]

    def test_a_taken_plugin_name(self, good: Any) -> None:
        known = Registry([good, failing("broken", ImportError())])
        for name, dist in [("good", "dist-good"), ("broken", "failed to load")]:
            with pytest.raises(DuplicatePassError, match=f"a plugin is already named '{name}'.*{dist}"):
                known.register(plugin_of(Other), name=name)
