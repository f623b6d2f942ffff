"""`verify`: what a model does to its arguments, and which memory its outputs share with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from verified_calls import X, compare

from fxopt_tools import verify


class Cache:
    """As those of language models: it grows as the model runs."""

    def __init__(self) -> None:
        self.keys: list[Tensor] = []
        self.length = 0
        self.marker = object()  # no copy of which equals it


def caches(factor: float = 1.0, times: int = 1, length: int = 3) -> Callable[[Tensor, Cache], Tensor]:
    def call(x: Tensor, cache: Cache) -> Tensor:
        cache.keys.extend([x * factor] * times)
        cache.length += length
        return x + 1

    return call


def test_a_cache_that_grows_alike_passes_and_shows_in_the_report() -> None:
    cache = Cache()
    report = compare(caches(), caches(), X, cache)
    assert [output.path for output in report.outputs] == [
        "output", "args[1].keys[0] after the call", "args[1].length after the call"
    ]  # fmt: skip
    assert report and cache.keys == [] and cache.length == 0
    assert report.outputs[1].reference == "float64"


@pytest.mark.parametrize(
    ("other", "path"),
    [
        (caches(1.01), "args[1].keys[0] after the call"),
        (caches(times=2), "args[1].keys[1] after the call"),
        (caches(times=0), "args[1].keys[0] after the call"),
        (caches(length=4), "args[1].length after the call"),
        (lambda x, cache: x + 1, "args[1].keys[0] after the call"),
    ],
)
def test_a_cache_that_does_not_fails(other: Callable[..., Any], path: str) -> None:
    for report in (compare(caches(), other, X, Cache()), compare(other, caches(), X, Cache())):
        assert path in [output.path for output in report.failures]


@pytest.mark.parametrize(
    ("right", "wrong", "path"),
    [
        (lambda d: d.update(n=1), lambda d: d.update(n=2), "args[0]['n']"),
        (lambda d: d.update(new=X), lambda d: d.update(new=X + 1), "args[0]['new']"),
        (lambda d: d.pop("x"), lambda d: d.pop("n"), "args[0]['x']"),
        (lambda d: d.update(x=d["x"] + 1), lambda d: d.update(x=d["x"] + 2), "args[0]['x']"),
        (lambda d: d["list"].append(1), lambda d: d["list"].append((1,)), "args[0]['list'][1]"),
        (lambda d: d.update(x=None), lambda d: d.update(x=[]), "args[0]['x']"),
        (lambda d: d["x"].zero_(), lambda d: d["x"].fill_(1), "args[0]['x']"),
        (lambda d: setattr(d["x"], "data", X + 1), lambda d: None, "args[0]['x']"),
        (lambda d: d["x"].t_(), lambda d: None, "args[0]['x']"),
        (lambda d: d["x"].resize_(2), lambda d: None, "args[0]['x']"),
    ],
)
def test_effects_on_containers(right: Callable[[Any], object], wrong: Callable[[Any], object], path: str) -> None:
    def calls(effect: Callable[[Any], object]) -> Callable[[Any], Tensor]:
        def call(argument: Any) -> Tensor:
            effect(argument)
            return torch.ones(2)

        return call

    argument = {"x": X.clone(), "n": 0, "list": [X]}
    assert compare(calls(right), calls(right), argument)
    report = compare(calls(right), calls(wrong), argument)
    assert f"{path} after the call" in [output.path for output in report.failures], str(report)
    assert torch.equal(argument["x"], X) and argument["n"] == 0  # type: ignore[arg-type]  # a mapping of all kinds


def test_arguments_that_nobody_touches_have_no_line() -> None:
    report = compare(lambda *a: a[0] + 1, lambda *a: a[0] + 1, X, Cache(), object(), [object()], (), {}, None)
    assert report and [output.path for output in report.outputs] == ["output"]


def test_what_a_run_puts_into_an_argument_was_copied() -> None:
    shared = torch.zeros(3)

    def puts(value: float) -> Callable[[list[Tensor]], Tensor]:
        def call(into: list[Tensor]) -> Tensor:
            into.append(shared.fill_(value))
            return torch.ones(1)

        return call

    assert compare(puts(1.0), puts(1.0), []) and not compare(puts(1.0), puts(2.0), [])


# --- Memory that outputs share with arguments


def test_an_output_that_is_its_input_is_compared_as_it_was_returned() -> None:
    assert compare(lambda x: x, lambda x: x, X)
    assert compare(lambda x: x.add_(1), lambda x: x.add_(1), X)
    report = compare(lambda x: x.add_(1), lambda x: x + 1, X)
    assert [output.path for output in report.failures] == ["args[0] after the call"]


def test_views_in_place_of_copies_are_noted() -> None:
    report = compare(lambda x: x.view(-1), lambda x: x.reshape(-1).clone(), X)
    assert report.passed and len(report.notes) == 1
    assert report.notes[0].startswith("`output` shares memory with args[0] in the original, and with no argument in ")
    assert not compare(lambda x: x.view(-1), lambda x: x.reshape(-1), X).notes
    report = compare(lambda x, y: {"a": x + 1}, lambda x, y: {"a": y[:]}, X, X + 1)
    assert "`output['a']` shares memory with no argument in the original, and with args[1]" in report.notes[0]


# --- Values of all kinds


def test_objects_inside_themselves_are_compared() -> None:
    def circle(x: Tensor) -> dict[str, Any]:
        found: dict[str, Any] = {"x": x + 0}
        found["me"] = {"again": found}
        return found

    assert compare(circle, circle, X) and not compare(circle, lambda x: circle(x + 1), X)
    assert not compare(circle, lambda x: {"x": x + 0, "me": {"again": {}}}, X)


def test_keys_that_look_alike_are_told_apart() -> None:
    class Key:
        def __repr__(self) -> str:
            return "key"

    a, b = Key(), Key()
    report = compare(lambda x: {a: x + 1, b: x + 2}, lambda x: {a: x + 0, b: x + 2}, X)
    assert [output.path for output in report.outputs] == ["output[key]", "output[key]'"] and len(report.failures) == 1


def test_layers_that_draw_are_compared_in_train_mode() -> None:
    layers = nn.Sequential(nn.Dropout(0.5), nn.RReLU(), nn.AlphaDropout(0.3), nn.Linear(4, 4)).train()
    assert verify(layers, copy.deepcopy(layers), X)
    assert not verify(layers, copy.deepcopy(layers).eval(), X)
