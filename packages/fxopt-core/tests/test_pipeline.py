from __future__ import annotations

import math
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Literal

import pytest
import torch
from hypothesis import example, given, settings, strategies as st
from torch.fx import GraphModule

from fxopt_core import Registry, Transformation, compose, hookimpl
from fxopt_core.errors import (
    FxoptError,
    PassOptionError,
    PipelineOptionError,
    PipelineSyntaxError,
    RegistryError,
    UnknownPassError,
)


class MergeLinears(Transformation):
    def __init__(
        self,
        *,
        min_group: int = 2,
        where: str | None = None,
        names: tuple[str, ...] = (),
        ratio: float = 0.5,
        mode: Literal["fast", "safe"] = "safe",
        strict: bool = False,
    ) -> None:
        if min_group == 13:
            raise ValueError("thirteen brings bad luck")
        self.min_group, self.where, self.names = min_group, where, names
        self.ratio, self.mode, self.strict = ratio, mode, strict

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class Fold(Transformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class Anything(Fold):
    def __init__(
        self,
        value: Any = None,
        *,
        kinds: frozenset[str] = frozenset(),
        sizes: list[int] | None = None,
        limits: Mapping[str, tuple[float, ...]] | None = None,
        hook: Any = len,
    ) -> None:
        self.value, self.kinds, self.sizes, self.limits, self.hook = value, kinds, sizes, limits, hook


class Variadic(Fold):
    def __init__(self, *names: str, **extra: object) -> None:
        self.names = names


class Unregistered(Fold):
    pass


def known_to() -> Registry:
    plugin = types.ModuleType("plugin")

    @hookimpl
    def fxopt_transformations() -> Iterable[type[Transformation]]:
        return [MergeLinears, Fold, Anything, Variadic]

    @hookimpl
    def fxopt_pipelines() -> Mapping[str, str]:
        return {
            "fast": "merge-linears{min-group=3}, fold",
            "faster": "fast, fold",
            "nothing": "",
            "a": "fold, b",
            "b": "c",
            "c": "a",
            "itself": "itself",
            "wrong-option": "fold{x=1}",
        }

    vars(plugin).update(fxopt_transformations=fxopt_transformations, fxopt_pipelines=fxopt_pipelines)
    registry = Registry(entry_points=[])
    registry.register(plugin, name="tests")
    return registry


KNOWN = known_to()

CANONICAL = [
    "",
    "merge-linears{min-group=3},fold",
    'merge-linears{min-group=3 where="layer.*"}',
    'merge-linears{where="a, b} {c= \\" d"}'.replace('\\"', "'"),
    "merge-linears{where='say \"it\"'}",
    'merge-linears{min-group=-3 names=("a", "b") ratio=1.0 mode="fast" strict=True},merge-linears',
    'merge-linears{names=("a",)}',
    "merge-linears{ratio=-0.0}",
    "anything{value=[]},anything{value=()}",
    "anything{value=[(1, None), 2.5] sizes=[1, -2]}",
]


class TestRoundTrip:
    @pytest.mark.parametrize("text", CANONICAL)
    def test_canonical_text_comes_back_as_it_was(self, text: str) -> None:
        assert KNOWN.pipeline_text(KNOWN.pipeline(text)) == text

    @pytest.mark.parametrize(
        ("text", "canonical"),
        [
            (" fold , fold ", "fold,fold"),
            ("   ", ""),
            ("fold{}", "fold"),
            ("merge-linears { min-group=3   strict=True } , fold", "merge-linears{min-group=3 strict=True},fold"),
            ("merge-linears{min_group=3}", "merge-linears{min-group=3}"),
            ("merge-linears{min-group=2 where=None}", "merge-linears"),
            ("merge-linears{min-group=0x10}", "merge-linears{min-group=16}"),
            ("merge-linears{ratio=1}", "merge-linears{ratio=1.0}"),
            ('merge-linears{names=["a"]}', 'merge-linears{names=("a",)}'),
            (r'merge-linears{where="a\.\d"}', r'merge-linears{where="a\\.\\d"}'),
            (r'merge-linears{where=r"a\.\d"}', r'merge-linears{where="a\\.\\d"}'),
            ("anything{value=[\n1,\n2]}", "anything{value=[1, 2]}"),
            ("fold,faster,fold", "fold,merge-linears{min-group=3},fold,fold,fold"),
        ],
    )
    def test_other_text_comes_back_canonical(self, text: str, canonical: str) -> None:
        built = KNOWN.pipeline(text)
        assert KNOWN.pipeline_text(built) == canonical
        assert KNOWN.pipeline(canonical).signature == built.signature

    def test_nested_compositions_are_flattened(self) -> None:
        nested = compose(compose(Fold(), MergeLinears()), compose(compose(), Fold()))
        assert KNOWN.pipeline_text(nested) == "fold,merge-linears,fold"


SYNTAX_ERRORS = [
    (",", 0, "found ',', expected the name of a pass"),
    ("fold,", 5, "found the end of the text, expected the name"),
    ("fold,,fold", 5, "found ',', expected the name"),
    ("fold fold", 5, "found 'f', expected a comma or an opening brace"),
    ("fold{ ", 6, "found the end of the text, expected '}', or an option"),
    ("fold{}{}", 6, "found '{'"),
    ("fold{x}", 5, "found 'x', expected '}', or an option and its value"),
    ("fold{x =1}", 5, "an option and its value"),
    ("fold{x= 1}", 7, "found ' ', expected a value"),
    ("fold{x=", 7, "found the end of the text"),
    ("fold{=1}", 5, "found '=', expected '}', or an option"),
    ("fold{x=1, y=2}", 8, "found ','"),
    ("fold{x=[1}", 7, "found '[1}', expected a value"),
    ("fold{x=[1", 7, "expected a value"),
    ('fold{x="a}', 7, "found '\"a', expected a value"),
    ('fold{x="a\\', 7, "expected a value"),
    ("fold{x=layer}", 7, "found 'layer', expected a value"),
    ("fold{x=f(1)}", 7, "expected a value"),
    ("fold{x={1}}", 7, "expected a value"),
    ('fold{x="a"y=1}', 7, "expected a value"),
    ("fold{x=" + "9" * 5000 + "}", 7, "expected a value"),
    ("fold{x=" + "[" * 500 + "]" * 500 + "}", 7, "expected a value"),
]


class TestSyntaxErrors:
    @pytest.mark.parametrize(("text", "column", "message"), SYNTAX_ERRORS)
    def test_column_and_message(self, text: str, column: int, message: str) -> None:
        with pytest.raises(PipelineSyntaxError) as caught:
            KNOWN.pipeline(text)
        assert (caught.value.column, caught.value.text) == (column, text)
        assert message in str(caught.value)

    def test_a_mark_stands_below_the_place(self) -> None:
        with pytest.raises(PipelineSyntaxError) as caught:
            KNOWN.pipeline("fold,,fold")
        _, text, mark = str(caught.value).splitlines()
        assert text[mark.index("^")] == text.strip()[5]


OPTION_ERRORS = [
    ("fold{x=1}", 5, "pass 'fold' has no option 'x'; it has none"),
    ("fold,merge-linears{min-grup=3}", 19, "did you mean min-group"),
    ("merge-linears{min-group='3'}", 14, "option 'min-group': found '3' (str), expected int"),
    ('merge-linears{mode="slow"}', 14, "expected Literal['fast', 'safe']"),
    ("fold,merge-linears{min-group=13}", 5, "ValueError: thirteen brings bad luck"),
    ("merge-linears{min-group=3 min_group=3}", 26, "option 'min-group' is given twice"),
    ("fold,fast{x=1}", 10, "named pipeline, which takes no options"),
    ("variadic{x=1}", 9, "no option 'x'"),
]


class TestOptionErrors:
    @pytest.mark.parametrize(("text", "column", "message"), OPTION_ERRORS)
    def test_column_and_message(self, text: str, column: int, message: str) -> None:
        with pytest.raises(PipelineOptionError) as caught:
            KNOWN.pipeline(text)
        assert caught.value.column == column
        assert message in str(caught.value)
        assert isinstance(caught.value, PassOptionError)
        assert isinstance(caught.value.__cause__, ValueError) == ("ValueError" in message)

    def test_inside_a_named_pipeline(self) -> None:
        with pytest.raises(
            PipelineOptionError, match="in pipeline 'wrong-option': pass 'fold' has no option"
        ) as caught:
            KNOWN.pipeline("fold,wrong-option")
        assert caught.value.text == "fold{x=1}"


class TestNames:
    def test_unknown(self) -> None:
        with pytest.raises(UnknownPassError, match=r"(?s)'merge-linear'; did you mean merge-linears.*column 5"):
            KNOWN.pipeline("fold,merge-linear")

    @pytest.mark.parametrize(("text", "path"), [("a", "a -> b -> c -> a"), ("itself", "itself -> itself")])
    def test_a_cycle(self, text: str, path: str) -> None:
        with pytest.raises(RegistryError, match=f"contains itself: {path}"):
            KNOWN.pipeline(text)


class TestWhatTextCannotExpress:
    @pytest.mark.parametrize(
        ("transformation", "message"),
        [
            (Anything(torch.ones(1)), r"option 'value' of pass 'anything': text cannot express a value of type Tensor"),
            (Anything(len), r"builtin_function_or_method builtins.len"),
            (Anything(lambda: None), r"text cannot express function"),
            (Anything([{"a": 1}]), r"a value of type list; give a named parameter a number, text"),
            (Anything(math.nan), r"a value of type float"),
            (Anything(10**5000), r"a value of type int"),
            (Anything(frozenset({1})), r"cannot express a value of type frozenset"),
            (Anything(hook=print), r"option 'hook'"),
            (Anything(sizes=(1, 2)), r"a value of type tuple"),  # type: ignore[arg-type]  # not checked when constructed
            (MergeLinears(ratio=1), r"a value of type int"),
            (MergeLinears(min_group="3"), r"a value of type str"),  # type: ignore[arg-type]  # not checked when constructed
            (Variadic("a"), r"'names' of pass 'variadic'.*named parameter"),
            (Variadic(extra=1), r"'extra' of pass 'variadic'"),
            (compose(Fold(), inplace=False), r"inplace=False"),
            (compose(Fold(), compose(Fold(), inplace=False)), r"inplace=False"),
        ],
    )
    def test_pass_option_error(self, transformation: Transformation, message: str) -> None:
        with pytest.raises(PassOptionError, match=message):
            KNOWN.pipeline_text(transformation)

    def test_a_pass_that_is_not_registered(self) -> None:
        with pytest.raises(RegistryError, match=r"Unregistered of .*test_pipeline is not registered"):
            KNOWN.pipeline_text(compose(Fold(), Unregistered()))

    def test_defaults_need_no_text(self) -> None:
        assert KNOWN.pipeline_text(compose(Anything(hook=len), Variadic())) == "anything,variadic"


FINITE = st.floats(allow_nan=False, allow_infinity=False)
LITERALS = st.recursive(
    st.none() | st.booleans() | st.integers() | FINITE | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.lists(inner, max_size=4).map(tuple),
    max_leaves=10,
)
TEXTS = st.text(alphabet="ab-_={}[](),'\"\\ \n#1.") | st.text()


patient = settings(deadline=None, max_examples=80)


class TestProperties:
    @patient
    @given(LITERALS, st.integers(), st.none() | st.text(), st.lists(st.text()).map(tuple), FINITE)
    def test_printed_text_reads_as_an_equal_pipeline(
        self, value: object, count: int, where: str | None, names: tuple[str, ...], ratio: float
    ) -> None:
        if count == 13:
            return
        made = compose(Anything(value), MergeLinears(min_group=count, where=where, names=names, ratio=ratio))
        text = KNOWN.pipeline_text(made)
        assert KNOWN.pipeline(text).signature == made.signature
        assert KNOWN.pipeline_text(KNOWN.pipeline(text)) == text

    @patient
    @given(TEXTS | TEXTS.map("anything{{value={}}}".format))
    @example("\x00")
    @example("fold{x=\x00}")
    @example("fold{x='\udc80'}")
    @example("fold{x=1if 0else 2}")
    def test_arbitrary_text(self, text: str) -> None:
        try:
            built = KNOWN.pipeline(text)
        except PipelineSyntaxError as error:
            assert 0 <= error.column <= len(text)
        except FxoptError:
            pass
        else:
            with suppress(PassOptionError):  # of infinite numbers
                printed = KNOWN.pipeline_text(built)
                assert KNOWN.pipeline_text(KNOWN.pipeline(printed)) == printed
