from __future__ import annotations

import collections.abc as abc
import gc
import weakref
from inspect import Parameter
from typing import Any, Literal, NewType, Optional, Union

import pytest
import torch
from torch.fx import GraphModule

from fxopt_core import Registry, Transformation, hookimpl, options_of
from fxopt_core.errors import PassOptionError, PluginLoadError


class Options(Transformation):
    def __init__(
        self, ratio: float = 0.5, *, min_group: int = 2, where: tuple[str, ...] = (), scale: float | None = None
    ) -> None:
        self.ratio, self.min_group, self.where, self.scale = ratio, min_group, where, scale

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class Plain(Transformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class Inherits(Options):
    pass


class Gathers(Plain):
    def __init__(self, first: int = 1, *rest: int, last: int = 9, **extra: object) -> None:
        self.given = (first, rest, last, extra)


def create(cls: type[Transformation], /, **options: object) -> Any:
    """What a registry makes of a pass."""

    class Plugin:
        @hookimpl
        def fxopt_transformations(self) -> list[type[Transformation]]:
            return [cls]

    passes = Registry(entry_points=[])
    passes.register(Plugin())
    return passes.create(next(iter(passes.available())), **options)


def fitted(value: object, annotation: Any) -> object:
    """What a pass gets that is created with a value for an option with this annotation."""

    class MergeLinears(Plain):
        def __init__(self, *, where=...) -> None: ...  # type: ignore[no-untyped-def]  # it is set

    if annotation is not Parameter.empty:
        MergeLinears.__init__.__annotations__["where"] = annotation
    return create(MergeLinears, where=value).options["where"]


class TestOptionsOf:
    def test_names_types_and_defaults_in_order(self) -> None:
        options = options_of(Options)
        assert list(options) == ["ratio", "min_group", "where", "scale"]
        assert (options["min_group"].annotation, options["min_group"].default) == (int, 2)
        assert options["where"].annotation == tuple[str, ...]
        assert options["scale"].annotation == float | None
        with pytest.raises(TypeError):
            options["more"] = None  # type: ignore[index]  # that is the test

    def test_constructors_that_are_inherited_or_absent(self) -> None:
        assert options_of(Inherits) == options_of(Options)
        assert options_of(Plain) == {}
        assert options_of(object) == {}

    def test_names_that_only_type_checkers_know_are_errors_of_the_plugin(self) -> None:
        with pytest.raises(PluginLoadError, match="NameError: name 'Unresolved' is not defined"):
            fitted("x", "Unresolved")

    def test_no_annotation(self) -> None:
        namespace: dict[str, Any] = {}
        exec("class Untyped:\n    def __init__(self, a): pass", namespace)
        option = options_of(namespace["Untyped"])["a"]
        assert (option.annotation, option.default) == (Parameter.empty, Parameter.empty)


class TestBind:
    def test_defaults_are_filled_in(self) -> None:
        expected = {"ratio": 1.5, "min_group": 4, "where": (), "scale": None}
        assert dict(Options(1.5, min_group=4).options) == dict(Options(ratio=1.5, min_group=4).options) == expected

    def test_variadic_arguments(self) -> None:
        made = Gathers(1, 2, 3, other="x")
        assert made.options == {"first": 1, "rest": (2, 3), "last": 9, "extra": {"other": "x"}}

    def test_unknown_arguments_are_type_errors_that_list_the_options(self) -> None:
        with pytest.raises(TypeError, match=r"Options\(\).*'min_grop'.*its options: ratio, min_group, where, scale"):
            Options(min_grop=3)  # type: ignore[call-arg]  # that is the test
        with pytest.raises(TypeError, match=r"Plain\(\).*its options: none"):
            Plain(1)

    def test_classes_are_not_kept_alive(self) -> None:
        class Short(Plain):
            def __init__(self, *, n: int = 1) -> None:
                self.n = n

        Short()
        watch = weakref.ref(Short)
        del Short
        gc.collect()
        assert watch() is None


class TestCheckedOptions:
    def test_both_spellings(self) -> None:
        assert create(Options, **{"min-group": 3}) == create(Options, min_group=3) == Options(min_group=3)

    def test_the_default_always_passes(self) -> None:
        class Loose(Plain):
            def __init__(self, *, where: str = None) -> None:  # type: ignore[assignment]  # noqa: RUF013  # a common slip
                self.where = where

        assert create(Loose, where=None).options == {"where": None}


UserId = NewType("UserId", int)
OLD_OPTIONAL: Any = Optional[int]  # noqa: UP045  # passes written for it are out there
OLD_UNION: Any = Union[str, float]  # noqa: UP007

FITS: list[tuple[object, Any, object]] = [
    (1, int, 1),
    (1, float, 1.0),
    (None, None, None),
    (3, OLD_OPTIONAL, 3),
    (3, int | None, 3),
    (1, float | int, 1),
    (1, OLD_UNION, 1.0),
    (["a"], str | tuple[str, ...], ("a",)),
    ((1,), list[int] | tuple[int, ...], (1,)),
    ("fast", Literal["fast", "slow"], "fast"),
    (("a",), list[str], ["a"]),
    ([], tuple[int, ...], ()),
    ([1, 2], tuple[int, float], (1, 2.0)),
    ([1, "a"], tuple, (1, "a")),
    ([1], abc.Sequence[int], [1]),
    ((1,), abc.Iterable[float], (1.0,)),
    (3, object, 3),
    (3, UserId, 3),
    (3, Parameter.empty, 3),
]
MISFITS: list[tuple[object, Any]] = [
    (True, int),
    (True, float),
    (1, bool),
    (1.0, int),
    ("1", int),
    (2**53 + 1, float),
    (1j, Any),
    ({"a": 1}, dict[str, int]),
    (torch.float16, torch.dtype),
    ([object()], Any),
    (None, int),
    ("a", int | None),
    ("medium", Literal["fast", "slow"]),
    (True, Literal[1]),
    ("ab", abc.Sequence[str]),
    ([1], tuple[str, ...]),
    ([1, 2, 3], tuple[int, int]),
    ({1}, list[int]),
    ([[1]], set),
]


class TestCoerce:
    @pytest.mark.parametrize(("value", "annotation", "expected"), FITS)
    def test_fits(self, value: object, annotation: Any, expected: object) -> None:
        found = fitted(value, annotation)
        assert (found, repr(found)) == (expected, repr(expected))  # of the same types, inside too

    @pytest.mark.parametrize(("value", "annotation"), MISFITS)
    def test_does_not_fit(self, value: object, annotation: Any) -> None:
        with pytest.raises(PassOptionError, match=r"found .*, expected "):
            fitted(value, annotation)


class TestShowing:
    @pytest.mark.parametrize(
        ("value", "annotation", "message"),
        [
            ("x" * 500, int, r"found 'x+\.\.\.x+' \(str\), expected int$"),
            (torch.zeros(1000), int, r"found tensor.{,40} \(Tensor\), expected a number, text"),
        ],
    )
    def test_messages(self, value: object, annotation: Any, message: str) -> None:
        with pytest.raises(PassOptionError, match=message):
            fitted(value, annotation)
