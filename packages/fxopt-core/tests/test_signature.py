from __future__ import annotations

import functools
import inspect
import math
import operator
from collections.abc import Callable
from enum import Enum
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.fx import GraphModule

from fxopt_core import Transformation, compose, signature_of, uuid_of


class Color(Enum):
    RED = 1


class Pass(Transformation):
    def __init__(self, value: object = None, *, other: object = None) -> None:
        self.value, self.other = value, other

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


class OtherPass(Pass):
    pass


def module_function(x: int) -> int:
    return x


def other_function(x: int) -> int:
    return x


anonymous = lambda x: x  # noqa: E731  # a lambda has no name even where it is bound to one


class Methods:
    @classmethod
    def of_class(cls) -> None: ...

    @staticmethod
    def static() -> None: ...

    def of_instance(self) -> None: ...


def sign(value: object) -> str:
    return signature_of(Pass, {"value": value})


# Values that all differ from one another, besides those that `test_equal_exactly_where_the_values_are` draws.
DISTINCT: list[Any] = [
    10**5000,
    -0.0,
    "\udc80",
    torch.Size([1, 2]),
    (1, 2),
    set(),
    {1},
    {(1, 2)},
    frozenset({1}),
    torch.float16,
    torch.device("cuda"),
    torch.device("cuda", 0),
    torch.strided,
    torch.channels_last,
    module_function,
    other_function,
    Pass,
    len,
    operator.add,
    torch.nn.functional.relu,
    torch.Tensor.add,
    str.lower,
    Methods.of_class,
    Methods.static,
    Methods.of_instance,
    torch.ops.aten.add,
    torch.ops.aten.add.Tensor,
    Pass(1),
    OtherPass(1),
    compose(Pass(1), Pass(2)),
    compose(Pass(2), Pass(1)),
    torch.tensor(1),
    torch.tensor(1.0),
    torch.tensor([1.0]),
    torch.tensor([[1.0]]),
    torch.tensor([1.0 + 2.0j]),
    torch.tensor([1.0]).bfloat16(),
    torch.nn.Parameter(torch.tensor([1.0])),
    torch.empty(0),
    torch.empty(0, 2),
]


class TestDifferent:
    def test_all_differ(self) -> None:
        by_signature: dict[str, object] = {}
        for value in DISTINCT:
            signature = sign(value)
            assert signature not in by_signature, f"{value!r} has the signature of {by_signature[signature]!r}"
            assert (signature, len(signature)) == (sign(value), 64)
            by_signature[signature] = value

    def test_names_and_values_do_not_run_together(self) -> None:
        assert signature_of(Pass, {"a": "b"}) != signature_of(Pass, {"ab": ""})
        assert sign(["a", "b"]) != sign(['a","b'])
        assert sign({"list": [1]}) != sign([1])
        assert sign("\ud800\udc00") != sign("\U00010000")


class TestEqual:
    def test_in_any_order(self) -> None:
        assert sign({"a": 1, "b": 2}) == sign({"b": 2, "a": 1})
        assert sign({3, "a", None}) == sign({None, "a", 3})
        assert signature_of(Pass, {"a": 1, "b": 2}) == signature_of(Pass, {"b": 2, "a": 1})

    def test_tensors_by_value(self) -> None:
        value = torch.arange(6.0).reshape(2, 3)
        copies = [value.clone(), value.t().contiguous().t(), torch.arange(12.0)[:6].reshape(2, 3), value[:]]
        copies.append(value.clone().requires_grad_())
        copies.append(torch.stack([value, value], dim=2)[..., 1])
        assert {sign(copied) for copied in copies} == {sign(value)}

    def test_lazily_conjugated_and_negated_tensors(self) -> None:
        value = torch.tensor([1.0 + 2.0j])
        assert sign(value.conj()) == sign(torch.tensor([1.0 - 2.0j]))
        assert sign(value.conj().imag) == sign(torch.tensor([-2.0]))

    def test_a_tensor_is_left_as_it_is(self) -> None:
        value = torch.arange(6.0).reshape(2, 3).t()
        version = value._version
        sign(value)
        assert (value._version, value.stride()) == (version, (1, 3))

    def test_a_value_inside_itself_is_named(self) -> None:
        value: list[object] = []
        value.append(value)
        with pytest.raises(TypeError, match=r"option 'value' of Pass has no value.*recursion"):
            sign(value)


def local_function() -> Callable[[], None]:
    def inner() -> None: ...

    return inner


class TensorSubclass(torch.Tensor):
    pass


UNSTABLE: list[tuple[object, str]] = [
    (lambda: None, r"<lambda>.*top level of a module"),
    (anonymous, r"<lambda>"),
    (local_function(), r"local_function.<locals>.inner"),
    (Methods().of_instance, r"Methods.of_instance"),
    (functools.partial(module_function, 1), r"functools:partial"),
    (Color.RED, r"Color"),
    (type("Made", (), {}), r"'Made'"),
    (torch.empty(2, device="meta"), r"on meta.*dense tensor"),
    (torch.eye(2).to_sparse(), r"sparse_coo.*dense tensor"),
    (torch.eye(2).as_subclass(TensorSubclass), r"TensorSubclass"),
    (torch.nn.Linear(1, 1), r"torch.nn.modules.linear:Linear"),
    (math, r"module"),
    (torch.Generator(), r"Generator"),
]


class TestUnstable:
    @pytest.mark.parametrize(("value", "message"), UNSTABLE)
    @pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v], lambda v: {"key": (v,)}])
    def test_type_error_names_the_option(self, value: object, message: str, wrap: Callable[[object], object]) -> None:
        with pytest.raises(TypeError, match=rf"option 'value' of Pass (?s:.*){message}"):
            sign(wrap(value))

    def test_a_tensor_read_inside_a_mode(self) -> None:
        from torch._subclasses import FakeTensorMode

        value = torch.zeros(2)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            for each in (value, mode.from_tensor(value)):
                with pytest.raises(TypeError, match="values cannot be read"):
                    sign(each)

    def test_a_function_whose_name_now_means_another(self, monkeypatch: pytest.MonkeyPatch) -> None:
        original = module_function
        monkeypatch.setitem(globals(), "module_function", other_function)
        with pytest.raises(TypeError, match="module_function"):
            sign(original)

    def test_such_passes_are_still_usable(self) -> None:
        transformation = Pass(anonymous)
        assert transformation == transformation
        assert transformation != Pass(anonymous)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner, max_size=4)
    ),
    max_leaves=12,
)


def exact(value: object) -> object:
    """An independent account of what a value is, comparable by ``==``."""
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(map(exact, value)))
    if isinstance(value, dict):
        return (dict, frozenset((exact(key), exact(item)) for key, item in value.items()))
    return (type(value), repr(value))


@settings(deadline=None)
@given(VALUES, VALUES)
def test_equal_exactly_where_the_values_are(left: object, right: object) -> None:
    assert (sign(left) == sign(right)) == (exact(left) == exact(right))


class TestUuid:
    def test_differs_with_class_and_options(self) -> None:
        assert len({Pass(1).uuid(), Pass(2).uuid(), OtherPass(1).uuid(), Pass(1).signature}) == 4

    @pytest.mark.parametrize("changed", [Pass, OtherPass, module_function])
    def test_follows_the_code_of_class_bases_members_and_functions(
        self, changed: object, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        getsource = inspect.getsource

        def upgraded(value: Any) -> str:
            return "upgraded" if value is changed else getsource(value)

        composition = compose(OtherPass(module_function), Pass())
        signature, uuid = composition.signature, composition.uuid()
        monkeypatch.setattr("inspect.getsource", upgraded)
        assert composition.signature == signature
        assert composition.uuid() != uuid

    def test_follows_the_version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        before = uuid_of(Transformation, {})
        monkeypatch.setattr("fxopt_core.__version__", "9.9.9")
        assert uuid_of(Transformation, {}) != before

    def test_without_source(self) -> None:
        namespace: dict[str, Any] = {"Pass": Pass, "__name__": "no_such_module"}
        exec("class Typed(Pass): pass", namespace)
        assert len(uuid_of(namespace["Typed"], {"value": len})) == 64
