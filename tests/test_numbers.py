"""Numbers that reach operators: whatever they are, a call computes or refuses, and touches no memory of others.

Each operator, and the layers of archives, are called with drawn numbers: one second each, the same ones every time.
The session ``sanitize`` of noxfile.py gives each a minute under AddressSanitizer, and others each time. What fails
there comes again with the printed seed as ``FXOPT_FUZZ_SEED``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random, SystemRandom
from typing import Any
from unittest.mock import patch

import pytest
import torch
from packed_bytes import pack_bytes
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from fxopt_capture import load, save
from fxopt_core.errors import CaptureError
from fxopt_cpu import (
    EmbeddingNorm,
    MergedAttention,
    PackedConv2d,
    PanelLinear,
    QuantizedConv1d,
    QuantizedConv2d,
    RowAttention,
    SumNorm,
)
from fxopt_cpu.layers.epilogue import Activation, Norm
from fxopt_cpu.library import OPERATORS, isa
from fxopt_cpu.operators.conv import Window, pack_convolution
from fxopt_cpu.operators.linear import pack, quantize, shifted_sums
from fxopt_cpu.operators.plan import PlanBuilder
from fxopt_simplify import ShapeTables

SECONDS = float(os.environ.get("FXOPT_FUZZ_SECONDS", "1"))
NUMBERS = (
    *(-(2**63), -(2**31), -3, -1, 0, 1, 2, 3, 5, 7, 13, 14, 15, 16, 17, 33, 100, 1000, 4096, 2**16, 2**20, 2**31 - 1),
    *(2**31, 2**32, 2**32 + 1, 2**40, 2**40 + 1, 2**48, 2**61, 2**62, 2**63 - 1, (2**64 + 2) // 3, (2**64 + 8) // 5),
)
ROOM = 1 << 31  # bytes of addresses: oneDNN keeps code for each drawn layer, and crashes where it gets no room for it


@pytest.fixture
def draw(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[Random]:
    """What a test draws from, in little memory: a number that is not refused may ask for all that there is."""
    given = os.environ.get("FXOPT_FUZZ_SEED") or ("0" if SECONDS <= 1 else str(SystemRandom().getrandbits(32)))
    if SECONDS > 1:
        with capsys.disabled():
            print(f"\n{request.node.name}: FXOPT_FUZZ_SEED={given}", flush=True)
    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    former = resource.getrlimit(resource.RLIMIT_AS)
    if used < 1 << 40:  # AddressSanitizer takes more, and has a limit of its own
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, former[1]))
    drawn = Random(f"{request.node.name} {given}")
    torch.manual_seed(drawn.getrandbits(32))
    yield drawn
    resource.setrlimit(resource.RLIMIT_AS, former)


def repeated(call: Callable[[], object]) -> int:
    """Call for as long as there is time, and return how often it computed."""
    end, computed = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        with contextlib.suppress(RuntimeError, MemoryError, ValueError, TypeError, CaptureError, IndexError):
            call()
            computed += 1
    return computed


def other_number(draw: Random, value: int) -> int:
    return draw.choice([*NUMBERS, value + 1, value - 1, value * 2, -value, value + 2**32])


def other_tensor(draw: Random, tensor: Tensor) -> Tensor:
    """Return a tensor of other sizes and strides: longer without memory, empty with any strides, or cut."""
    dim = draw.randrange(tensor.dim()) if tensor.dim() else 0
    sizes, strides = list(tensor.shape), list(tensor.stride())
    kind = draw.randrange(5) if sizes else 4
    long = draw.choice([each for each in NUMBERS if not 2**12 < each < 2**31])  # attention takes its square
    if kind == 0:
        sizes[dim], strides[dim] = long, 0
    elif kind == 1:
        sizes[dim] = 0
        strides = [abs(draw.choice(NUMBERS)) for _ in strides]
        return tensor.new_empty(1).as_strided([*sizes], strides)
    elif kind == 2:
        return tensor.narrow(dim, 0, draw.randrange(sizes[dim] + 1))
    elif kind == 3:
        return tensor.transpose(dim, draw.randrange(len(sizes)))
    else:
        sizes, strides = [long, *sizes], [0, *strides]
    return tensor.as_strided(sizes, strides)


def changed(draw: Random, value: Any) -> Any:
    """Return an argument with one of its numbers changed."""
    if isinstance(value, Tensor) and value.dim() == 1 and value.dtype == torch.int64 and value.numel() > 30:  # a plan
        value = value.clone()
        at = draw.randrange(len(value))
        value[at] = other_number(draw, int(value[at]))
        return value
    if isinstance(value, Tensor):
        return other_tensor(draw, value)
    if isinstance(value, (list, tuple)):
        at = draw.randrange(len(value))
        return [changed(draw, each) if i == at else each for i, each in enumerate(value)]
    return other_number(draw, value) if type(value) is int else value


def linear(draw: Random) -> list[Any]:
    depth, features, gated = draw.randint(1, 40), draw.randint(1, 40), draw.random() < 0.3
    weights, scale, sums = [torch.randn(features, depth) for _ in range(1 + gated)], None, None
    rounding, kind = None, draw.choice(["float", "bfloat16", "int8", "rounded"])
    if kind in ("int8", "rounded"):
        panels, scale, sums = (
            torch.cat(each) for each in zip(*(pack_bytes(*quantize(w)) for w in weights), strict=True)
        )
        if kind == "rounded":
            rounding = torch.stack([torch.rand(depth), torch.zeros(depth)])
            sums = torch.cat([sums, shifted_sums(panels, rounding[1])])
    else:
        panels = torch.cat([pack(w.bfloat16() if kind == "bfloat16" else w) for w in weights])
    x = torch.randn(draw.randint(1, 5), draw.randint(1, 9), depth)
    residual = torch.randn(*x.shape[:-1], features) if draw.random() < 0.5 else None
    norm = torch.randn(features)
    bias = torch.randn(features * (1 + gated))
    tail = [residual, draw.randrange(3), norm, norm, 1e-5, gated, rounding]
    return [x, panels, scale, sums, bias, features, draw.randrange(14), 0.1, 0.9, *tail]


def attention(draw: Random) -> list[Any]:
    batch, heads, queries, keys, size = (
        draw.randint(1, 3),
        draw.choice([1, 2, 4]),
        *(draw.randint(1, 70) for _ in "qks"),
    )
    kv = draw.choice([each for each in (1, 2, 4) if heads % each == 0])
    mask = draw.choice([None, torch.rand(queries, keys), torch.rand(batch, 1, 1, keys) > 0.5])
    key, value = torch.randn(2, batch, kv, keys, size)
    return [torch.randn(batch, heads, queries, size), key, value, mask, 0.3, *(draw.random() < 0.5 for _ in "cr")]


def attention_merged(draw: Random) -> list[Any]:
    heads, rows = draw.choice([1, 2, 4]), draw.randint(1, 70)
    kv = draw.choice([each for each in (1, 2, 4) if heads % each == 0])
    merged = torch.randn(draw.randint(1, 3), rows, (heads + 2 * kv) * draw.randint(1, 33))
    mask = draw.choice([None, torch.rand(rows, rows)])
    return [merged, heads, kv, mask, 0.3, *(draw.random() < 0.5 for _ in "cr")]


def norm(draw: Random) -> list[Any]:
    size = draw.randint(1, 70)
    x, weight = torch.randn(draw.randint(1, 9), 3, size), torch.randn(size)
    return [x, torch.randn_like(x) if draw.random() < 0.5 else None, weight, weight, 1e-5, draw.choice([1, 2])]


def embedding_norm(draw: Random) -> list[Any]:
    count, size = draw.randint(1, 4), draw.randint(1, 40)
    ids = [torch.randint(5, draw.choice([(2, 7), (1, 7), (7,), (1, 1)])) for _ in range(count)]
    return [ids, [torch.randn(5, size) for _ in ids], torch.randn(size), None, 1e-5, draw.randrange(3)]


def conv(draw: Random) -> list[Any]:
    kernel, groups = [draw.randint(1, 3), draw.randint(1, 3)], draw.choice([1, 1, 2, 8, 17])
    channels, features = groups * draw.choice([1, 1, 3, 8]), groups * draw.choice([1, 1, 2, 5, 20])
    weight = torch.randn(features, channels // groups, *kernel)
    x = torch.randn(draw.randint(1, 2), channels, draw.randint(3, 12), draw.randint(3, 12))
    panels = pack_convolution(weight, groups)
    stride, dilation = ([draw.randint(1, 2), draw.randint(1, 2)] for _ in "sd")
    padding = [draw.randint(2, 3) for _ in range(4)]
    more: list[Any] = []
    if groups == 1 and draw.random() < 0.5:
        integers, scale = quantize(weight)
        panels, scale, sums = pack_bytes(integers.permute(0, 2, 3, 1).flatten(1), scale)
        more = [scale, sums, None]
    bias = torch.randn(features)
    return [x, panels, bias, features, kernel, stride, padding, dilation, groups, 1, 0.0, 0.0, None, *more]


def run(draw: Random) -> list[Any]:
    """A plan with every kind of step."""
    builder, (ids, image) = PlanBuilder(), (torch.randint(5, (2, 50)), torch.randn(1, 3, 9, 9))
    first, second = builder.input(ids), builder.input(image)
    value = builder.embedding_norm([first, first], [builder.weight(torch.randn(5, 32))] * 2, norm=Norm("layer", 1e-5))
    for kind in ("float", "int8"):
        packed = (pack(torch.randn(96, 32)),) if kind == "float" else pack_bytes(*quantize(torch.randn(96, 32)))
        panels, *integers = packed
        merged = builder.linear(value, panels, (None, *integers), features=96)
        rows = builder.attention(*merged.split(2, 2), scale=0.3, causal=draw.random() < 0.5, rounded=kind == "int8")
        value = builder.norm(rows, value, norm=Norm("rms", 1e-5))
    builder.output(builder.elementwise(value, value.narrow(1, 0, 1), "add", activation=Activation("gelu")))
    pixels = builder.conv(second, pack_convolution(torch.randn(8, 3, 3, 3)), window=Window((3, 3)), features=8)
    deep = pack_convolution(torch.randn(8, 1, 3, 3), groups=8)
    pixels = builder.conv(pixels, deep, window=Window((3, 3), padding=(1, 1, 1, 1)), features=8, groups=8)
    panels, *integers = pack_bytes(*quantize(torch.randn(8, 8)))
    pixels = builder.conv(pixels, panels, (None, *integers), window=Window((1, 1)), features=8)
    pixels = builder.group_norm(
        pixels, 4, weight=builder.weight(torch.randn(8)), eps=1e-5, activation=Activation("relu")
    )
    builder.output(builder.pool(pixels, window=Window((2, 2), padding=(1, 1, 0, 0)), largest=draw.random() < 0.5))
    larger = builder.pick(pixels, [row // 2 for row in range(14)], [0, 3, 3, 6])
    builder.output(builder.concatenate([larger.permute(0, 2, 3, 1), larger.permute(0, 2, 3, 1)], draw.randrange(4)))
    with patch("fxopt_cpu.operators.plan.LEAST_OF_BLOCK", 1):
        plan = builder.build()
    return [[ids, image], plan.weights, plan.steps]


VALID: dict[str, Callable[[Random], list[Any]]] = {
    each.__name__: each for each in (linear, attention, attention_merged, norm, embedding_norm, conv, run)
}


@pytest.mark.skipif(isa() is None, reason="the library was not built")
@pytest.mark.parametrize("name", [operator.name for operator in OPERATORS])
def test_operators_compute_or_refuse(name: str, draw: Random) -> None:
    operator = getattr(torch.ops.fxopt, name)

    def call() -> None:
        arguments = VALID[name](draw)
        for _ in range(draw.choice([0, 1, 1, 1, 2, 3])):
            at = draw.randrange(len(arguments))
            arguments[at] = changed(draw, arguments[at])
        operator(*arguments)

    assert repeated(call) > 20


def model() -> GraphModule:
    """A graph of every layer that an archive may hold numbers of, called with what they take."""
    tables = Graph()
    tables.output(tables.call_function(torch.arange, (tables.placeholder("n"),)))
    layers: dict[str, tuple[nn.Module, Any]] = {
        "panel": (PanelLinear(8, 6, activation=("hardtanh", 0.0, 6.0), norm=("layer", 1e-5)), (torch.randn(3, 8),)),
        "gated": (PanelLinear(8, 6, gated=True, norm=("rms", 1e-5), norm_weight=True), (torch.randn(3, 8),)),
        "integers": (PanelLinear(8, 6, integers=True, rounding=True), (torch.randn(3, 8),)),
        "rows": (RowAttention(0.3, causal=True), torch.randn(3, 1, 2, 5, 8)),
        "merged": (MergedAttention(2, 1, 0.3, causal=False), (torch.randn(1, 5, 32),)),
        "norm": (SumNorm(8, ("layer", 1e-5), weight=True), torch.randn(2, 3, 8)),
        "embedding": (EmbeddingNorm((5, 3), 8, ("layer", 1e-5)), torch.zeros(2, 1, 4).long()),
        "conv": (
            PackedConv2d(3, 4, (3, 3), stride=(2, 1), padding=((1, 1), (0, 1)), activation=("relu",)),
            (torch.randn(1, 3, 9, 9),),
        ),
        "pointwise": (PackedConv2d(3, 4, (1, 1)), (torch.randn(1, 3, 9, 9),)),
        "rounded": (QuantizedConv2d(3, 4, (3, 2), rounding=True), (torch.randn(1, 3, 9, 9),)),
        "sound": (QuantizedConv1d(3, 4, (1, 3), stride=(1, 2)), (torch.randn(1, 3, 9),)),
        "tables": (ShapeTables.of(tables, ["size"]), (5,)),
    }
    graph, root, results = Graph(), nn.Module(), []
    for name, (layer, inputs) in layers.items():
        root.add_module(name, layer)
        arguments = []
        for at, value in enumerate(inputs):
            if isinstance(value, Tensor):
                root.register_buffer(f"input_{name}_{at}", value)
                value = graph.get_attr(f"input_{name}_{at}")
            arguments.append(value)
        results.append(graph.call_module(name, tuple(arguments)))
    graph.output(tuple(results))
    return GraphModule(root.eval(), graph)


def numbers_in(data: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the places of numbers in data."""
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        if isinstance(value, (dict, list)):
            yield from numbers_in(value)
        elif type(value) is int:
            yield data, key


def test_archives_of_any_numbers_compute_or_are_refused(draw: Random) -> None:
    file = io.BytesIO()
    whole = model()
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.uniform_(-1, 1)
    save(whole, file)
    file.seek(0)
    load(file)  # the first load imports for more than a second
    with zipfile.ZipFile(file) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}

    def call() -> None:
        document = json.loads(entries["fxopt.json"])
        texts = [pair for row in document["modules"] for pair in row.get("attributes", ()) if pair[0] == "graph"]
        graphs = [json.loads(pair[1]) for pair in texts]
        rows = draw.choice([document["modules"], document["modules"], document["tensors"], graphs])
        places = list(numbers_in(rows))
        for _ in range(draw.choice([0, 1, 1, 1, 2])):
            holder, key = draw.choice(places)
            holder[key] = other_number(draw, holder[key])
        for pair, graph in zip(texts, graphs, strict=True):
            pair[1] = json.dumps(graph)
        changed = io.BytesIO()
        with zipfile.ZipFile(changed, "w") as archive:
            for name, content in {**entries, "fxopt.json": json.dumps(document).encode()}.items():
                archive.writestr(zipfile.ZipInfo(name), content)
        changed.seek(0)
        loaded = load(changed)
        for target in loaded.graph.nodes:  # by itself, so that one that refuses does not hide those after it
            if target.op == "call_module":
                inputs = [loaded.get_buffer(str(a.target)) if hasattr(a, "target") else a for a in target.args]
                with contextlib.suppress(RuntimeError, MemoryError, ValueError, TypeError, IndexError), torch.no_grad():
                    for _ in range(2):
                        loaded.get_submodule(str(target.target))(*inputs)

    assert repeated(call) > 5
