"""Cases of linear layers that share an input, and of biases."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks import changes
from benchmarks.cases import Case, Change, case, product
from benchmarks.nets import Flow, Nested, Net

SHAPES = ((2, 3, 4), (1, 3, 4), (3, 7, 4))
BIASES = {
    "all have a bias": (True, True, True),
    "none has a bias": (False,) * 3,
    "some have a bias": (True, False, True),
}
SIZES = {"equal sizes": (6, 6, 6), "unequal sizes": (6, 4, 2)}


def attend(m: Any, x: Any) -> Any:
    """The operation that reads every result, whatever its size."""
    return _attended(m.q(x), m.k(x), m.v(x))


def _attended(q: Any, k: Any, v: Any) -> Any:
    return q.sin() + k.exp().mean(-1, keepdim=True) * v.tanh().sum(-1, keepdim=True)


def _changed_between(m: Any, x: Any) -> Any:
    x = x * 1
    q, k = m.q(x), m.k(x)
    x.mul_(2)
    return _attended(q, k, m.v(x))


def _changed_in_part(m: Any, x: Any) -> Any:
    x = x * 1
    q = m.q(x)
    x.select(-1, 0).fill_(5)
    return _attended(q, m.k(x), m.v(x))


def _changed_through_view(m: Any, x: Any) -> Any:
    x = x * 1
    rows = x.view(-1, 4)
    q = m.q(x)
    rows.add_(1)
    return _attended(q, m.k(x), m.v(x))


def _views(m: Any, x: Any) -> Any:
    q, k, v = (each(x).view(-1) for each in (m.q, m.k, m.v))
    return q.sin().sum() + k.sum() * v


def _strides(m: Any, x: Any) -> Any:
    q = m.q(x)
    return torch.as_strided(q, (2, 2), (2, 1)).sum() + _attended(q, m.k(x), m.v(x))


def _result_in_place(m: Any, x: Any) -> Any:
    q, k, v = m.q(x), m.k(x), m.v(x)
    q.add_(1)
    return _attended(q, k, v) + k.sum()


def _twice(m: Any, x: Any) -> Any:
    return _attended(m.q(x), m.k(x), m.v(x)) + m.q(x + 1)


def _keywords(m: Any, x: Any) -> Any:
    return _attended(m.q(input=x), m.k(input=x), m.v(x))


def _weight_read(m: Any, x: Any) -> Any:
    return attend(m, x) * m.k.weight.sum()


def _same_layer_twice(m: Any, x: Any) -> Any:
    return _attended(m.q(x), m.q(x), m.v(x))


MERGING_FLOWS: dict[str, Flow] = {
    "input changed in place between": _changed_between,
    "input changed in part between": _changed_in_part,
    "input changed through a view between": _changed_through_view,
    "view of a result": _views,
    "as_strided of a result": _strides,
    "result changed in place": _result_in_place,
    "called twice": _twice,
    "one layer twice on the input": _same_layer_twice,
    "called by keyword": _keywords,
    "weight read elsewhere": _weight_read,
}
CHANGES: dict[str, Callable[[str], Change]] = {
    "hook": changes.hook,
    "weight norm": changes.weight_norm,
    "pruned": changes.pruned,
    "frozen": changes.frozen,
}


def merging_cases() -> Iterator[Case]:
    """Cases of layers that share an input."""
    add = partial(case, "merged linears")
    factors = product(biases=BIASES, sizes=SIZES, nested=(True, False), dtype=("float32", "bfloat16"))
    for _, f in factors:
        layers = list(zip(SIZES[f["sizes"]], BIASES[f["biases"]], strict=True))
        name = f"{f['sizes']}, {'nested' if f['nested'] else 'at the root'}"
        yield add(f["biases"], name, _attention(layers, nested=f["nested"]), SHAPES, dtype=f["dtype"])
    layers = [(6, True), (4, True), (2, True)]
    plain = _attention(layers)
    for topic, flow in MERGING_FLOWS.items():
        yield add(topic, "", _attention(layers, flow), SHAPES)
    for topic, change in CHANGES.items():
        yield add(f"{topic}, one of three", "", plain, SHAPES, change=change("block.k"))
    yield add("frozen model", "", plain, SHAPES, change=changes.freeze)
    tied = changes.tied("block.q", "block.k")
    yield add("one weight, two layers", "", _attention([(6, True)] * 3), SHAPES, change=tied)
    yield add("subclass", "", _attention(layers, own="k"), SHAPES)
    yield add("training", "", plain, SHAPES, training=True)
    yield add("vector input", "", plain, ((4,),))
    yield add("empty batch", "", plain, ((0, 3, 4), (2, 3, 4)))


def bias_cases() -> Iterator[Case]:
    """Cases of biases that become a column of the weight."""
    add = partial(case, "bias in linear")
    factors = product(out_features=(1, 5), rank=(1, 2, 3), dtype=("float32", "bfloat16", "float16"))
    for name, f in factors:
        shapes = ((4,),) if f["rank"] == 1 else ((3,) * (f["rank"] - 1) + (4,), (1,) * (f["rank"] - 1) + (4,))
        topic = "float32" if f["dtype"] == "float32" else "half precision"
        yield add(topic, name, _one(f["out_features"]), shapes, dtype=f["dtype"])
    shapes = ((3, 4), (1, 4))
    yield add("no bias", "", _one(5, bias=False), shapes)
    yield add("called twice", "", _one(5, lambda m, x: m.q(x) + m.q(x + 1)), shapes)
    yield add("called by keyword", "", _one(5, lambda m, x: m.q(input=x)), shapes)
    yield add("weight read elsewhere", "", _one(5, lambda m, x: m.q(x) * m.q.weight.sum()), shapes)
    yield add("bias read elsewhere", "", _one(5, lambda m, x: m.q(x) + m.q.bias), shapes)
    yield add("subclass", "", lambda: Net(lambda m, x: m.q(x), q=changes.OwnLinear(4, 5)), shapes)
    for topic, change in CHANGES.items():
        yield add(topic, "", _one(5), shapes, change=change("q"))
    yield add("training", "", _one(5), shapes, training=True)
    yield add("empty batch", "", _one(5), ((0, 4), (2, 4)))


def _one(out_features: int, flow: Flow = lambda m, x: m.q(x), bias: bool = True) -> Callable[[], nn.Module]:
    return lambda: Net(flow, q=nn.Linear(4, out_features, bias=bias))


def _attention(
    layers: list[tuple[int, bool]], flow: Flow = attend, nested: bool = True, own: str | None = None
) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = {
            name: (changes.OwnLinear if name == own else nn.Linear)(4, size, bias=bias)
            for name, (size, bias) in zip("qkv", layers, strict=True)
        }
        net = Net(flow, **made)
        return Nested(net) if nested else net

    return make
