"""What a ledger from a stranger cannot do: name functions, hold more than data, run, hang, or fill the memory."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import random
import re
import resource
import time
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import NIGHTLY
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_capture import capture, load, save
from fxopt_capture.archive.ledger import read_ledger, write_ledger
from fxopt_checkpoints import KeyMap, key_map, load_original_state_dict, original_state_dict
from fxopt_checkpoints.arithmetic import NewTensors
from fxopt_checkpoints.tensor_map import Derivation
from fxopt_core import (
    CaptureError,
    CheckpointError,
    FxoptError,
    Instrument,
    Transformation,
    UndoError,
    history,
    instrumented,
    ledger_of,
    undo,
)
from fxopt_linear import MergeLinears
from fxopt_norm import FuseBatchNorm1dInLinear
from fxopt_norm.folding import FoldBatchNorm
from fxopt_rewrite import registered_functions
from fxopt_testing import ModelCase, check_transformation
from fxopt_testing.pictures import changes, picture

X = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
Place = tuple[Any, ...]
"""Keys that lead to a value in data."""


class Model(nn.Module):
    """Two layers on one value, and a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.out, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2), nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.out(self.q(x) + self.k(x)))


@cache
def saved() -> dict[str, bytes]:
    """Return the entries of an archive with a fold and a merge."""
    torch.manual_seed(0)
    graph_module = MergeLinears()(FuseBatchNorm1dInLinear()(capture(Model().eval(), X)))
    file = io.BytesIO()
    save(graph_module, file)
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def archive_with(path: Path, change: Callable[[Any], object]) -> Path:
    """Write an archive whose ledger was changed."""
    data = json.loads(saved()["ledger.json"])
    change(data)
    with zipfile.ZipFile(path, "w") as archive:
        for entry, content in saved().items():
            archive.writestr(entry, json.dumps(data) if entry == "ledger.json" else content)
    return path


# -- functions by name ------------------------------------------------------------------------------------------------


def derived(ledger: Any) -> Any:
    """Return the record of how a fold computed its tensors."""
    return next(r["Record"]["derived"] for r in ledger["records"] if "derived" in r["Record"])[0]["Derived"]


NOT_LISTED = (
    "os:system",
    "builtins:eval",
    "fxopt_rewrite.data.codec:restore_journal",
    "fxopt_core.ledger.records:ledger_of",
    "fxopt_capture.archive.files:load",
    "fxopt_norm.formulas:scaled_after",  # of an installed pass, which does not list it
    "fxopt_norm.folding:fold_after",  # a function that is listed, by another name
    "fxopt_norm.formulas:fold_after.__globals__",
    "torch:load",
    "",
)


@pytest.mark.parametrize("role", ["function", "restore"])
@pytest.mark.parametrize("name", NOT_LISTED)
def test_an_archive_names_no_function_that_no_pass_lists(tmp_path: Path, name: str, role: str) -> None:
    with pytest.raises(CaptureError, match="which no pass that is installed or imported here lists"):
        load(archive_with(tmp_path / "a.fxopt", lambda ledger: derived(ledger).update({role: name})))


@pytest.mark.parametrize(
    "value", [{"name": "torch:relu"}, [{"name": "builtins:abs"}], {"list": [1]}, {"range": [0, 10**12, 1]}]
)
def test_settings_are_data(tmp_path: Path, value: object) -> None:
    with pytest.raises(CaptureError, match="a setting 'eps' that is not a number"):
        load(archive_with(tmp_path / "a.fxopt", lambda ledger: derived(ledger).update(settings=[["eps", value]])))


def test_a_key_map_calls_no_function_that_no_pass_lists(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    graph_module = load(archive_with(tmp_path / "a.fxopt", lambda ledger: None))
    names = key_map(graph_module)
    (fold,) = (step for step in names.steps if isinstance(step, Derivation))
    hostile = replace(fold, function="os:mkdir", settings=(("path", str(mark)),))
    with pytest.raises(CheckpointError, match="`fuse-batch-norm1d-in-linear` calls 'os:mkdir', which no pass"):
        computed(replace(names, steps=tuple(hostile if step is fold else step for step in names.steps)))
    assert not mark.exists()


def computed(converters: KeyMap) -> None:
    """Compute the new tensors of a key map."""
    for each in NewTensors(converters, Model().state_dict().get):
        each.build()


def test_what_passes_list_works_after_loading(tmp_path: Path) -> None:
    """The list holds what the families record, so that checkpoints go in and out of a loaded archive."""
    graph_module = load(archive_with(tmp_path / "a.fxopt", lambda ledger: None))
    torch.manual_seed(1)
    other = Model().eval()
    load_original_state_dict(graph_module, other.state_dict())
    torch.testing.assert_close(graph_module(X), other(X), rtol=1e-4, atol=1e-5)
    assert original_state_dict(graph_module).keys() == other.state_dict().keys()


def scaled(weight: Tensor) -> Tensor:
    """A function of a pass that nothing installs."""
    return weight * 2


def test_the_list_is_that_of_passes_installed_or_imported() -> None:
    class Scale(Transformation):
        """A pass of a script."""

        arithmetic = (scaled,)

        def transform(self, graph_module: GraphModule) -> GraphModule:
            return graph_module

    found = registered_functions()
    assert found[f"{__name__}:scaled"] is Scale.arithmetic[0]
    assert {name for name in found if name.startswith("fxopt_")} >= {"fxopt_norm.formulas:fold_after"}
    assert not any(name.startswith(("fxopt_core", "fxopt_rewrite", "fxopt_capture", "torch")) for name in found)


def test_the_conformance_kit_names_what_a_pass_does_not_list(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ModelCase("normed", Model, X)
    given: Any = {"models": [case], "properties": ["checkpoints-load"], "raises": False}
    assert check_transformation(FuseBatchNorm1dInLinear(), **given)
    monkeypatch.setattr(FoldBatchNorm, "arithmetic", ())
    (finding,) = check_transformation(FuseBatchNorm1dInLinear(), **given).errors
    assert "'fxopt_norm.formulas:fold_after', which no pass" in finding.found
    assert "List in the pass's `arithmetic`" in finding.advice


# -- nodes, modules and tensors that undo puts back -------------------------------------------------------------------


def row(ledger: Any, edit: str, kind: str) -> Any:
    """Return a row of the journal of the merge."""
    records = [each["Record"] for each in ledger["records"] if each["Record"]["pass_name"] == "merge-linears"]
    return next(each[edit]["row"][kind] for each in records[0]["journal"]["Edits"]["edits"] if edit in each)


def node(**fields: Any) -> Callable[[Any], None]:
    return lambda ledger: row(ledger, "NodeRemoved", "NodeRow").update(fields)


def module(*attribute: Any, **fields: Any) -> Callable[[Any], None]:
    def change(ledger: Any) -> None:
        found = row(ledger, "ModuleRemoved", "ModuleRow")
        found.update(fields)
        found["attributes"] += [list(attribute)] if attribute else []

    return change


UNDONE: dict[str, Callable[[Any], None]] = {
    "a function": node(op="call_function", target={"name": "os:system"}),
    "a function of fxopt": node(op="call_function", target={"name": "fxopt_capture.archive.files:load"}),
    "a method": node(op="call_method", target="__reduce_ex__"),
    "a module whose name is code": node(target='q"), print("mark'),
    "an attribute that no layer has": node(op="get_attr", target="forward.__globals__"),
    "an operation": node(op="exec"),
    "an argument whose name is code": node(kwargs=[["x=print(1)", 1]]),
    "a function to call as an argument": node(
        op="call_function", target={"name": "builtins:max"}, kwargs=[["key", {"name": "builtins:abs"}]]
    ),
    "a private attribute": node(
        op="call_function", target={"name": "builtins:getattr"}, args=[{"Ref": {"id": 0}}, "__class__"]
    ),
    "a class": module(cls="subprocess:Popen"),
    "a forward": module("forward", {"name": "builtins:getattr"}),
    "the state of a module": module("_modules", 1),
    "a name of a module": module(name='q"), print("mark'),
    "a submodule of torch": node(type_expr={"name": "torch.utils.collect_env:typing:"}),
    "a huge number": node(args=[{"int": "f" * 10**6}]),
    "a number that no field has": lambda ledger: ledger["records"][0]["Record"].update(seconds=10**400),
}


@pytest.mark.parametrize("change", UNDONE.values(), ids=UNDONE)
def test_undo_puts_nothing_back_but_plain_layers_and_calls(tmp_path: Path, change: Callable[[Any], None]) -> None:
    with pytest.raises(CaptureError, match=r"fxopt\.json in it is damaged or hostile"):
        load(archive_with(tmp_path / "a.fxopt", change))


@pytest.mark.parametrize("keeps_journal", [True, False])
@pytest.mark.parametrize("observed", [True, False])
@pytest.mark.parametrize("name", ["os:system", "subprocess:Popen"])
def test_undo_calls_nothing_that_a_record_names(tmp_path: Path, keeps_journal: bool, observed: bool, name: str) -> None:
    trace = tmp_path / "called"
    option = ["command", f"touch {trace}"] if name == "os:system" else ["args", ["touch", str(trace)]]

    def change(ledger: Any) -> None:
        record = ledger["records"][-1]["Record"]
        record |= {"transformation": name, "options": [option]}
        if not keeps_journal:
            record["rewrites"] = []
            del record["journal"]

    graph_module = load(archive_with(tmp_path / "edited.fxopt", change))
    with instrumented(Instrument()) if observed else contextlib.nullcontext(), contextlib.suppress(UndoError):
        undo(graph_module)
    assert not trace.exists()


@pytest.mark.parametrize("strides", [[10**15, 1], [1, 10**9], [2**62, 2**61], [1, 1], [0, 0], [-4, 1], [4], [1, 4]])
def test_strides_of_what_undo_makes_take_no_memory(tmp_path: Path, strides: list[int]) -> None:
    """Only their order counts; what are no strides is refused."""

    def change(ledger: Any) -> None:
        tensor = row(ledger, "ModuleRemoved", "ModuleRow")["tensors"][0]["TensorRow"]
        tensor["strides"] = strides

    graph_module = load(archive_with(tmp_path / "a.fxopt", change))
    expected = graph_module(X)
    with contextlib.suppress(FxoptError):
        undo(graph_module)
    torch.testing.assert_close(graph_module(X), expected)
    for tensor in graph_module.state_dict().values():
        assert tensor.untyped_storage().nbytes() < 1000


def tensor(place: int, **fields: Any) -> Callable[[Any], None]:
    return lambda ledger: row(ledger, "ModuleRemoved", "ModuleRow")["tensors"][place]["TensorRow"].update(fields)


def without_tensor(place: int) -> Callable[[Any], None]:
    return lambda ledger: row(ledger, "ModuleRemoved", "ModuleRow")["tensors"].pop(place)


def replaced(old: int) -> Callable[[Any], None]:
    def change(ledger: Any) -> None:
        edits = ledger["records"][-1]["Record"]["journal"]["Edits"]["edits"]
        next(each["NodeReplaced"] for each in edits if "NodeReplaced" in each)["old"] = old

    return change


UNFITTING: dict[str, tuple[Callable[[Any], None], str]] = {
    "values of another": (
        tensor(0, piece={"Piece": {"key": "q_k_merged.weight", "slices": [[0, 1, 4]]}}),
        "two originals would get the same values of `q_k_merged.weight`, from 4",
    ),
    "values nowhere": (tensor(1, piece=None), "nothing says where the values of q.bias are now"),
    "no weight": (without_tensor(0), "`q` would be restored incomplete: it has no `weight`"),
    "no bias": (without_tensor(1), "`q` would be restored incomplete: 'Linear' object has no attribute 'bias'"),
    "a number for a tensor": (node(args=[3]), "`q` would be restored with arguments that `q` does not take"),
    "no arguments": (node(args=[]), "`q` would be restored with arguments that `q` does not take"),
    "another node": (replaced(7), "which `narrow` has replaced, was not removed by this pass"),
}


@pytest.mark.parametrize(("change", "found"), UNFITTING.values(), ids=UNFITTING)
def test_what_does_not_fit_is_not_undone(tmp_path: Path, change: Callable[[Any], None], found: str) -> None:
    graph_module = load(archive_with(tmp_path / "a.fxopt", change))
    expected, code = graph_module(X), graph_module.code
    with pytest.raises(UndoError, match=re.escape(found)):
        undo(graph_module)
    assert graph_module.code == code
    torch.testing.assert_close(graph_module(X), expected, rtol=0, atol=0)


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_twenty_thousand_records_are_read_and_printed_in_seconds(tmp_path: Path) -> None:
    """The bounds are generous, for busy machines: 3 s and 200 MB where it was written."""

    def change(ledger: Any) -> None:
        first = {key: value for key, value in ledger["records"][0]["Record"].items() if key not in ("journal", "run")}
        ledger["records"] = [{"Record": {**first, "run": run}} for run in range(20_000)]

    path = archive_with(tmp_path / "a.fxopt", change)
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.perf_counter()
    records = history(load(path))
    text, data = str(records), records.to_json()
    seconds = time.perf_counter() - start
    growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert (len(records), len(text.splitlines()) > 20_000, len(data) > 10**6) == (20_000, True, True)
    assert seconds < 30, seconds
    assert growth < 600, growth


# -- any edit ---------------------------------------------------------------------------------------------------------


def paths(value: Any, path: Place = ()) -> Iterator[Place]:
    """Yield the path to a value and to all values in it."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from paths(entry, (*path, key))


def at(value: Any, path: Place) -> Any:
    """Return what is there."""
    for key in path:
        value = value[key]
    return value


def edit(data: Any, path: Place, how: str, other: Place) -> None:
    """Edit one value."""
    owner, key = at(data, path[:-1]), path[-1]
    value = owner[key]
    if how == "delete":
        del owner[key]
    elif how == "number":
        owner[key] = value + 1 if type(value) is int else 7
    elif how == "text":
        owner[key] = f"{value}x" if isinstance(value, str) else "x"
    elif how == "copy":
        owner[key] = copy.deepcopy(at(data, other))
    else:
        owner[key] = {"null": None, "list": [value], "flag": True}[how]


def test_an_edited_ledger_of_an_archive_is_refused_or_right(tmp_path: Path) -> None:
    """Whatever value is edited, the history prints; undo is refused and changes nothing, or done.

    What is undone computes the original. Which value a node reads is believed: one of two layers of one shape, instead
    of the other.
    """
    graph_module = load(archive_with(tmp_path / "a.fxopt", lambda ledger: None))
    text, generator = write_ledger(ledger_of(graph_module)), random.Random(0)
    places = [path for path in paths(json.loads(text)) if path]
    undone: Any = undo(copy.deepcopy(graph_module))
    believed = [undone(X), *(undone.out_folded(2 * layer(X)) for layer in (undone.q, undone.k))]
    ways = ["delete", "number", "text", "copy", "null", "list", "flag"]
    counts: Counter[str] = Counter()
    edits = 3000 if NIGHTLY else 300
    for _ in range(edits):
        data = json.loads(text)
        edit(data, generator.choice(places), generator.choice(ways), generator.choice(places))
        twin = copy.deepcopy(graph_module)
        try:
            twin.meta["fxopt"] = read_ledger(json.dumps(data))
            str(history(twin))
            before = picture(twin)
            undo(twin)
        except UndoError as error:
            counts["refused"] += 1
            assert "othing was changed" in str(error) or "rolled back" in str(error)
            assert changes(before, picture(twin)) == []
            continue
        except FxoptError:
            counts["refused"] += 1
            continue
        counts["right"] += any(torch.allclose(twin(X), each, rtol=1e-4, atol=1e-5) for each in believed)
    assert counts["refused"] > edits / 2
    assert counts["refused"] + counts["right"] == edits, counts
