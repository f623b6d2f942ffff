from __future__ import annotations

import collections.abc as abc
import gc
import weakref
from inspect import Parameter
from typing import TYPE_CHECKING, Annotated, Any, Literal, NewType, Optional, TypeVar, Union

import pytest
import torch
from torch.fx import GraphModule

from fxopt_core import Registry, Transformation, hookimpl, options_of
from fxopt_core.errors import PassOptionError

if TYPE_CHECKING:
    from decimal import Decimal  # a name that is known to type checkers alone


class Options(Transformation):
    def __init__(
        self, ratio: float = 0.5, *, min_group: int = 2, where: tuple[str, ...] = (), scale: Decimal | None = None
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
    def __init__(self, first: int, /, *rest: int, last: int = 9, **extra: object) -> None:
        self.given = (first, rest, last, extra)


class Positional(Plain):
    def __init__(self, first: int = 1, /, *, last: int = 9) -> None:
        self.given = (first, last)


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


class TestNaming:
    @pytest.mark.parametrize(
        ("identifier", "expected"),
        [
            ("MergeLinears", "merge-linears"),
            ("FuseBatchNorm2dInConv2d", "fuse-batch-norm2d-in-conv2d"),
            ("FuseBatchNorm1dInLinear", "fuse-batch-norm1d-in-linear"),
            ("ChangeTrueDivToMulByInverse", "change-true-div-to-mul-by-inverse"),
            ("FuseQKVLinears", "fuse-qkv-linears"),
            ("_Private_Pass", "private-pass"),
            ("X", "x"),
        ],
    )
    def test_kebab_case(self, identifier: str, expected: str) -> None:
        assert type(identifier, (Plain,), {})().name == expected


class TestOptionsOf:
    def test_names_types_and_defaults_in_order(self) -> None:
        options = options_of(Options)
        assert list(options) == ["ratio", "min_group", "where", "scale"]
        assert (options["min_group"].annotation, options["min_group"].default) == (int, 2)
        assert options["where"].annotation == tuple[str, ...]
        assert not any(option.required for option in options.values())

    def test_an_annotation_that_cannot_be_resolved_stays_text(self) -> None:
        assert options_of(Options)["scale"].annotation == "Decimal | None"

    def test_inherited_constructor(self) -> None:
        assert options_of(Inherits) == options_of(Options)

    def test_no_constructor(self) -> None:
        assert options_of(Plain) == {}
        assert options_of(object) == {}

    def test_variadic_parameters_are_none(self) -> None:
        assert list(options_of(Gathers)) == ["first", "last"]
        assert options_of(Gathers)["first"].required

    def test_no_annotation(self) -> None:
        namespace: dict[str, Any] = {}
        exec("class Untyped:\n    def __init__(self, a=1): pass", namespace)
        assert options_of(namespace["Untyped"])["a"].annotation is Parameter.empty

    def test_the_mapping_cannot_be_changed(self) -> None:
        with pytest.raises(TypeError):
            options_of(Options)["more"] = None  # type: ignore[index]  # that is the test


class TestBind:
    def test_defaults_are_filled_in(self) -> None:
        expected = {"ratio": 1.5, "min_group": 4, "where": (), "scale": None}
        assert dict(Options(1.5, min_group=4).options) == expected

    def test_keyword_and_positional_calls_are_one(self) -> None:
        assert Options(1.5).options == Options(ratio=1.5).options

    def test_variadic_arguments(self) -> None:
        assert Gathers(1, 2, 3, other="x").options == {"first": 1, "rest": (2, 3), "last": 9, "other": "x"}

    def test_missing_arguments_are_left_out(self) -> None:
        assert Gathers.__new__(Gathers).options == {"rest": (), "last": 9}

    def test_an_unknown_argument_is_a_type_error_that_lists_the_options(self) -> None:
        with pytest.raises(TypeError, match=r"Options\(\).*'min_grop'.*its options: ratio, min_group, where, scale"):
            Options(min_grop=3)  # type: ignore[call-arg]  # that is the test

    def test_arguments_for_a_pass_without_a_constructor(self) -> None:
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


class TestConstruct:
    def test_positional_only_parameters(self) -> None:
        assert create(Positional, first=5).given == (5, 9)

    def test_defaults(self) -> None:
        assert create(Options, min_group=7) == Options(min_group=7)


class TestCheckedOptions:
    def test_both_spellings(self) -> None:
        assert create(Options, **{"min-group": 3}) == create(Options, min_group=3)

    def test_literals_are_fitted(self) -> None:
        assert create(Options, where=["a"], ratio=2) == Options(2.0, where=("a",))

    def test_unknown_option(self) -> None:
        with pytest.raises(
            PassOptionError, match=r"pass 'options' has no option 'min-grup'.*ratio, min-group.*did you mean"
        ):
            create(Options, **{"min-grup": 3})

    def test_no_options_at_all(self) -> None:
        with pytest.raises(PassOptionError, match="it has none"):
            create(Plain, x=1)

    def test_one_option_twice(self) -> None:
        with pytest.raises(PassOptionError, match="'min-group' twice"):
            create(Options, **{"min-group": 3}, min_group=3)

    def test_message_of_a_wrong_value(self) -> None:
        expected = r"pass 'options', option 'min-group': found '3' \(str\), expected int"
        with pytest.raises(PassOptionError, match=expected):
            create(Options, **{"min-group": "3"})

    def test_the_default_always_passes(self) -> None:
        class Loose(Plain):
            def __init__(self, *, where: str = None) -> None:  # type: ignore[assignment]  # noqa: RUF013  # a common slip
                self.where = where

        assert create(Loose, where=None).options == {"where": None}


UserId = NewType("UserId", int)
T = TypeVar("T")
OLD_OPTIONAL: Any = Optional[int]  # noqa: UP045  # passes written for it are out there
OLD_UNION: Any = Union[str, float]  # noqa: UP007

FITS: list[tuple[object, Any, object]] = [
    (1, int, 1),
    (1, float, 1.0),
    (1.5, float, 1.5),
    (True, bool, True),
    ("a", str, "a"),
    (None, None, None),
    (None, type(None), None),
    (None, OLD_OPTIONAL, None),
    (3, OLD_OPTIONAL, 3),
    (3, int | None, 3),
    (1, float | int, 1),
    (1, OLD_UNION, 1.0),
    ("a", str | list[str], "a"),
    (["a"], str | tuple[str, ...], ("a",)),
    ((1,), list[int] | tuple[int, ...], (1,)),
    ("fast", Literal["fast", "slow"], "fast"),
    (["a"], tuple[str, ...], ("a",)),
    (("a",), list[str], ["a"]),
    ([], tuple[int, ...], ()),
    ([1, 2], tuple[int, float], (1, 2.0)),
    ([1, "a"], tuple, (1, "a")),
    ([1, 2.5], list[float], [1.0, 2.5]),
    ([1], abc.Sequence[int], [1]),
    ((1,), abc.Sequence[int], (1,)),
    ((1,), abc.Iterable[float], (1.0,)),
    (3, object, 3),
    ("x", "Unresolved", "x"),
    ("x", T, "x"),
    (3, Annotated[int, "positive"], 3),
    (3, UserId, 3),
    (3, Parameter.empty, 3),
]
MISFITS: list[tuple[object, Any]] = [
    (True, int),
    (True, float),
    (1, bool),
    (1.0, int),
    ("1", int),
    (10**400, float),
    (2**53 + 1, float),
    (1j, float),
    (1j, Any),
    ({"a": 1}, dict[str, int]),
    ({1}, Any),
    (torch.float16, torch.dtype),
    (len, Any),
    ([object()], Any),
    (1, str),
    ("a", bytes),
    (None, int),
    (0, None),
    ("a", int | None),
    ("medium", Literal["fast", "slow"]),
    (True, Literal[1]),
    ("ab", tuple[str, ...]),
    ("ab", abc.Sequence[str]),
    ("ab", abc.Iterable[str]),
    (b"ab", list[int]),
    ([1], tuple[str, ...]),
    ([1, 2, 3], tuple[int, int]),
    ({1}, tuple[int, ...]),
    ({1}, list[int]),
    (iter([1]), list[int]),
    ([[1]], set),
    ("float16", torch.dtype),
]


class TestCoerce:
    @pytest.mark.parametrize(("value", "annotation", "expected"), FITS)
    def test_fits(self, value: object, annotation: Any, expected: object) -> None:
        found = fitted(value, annotation)
        assert found == expected
        assert type(found) is type(expected)

    @pytest.mark.parametrize(("value", "annotation"), MISFITS)
    def test_does_not_fit(self, value: object, annotation: Any) -> None:
        with pytest.raises(PassOptionError, match=r"found .*, expected "):
            fitted(value, annotation)

    def test_items_are_fitted_type_and_all(self) -> None:
        found = fitted([1], tuple[float, ...])
        assert found == (1.0,)
        assert isinstance(found, tuple)
        assert type(found[0]) is float

    def test_nan_is_a_float(self) -> None:
        assert fitted(float("nan"), float) != 0

    def test_the_message_names_pass_and_option(self) -> None:
        with pytest.raises(PassOptionError) as caught:
            fitted([1], tuple[str, ...])
        assert str(caught.value) == ("pass 'merge-linears', option 'where': found [1] (list), expected tuple[str, ...]")


class TestShowing:
    @pytest.mark.parametrize(
        ("value", "annotation", "message"),
        [
            ("x" * 500, int, r"found 'x{50,79}\.\.\. \(str\), expected int$"),
            (torch.zeros(1000), int, "found a value of type Tensor, expected"),
            (3, str, r"found 3 \(int\), expected str$"),
            ("a", OLD_OPTIONAL, r"expected (Optional\[int\]|int \| None)$"),
            ("a", abc.Sequence[str], r"expected Sequence\[str\]$"),
        ],
    )
    def test_messages(self, value: object, annotation: Any, message: str) -> None:
        with pytest.raises(PassOptionError, match=message):
            fitted(value, annotation)

    def test_values_whose_repr_fails(self) -> None:
        class Rude:
            def __repr__(self) -> str:
                raise RuntimeError("no")

        with pytest.raises(PassOptionError, match="found a value of type list"):
            fitted([Rude()], list[int])
