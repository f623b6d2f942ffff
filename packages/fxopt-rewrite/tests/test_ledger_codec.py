"""The ledger as text: it says all that undo needs, and malformed text is named."""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import operator
import pickle
import types
import typing
from collections import OrderedDict, namedtuple
from collections.abc import Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import symbolic_trace
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.fx.traceback import NodeSource, NodeSourceAction

from fxopt_core import FxoptError, Journal, Ledger, NodeTag, Record, iter_nodes, name_of
from fxopt_rewrite import (
    ModuleAdded,
    ModuleRemoved,
    ModuleRow,
    Neutral,
    NodeAdded,
    NodeRemoved,
    NodeReplaced,
    NodeRow,
    TensorRemoved,
    TensorRow,
    Unresolved,
    edits_of,
    find,
    ledger_from_json,
    ledger_to_json,
    tag_from_json,
    tag_to_json,
)
from fxopt_rewrite.data import codec
from fxopt_rewrite.data.codec import restore_journal
from fxopt_rewrite.journal import journal
from fxopt_rewrite.journal.edits import (
    Edit,
    Ref,
)
from fxopt_rewrite.journal.journal import Edits

Pair = namedtuple("Pair", ["left", "right"])  # torch.fx passes such as these on, too


class Color(enum.Enum):
    RED = 1


class Instance:
    """A callable that has no name of its own."""

    def __call__(self, x: Tensor) -> Tensor:
        return x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Instance)

    __hash__ = None  # type: ignore[assignment]  # not needed


def row(**fields: Any) -> NodeRow:
    plain: dict[str, Any] = {"target": operator.add, "args": (Ref(1), 2.0), "kwargs": (), "name": "add", "previous": 1}
    return NodeRow(**{"id": 3, "op": "call_function", **plain, **fields})


def ledger_with(*edits: Edit, **fields: Any) -> Ledger:
    return Ledger((Record("a-pass", "m:APass", (), "s", journal=Edits(edits), **fields),), 9, 1)


def through_text(ledger: Ledger) -> Ledger:
    return ledger_from_json(ledger_to_json(ledger))


def kept(value: object) -> object:
    """What a value is after its way through text, as an argument of a node."""
    ledger = through_text(ledger_with(NodeRemoved(row(args=(value,)))))
    (edit,) = edits_of(ledger.records[0])
    assert isinstance(edit, NodeRemoved)
    return edit.row.args[0]


VALUES = [
    None, True, 0, 1, -(2**70), 1.0, -0.0, 1e-300, math.inf, -math.inf, "", "text \u20ac \ud800 \x00", b"\x00\xff",
    1 + 2j, complex(math.inf, -0.0), ..., slice(None, Ref(2), 1), range(3, 0, -1), torch.float16,
    torch.device("cuda", 1), torch.strided, torch.channels_last, torch.Size([1, 2]), torch.Size([]), (),
    (1, (2, [Ref(3)])), [], [1, (2,)],
    {"a": [1], 2: (Ref(1),)}, {}, {3, 1, 2}, frozenset({"a"}), Color.RED, Pair(1, [2]), {"list": 1},
    OrderedDict(b=1, a=2),
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_arguments_keep_value_and_type(value: object) -> None:
    """Repr tells 1, 1.0 and True apart, and both zeros."""
    assert repr(kept(value)) == repr(value)
    assert type(kept(value)) is type(value)


def test_not_a_number_and_collections_of_torch() -> None:
    found = kept(math.nan)
    assert isinstance(found, float) and math.isnan(found)
    assert kept(immutable_list([1, immutable_dict({"a": (2,)})])) == [1, {"a": (2,)}]


TARGETS = [
    torch.conv2d, F.linear, F.relu, operator.mul, getattr, math.sqrt, torch.Tensor.add, torch.ops.aten.add.Tensor,
    torch.ops.aten.add, torch.ops.aten.linear.default, torch.cond, torch.ops.higher_order.cond, nn.Linear, name_of,
    "a_method",
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: getattr(target, "__name__", target))
def test_targets_are_found_by_name(target: Any) -> None:
    assert kept(target) is target or kept(target) == target
    (edit,) = edits_of(through_text(ledger_with(NodeRemoved(row(target=target)))).records[0])
    assert isinstance(edit, NodeRemoved)
    assert edit.row.target == target


CLASSES: list[object] = [Tensor, int, type(None), "Tensor"]
NO_CLASSES: list[object] = [list[Tensor], typing.Optional[Tensor], typing.Union[int, str]]  # noqa: UP007, UP045


@pytest.mark.parametrize("annotation", [*CLASSES, *NO_CLASSES], ids=repr)
def test_annotations_that_are_classes_are_kept(annotation: object) -> None:
    (edit,) = edits_of(through_text(ledger_with(NodeRemoved(row(type_expr=annotation)))).records[0])
    assert isinstance(edit, NodeRemoved)
    assert repr(edit.row.type_expr) == repr(annotation if annotation in CLASSES else None)


EDITS = (
    NodeAdded, NodeRemoved, NodeReplaced, ModuleAdded, ModuleRemoved, TensorRemoved, Neutral,
)  # fmt: skip


def test_reading_a_journal_loads_those_who_write_journals(monkeypatch: pytest.MonkeyPatch) -> None:
    text, loaded = ledger_to_json(ledger_with(NodeReplaced(1, 2))), []
    reader = codec.FIELDS.readers.pop("Edits")

    class Point:
        def load(self) -> None:
            loaded.append(self)
            codec.FIELDS.readers["Edits"] = reader

    monkeypatch.setattr(codec, "entry_points", lambda group: [Point()] if group == "fxopt_journal" else [])
    codec.load_journals.cache_clear()
    assert ledger_from_json(ledger_to_json(Ledger())) == Ledger() and not loaded
    assert ledger_from_json(text) == ledger_from_json(text) == ledger_with(NodeReplaced(1, 2))
    assert len(loaded) == 1


def test_the_editors_journal_is_found_by_its_entry_point() -> None:
    assert journal in [point.load() for point in entry_points(group="fxopt_journal")]


def sample(hint: Any) -> Any:
    """A value of a type, none that is a default."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is tuple:
        return tuple(sample(argument) for argument in arguments if argument is not Ellipsis)
    if origin in (typing.Union, types.UnionType):
        return sample(arguments[0])
    if origin is typing.Literal:
        return arguments[-1]
    if dataclasses.is_dataclass(hint):
        return filled(hint)
    plain = {str: "text", int: 7, float: 0.5, bool: True, torch.dtype: torch.float16, Journal: Edits()}
    return MappingProxyType({"k": 1}) if origin is Mapping else plain.get(hint, ("anything", 1.0))


def filled(cls: Any) -> Any:
    """An instance without any default; booleans once more the other way round."""
    hints = typing.get_type_hints(cls)
    item = cls(**{field.name: sample(hints[field.name]) for field in dataclasses.fields(cls) if field.name != "ledger"})
    flags = {f.name: not f.default for f in dataclasses.fields(cls) if isinstance(f.default, bool)}
    return dataclasses.replace(item, **flags)


def a_full_ledger() -> Ledger:
    """Of every kind of edit one without defaults, and what stands for nothing."""
    empty = (
        NodeAdded(row(previous=None)),
        TensorRemoved(TensorRow("a.b", None, ())),
        ModuleAdded("m", "c", (("b", None),)),
    )
    record = dataclasses.replace(filled(Record), journal=Edits((*map(filled, EDITS), *empty)))
    undone = dataclasses.replace(record, state="undone", journal=None, derived=(), index=None)
    return Ledger((record, undone), 12, 4)


def test_no_field_of_any_class_is_forgotten() -> None:
    ledger = a_full_ledger()
    assert through_text(ledger) == ledger
    assert repr(through_text(ledger).records) == repr(ledger.records)  # what does not take part in comparisons, too
    json.loads(ledger_to_json(ledger), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


class TestMeta:
    def test_what_can_be_expressed_travels(self) -> None:
        node = next(iter_nodes(symbolic_trace(nn.ReLU()).graph))
        node.meta["from_node"] = [NodeSource(None, "capture")]
        meta = {
            "stack_trace": "File here, line 1",
            "nn_module_stack": OrderedDict(a=("a", nn.Linear), b=("b", "some.Class")),
            "source_fn_stack": [("linear", nn.Linear), ("add", operator.add)],
            "from_node": [NodeSource(node, "a-pass", NodeSourceAction.REPLACE)],
            "torch_fn": ("linear_1", "builtin_function_or_method.linear"),
            "seq_nr": 3,
        }
        behind = {"custom": Instance(), "lambda": lambda: 0, "partial": [functools.partial(int)]}
        ledger = through_text(ledger_with(NodeRemoved(row(meta=MappingProxyType({**meta, **behind})))))
        (edit,) = edits_of(ledger.records[0])
        assert isinstance(edit, NodeRemoved)
        assert dict(edit.row.meta) == meta
        with pytest.raises(TypeError):
            edit.row.meta["a"] = 1  # type: ignore[index]  # that is the point

    def test_of_a_class_that_is_not_loaded(self) -> None:
        text = ledger_to_json(ledger_with(NodeRemoved(row(type_expr=Color, args=(Color.RED, Pair(1, 2))))))
        text = text.replace(json.dumps(f"{__name__}:")[1:-1], "nowhere:")
        ledger = ledger_from_json(text)
        assert ledger_to_json(ledger) == text
        (edit,) = edits_of(ledger.records[0])
        assert isinstance(edit, NodeRemoved)
        assert edit.row.type_expr == Unresolved("nowhere:Color")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (NodeRemoved(row(target=Instance())), "node `add`, target: found a value of type Instance"),
        (NodeRemoved(row(args=([lambda: 0],))), r"node `add`, args: found function .*<lambda>"),
        (NodeRemoved(row(args=(torch.zeros(1),))), "node `add`, args: found a value of type Tensor"),
        (ModuleRemoved(ModuleRow("a.b", "m:C", (("x", Instance()),), (), None, None)), "module `a.b`, attributes"),
    ],
)  # fmt: skip
def test_what_has_no_form_is_named(edit: Edit, message: str) -> None:
    with pytest.raises(FxoptError, match=message):
        ledger_to_json(ledger_with(edit))


def test_a_pickle_takes_along_what_has_no_form_in_text() -> None:
    ledger = ledger_with(NodeRemoved(row(target=Instance())), NodeAdded(row(args=([Instance()],))))
    assert pickle.loads(pickle.dumps(ledger)) == ledger


BROKEN = {
    "no JSON": ("{", "Expecting property name"),
    "cut off": ("CUT", "line 1 column"),
    "another document": ('{"a": 1}', "has no version"),
    "a list": ("[]", "has no version"),
    "version of another type": ('{"fxopt_ledger": "1"}', "has no version"),
    "unknown field": ('{"fxopt_ledger": 1, "extra": 1}', "'extra' in Ledger"),
    "records of another type": ('{"fxopt_ledger": 1, "records": "abc"}', "'abc' as 'records' of Ledger"),
    "record of another type": ('{"fxopt_ledger": 1, "records": [{"Ref": {"id": 1}}]}', "as 'records' of Ledger"),
    "record without fields": ('{"fxopt_ledger": 1, "records": [{"Record": {}}]}', "Record lacks 'pass_name'"),
    "fields of another type": ('{"fxopt_ledger": 1, "records": [{"Record": 3}]}', "found '3' as Record"),
    "unknown kind": ('{"fxopt_ledger": 1, "records": [{"Recrod": {}}]}', "unknown kind 'Recrod'"),
    "two kinds": ('{"fxopt_ledger": 1, "records": [{"a": 1, "b": 2}]}', "an object with 2 entries"),
    "dtype": ('{"fxopt_ledger": 1, "next_id": {"dtype": "relu"}}', "'relu', which is not a valid dtype"),
    "no number": ('{"fxopt_ledger": 1, "next_id": true}', "'True' as 'next_id'"),
    "object": ('{"fxopt_ledger": 1, "next_id": {"object": 3}}', "is not a valid object"),
    "enumeration": ('{"fxopt_ledger": 1, "next_id": {"enum": ["builtins:int", 3]}}', "is not a valid enum"),
    "nested too deep": ('{"fxopt_ledger": 1, "next_id": ' + "[" * 100_000 + "]" * 100_000 + "}", "cannot be read"),
}


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN)
def test_malformed_text(text: str, message: str) -> None:
    text = ledger_to_json(a_full_ledger())[:-20] if text == "CUT" else text
    with pytest.raises(FxoptError, match="ledger cannot be read") as raised:
        ledger_from_json(text)
    assert message in str(raised.value)


def test_any_flipped_character_is_an_error_or_another_ledger() -> None:
    """Nothing but an FxoptError comes out of damaged text."""
    text = ledger_to_json(a_full_ledger())
    for place in range(0, len(text), 7):
        for character in '"[0':
            try:
                ledger_from_json(text[:place] + character + text[place + 1 :])
            except FxoptError:
                continue


class TestTags:
    def test_return(self) -> None:
        for tag in (NodeTag(), NodeTag(3, ("a", "b"), ("merge-linears", ("q", "k"))), NodeTag(None, ("a",))):
            assert tag_from_json(json.loads(json.dumps(tag_to_json(tag)))) == tag

    @pytest.mark.parametrize("data", [None, 3, {"id": "3"}, {"marks": "ab"}, {"what": 1}, {"origin": ["a"]}])
    def test_malformed(self, data: object) -> None:
        with pytest.raises(FxoptError, match="what fxopt knows of a node cannot be read"):
            tag_from_json(data)


NEWER = '{"fxopt_ledger": 99, "text": "\u20ac", "next_id": 3, "records": [{"Strange": {}}]}'


def test_newer_text_is_refused() -> None:
    with pytest.raises(FxoptError, match=r"written by version 99.*install a newer fxopt-core"):
        ledger_from_json(NEWER)


def test_a_damaged_journal_is_named() -> None:
    with pytest.raises(FxoptError, match="the journal of this pickle cannot be read"):
        restore_journal(b"damaged", b"")


def test_names_are_looked_up_only_where_modules_are_loaded() -> None:
    assert find("antigravity:fly") == Unresolved("antigravity:fly")
    assert find("torch:no.such.thing") == Unresolved("torch:no.such.thing")
    assert name_of(Instance()) is None
