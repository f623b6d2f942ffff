"""Cases of batch norms after and before convolutions and linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from benchmarks import changes
from benchmarks.cases import Case, Change, case, product
from benchmarks.nets import Flow, Net

IMAGES = ((2, 4, 6, 6), (1, 4, 6, 6), (3, 4, 9, 5))
ROWS = ((2, 4), (5, 4))
FLOWS: dict[str, Flow] = {
    "called with and without the norm": lambda m, x: m.norm(m.layer(x)) + m.layer(x + 1),
    "result read beside the norm": lambda m, x: (lambda y: m.norm(y) + y)(m.layer(x)),
    "called twice, normed twice": lambda m, x: m.norm(m.layer(x)) + m.norm(m.layer(x + 1)),
    "called by keyword": lambda m, x: m.norm(input=m.layer(input=x)),
    "weight read elsewhere": lambda m, x: m.norm(m.layer(x)) * m.layer.weight.sum(),
    "norm's weight read elsewhere": lambda m, x: m.norm(m.layer(x)) * m.norm.weight.sum(),
    "result changed in place": lambda m, x: m.norm(m.layer(x).add_(1)),
    "norm's result changed in place": lambda m, x: m.norm(m.layer(x)).mul_(2),
}
CHANGES: dict[str, Change] = {
    "hook on the layer": changes.hook("layer"),
    "hook on the norm": changes.hook("norm"),
    "weight norm on the layer": changes.weight_norm("layer"),
    "pruned layer": changes.pruned("layer"),
    "frozen model": changes.freeze,
    "frozen layer": changes.frozen("layer"),
    "tiny variance": changes.statistics(1e-12, 1e-5),
    "tiny variance, no eps": changes.statistics(1e-8, 0.0),
}
Layer = Callable[[], nn.Module]


def straight(m: Any, x: Tensor) -> Tensor:
    """Layer, then norm."""
    result: Tensor = m.norm(m.layer(x))
    return result


def norm_first(m: Any, x: Tensor) -> Tensor:
    """Norm, then layer."""
    result: Tensor = m.layer(m.norm(x))
    return result


def convolution_cases() -> Iterator[Case]:
    """Cases of convolutions."""
    add = partial(case, "batch norm into convolution")
    for name, f in product(bias=(True, False), affine=(True, False), groups=(1, 4), dtype=("float32", "bfloat16")):
        model = net(straight, convolution(f["bias"], groups=f["groups"]), affine=f["affine"])
        yield add(plain_topic(f["bias"], f["affine"]), name, model, IMAGES, dtype=f["dtype"])
    for name, f in product(bias=(True, False)):
        layer = convolution(f["bias"])
        plain = net(straight, layer)
        for topic, flow in FLOWS.items():
            yield add(topic, name, net(flow, layer), IMAGES)
        for topic, change in CHANGES.items():
            yield add(topic, name, plain, IMAGES, change=change)
        evaluating = changes.evaluating("norm")
        yield add("training", name, plain, IMAGES[:1], training=True)
        yield add("norm evaluates, the rest trains", name, plain, IMAGES, training=True, change=evaluating)
        own = partial(changes.OwnConvolution, 4, 4, 3, bias=f["bias"])
        yield add("subclass of the layer", name, net(straight, own), IMAGES)
        yield add("no running statistics", name, net(straight, layer, tracks=False), IMAGES)
        reflecting = convolution(f["bias"], padding_mode="reflect")
        yield add("padding by reflection", name, net(straight, reflecting), IMAGES)
        yield add("empty batch", name, plain, ((0, 4, 6, 6), (2, 4, 6, 6)))
        tied = changes.tied("layer", "other")
        yield add("one weight, two layers", name, partial(two_convolutions, layer), IMAGES, change=tied)


def linear_cases() -> Iterator[Case]:
    """Cases of linear layers."""
    add = partial(case, "batch norm into linear")
    factors = product(
        bias=(True, False), affine=(True, False), first=(False, True), rank=(2, 3), dtype=("float32", "bfloat16")
    )
    for name, f in factors:
        flow = norm_first if f["first"] else straight
        model = net(flow, partial(nn.Linear, 4, 4, bias=f["bias"]), nn.BatchNorm1d, f["affine"])
        shapes = ROWS if f["rank"] == 2 else ((2, 4, 4), (1, 4, 4))
        topic = "3-D input" if f["rank"] == 3 else plain_topic(f["bias"], f["affine"])
        named = name.replace("no first", "norm behind").replace("first", "norm before")
        yield add(topic, named, model, shapes, dtype=f["dtype"])
    layer = partial(nn.Linear, 4, 4)
    plain = net(straight, layer, nn.BatchNorm1d)
    for topic, through in FLOWS.items():
        yield add(topic, "", net(through, layer, nn.BatchNorm1d), ROWS)
    for topic, change in CHANGES.items():
        yield add(topic, "", plain, ROWS, change=change)
    yield add("training", "", plain, ROWS[:1], training=True)
    yield add("norm evaluates, the rest trains", "", plain, ROWS, training=True, change=changes.evaluating("norm"))
    own = net(straight, partial(changes.OwnLinear, 4, 4), nn.BatchNorm1d)
    yield add("subclass of the layer", "", own, ROWS)
    yield add("empty batch", "", plain, ((0, 4), (2, 4)))


def plain_topic(bias: bool, affine: bool) -> str:
    """The subject of a case without further changes."""
    return f"{'bias' if bias else 'no bias'}, {'affine' if affine else 'not affine'}"


def convolution(bias: bool, **options: Any) -> Layer:
    """A maker of a convolution with 4 channels."""
    return partial(nn.Conv2d, 4, 4, 3, padding=1, bias=bias, **options)


def two_convolutions(layer: Layer) -> nn.Module:
    """Two convolutions on one input, one of them with a norm."""
    return Net(
        lambda m, x: m.norm(m.layer(x)) + m.other(x),
        layer=layer(),
        other=layer(),
        norm=nn.BatchNorm2d(4),
    )


def net(flow: Flow, layer: Layer, norm: Any = nn.BatchNorm2d, affine: bool = True, tracks: bool = True) -> Layer:
    """A maker of a net of a layer and a norm."""
    return lambda: Net(flow, layer=layer(), norm=norm(4, affine=affine, track_running_stats=tracks))
