"""Whether plans pay: `cpu-inference` as it is and without them, beside engines, each in a process of its own."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import nn

import fxopt
from benchmarks import varied
from benchmarks.apart import Make, Ready, Timed, rounds_apart
from benchmarks.runners import onnxruntime_call, openvino_call
from benchmarks.suite import Absent, Cell, Measured, Row, Settings, Table

TEXT = """One call in float32. {note} `layers only` is `cpu-inference` without `plan-regions`. Each cell has a process \
of its own, and is verified before it is timed. onnxruntime and OpenVINO read torch's ONNX export, and compute in \
float32. Speeds are times as fast as eager; a value whose quartiles are more than 15 % of it apart is not shown. The \
last column says where plans have less than {least:g} times the speed of the layers."""
PLANS, LAYERS = "default", "layers only"
LEAST = 0.97


def tables(settings: Settings) -> Iterator[Table]:
    """A table for each kind of model, with one thread, and with the number that is set."""
    ways = ways_of(fxopt.registry().pipelines()["cpu-inference"])
    for threads in sorted({1, settings.threads}):
        given = replace(settings, threads=threads)
        for kind, makers in (varied.QUICK if settings.quick else varied.PLANS).items():
            title = f"{kind}, {threads} threads" if threads > 1 else kind
            labels = [label for label in makers if settings.wants(f"{label}, {title}")]
            if title in settings.known:
                yield settings.known[title]
            elif labels:
                text = TEXT.format(note=given.note, least=LEAST)
                columns = ("", "eager, 1 call", *ways, *ENGINES, "plans", "plans are slower")
                yield Table(title, columns, tuple(rows(labels, ways, given)), text)


def ways_of(pipeline: str) -> dict[str, str]:
    """Return the pipeline, and the same without plans.

    >>> ways_of("fuse-linears,plan-regions")
    {'default': 'fuse-linears,plan-regions', 'layers only': 'fuse-linears'}
    """
    passes = re.split(r",(?![^{]*\})", pipeline)
    return {PLANS: pipeline, LAYERS: ",".join(text for text in passes if text != "plan-regions")}


def rows(labels: Iterable[str], ways: Mapping[str, str], settings: Settings) -> Iterator[Row]:
    """Measure models in all ways, a row for each."""
    for label in labels:
        found = measured(label, ways, settings, ENGINES)
        default = found["default"]
        regions = default.note["regions"] if isinstance(default, Timed) else ""
        yield Row(label, (*cells(found), regions, slower(found)))


def measured(
    label: str, ways: Mapping[str, str], settings: Settings, engines: Iterable[str] = ()
) -> dict[str, Timed | Absent]:
    """Measure a model in eager mode, after some pipelines, and in other engines."""
    print(f"{label}: {settings.note}", file=sys.stderr, flush=True)
    makes: dict[str, Make] = {"eager": partial(eager, label)}
    makes |= {way: partial(optimized, label, pipeline) for way, pipeline in ways.items()}
    makes |= {engine: partial(exported, label, engine) for engine in engines}
    return rounds_apart(makes, settings)


def eager(label: str) -> Ready | Absent:
    """The model as it is."""
    given = varied.made(label)
    return given if isinstance(given, Absent) else Ready(partial(given[0], *given[1]), {})


def optimized(label: str, pipeline: str) -> Ready | Absent:
    """The model after a pipeline, if it computes what the model does."""
    given = varied.made(label)
    if isinstance(given, Absent):
        return given
    model, args = given
    found = fxopt.optimize(model, args, pipeline=pipeline, verify=False)
    if not fxopt.verify(model, found, args):
        return Absent("wrong results")
    counts = {record.pass_name: len(record.rewrites) for record in fxopt.history(found)}
    return Ready(partial(found, *args), {"regions": str(counts.get("plan-regions", 0))})


def exported(label: str, engine: str) -> Ready | Absent:
    """The model in another engine, if it computes what the model does."""
    given = varied.made(label)
    if isinstance(given, Absent):
        return given
    model, args = given
    prepared = ENGINES[engine](model, args)
    expected = model(*args)
    first = next(iter(expected.values())) if isinstance(expected, dict) else expected
    first = first if isinstance(first, torch.Tensor) else first[0]
    if not torch.allclose(prepared(), first, rtol=1e-2, atol=1e-2 * float(first.abs().max())):
        return Absent("wrong results")
    return Ready(prepared, {})


ENGINES: Mapping[str, Callable[[nn.Module, tuple[torch.Tensor, ...]], Callable[[], torch.Tensor]]] = {
    "onnxruntime": onnxruntime_call,
    "OpenVINO": openvino_call,
}


def cells(found: Mapping[str, Timed | Absent]) -> tuple[Cell, ...]:
    """The seconds of eager, and the speeds of the others."""
    eagerly, *others = found.values()
    if isinstance(eagerly, Absent):
        return (eagerly,) * len(found)
    speeds = (each if isinstance(each, Absent) else each.ratio(eagerly).steady() for each in others)
    return (Measured.of(eagerly.seconds).steady(), *speeds)


def slower(found: Mapping[str, Timed | Absent]) -> Cell:
    """Return the speed of plans relative to that of the layers, if it is too low; else nothing."""
    plans, layers = found[PLANS], found[LAYERS]
    if isinstance(plans, Absent) or isinstance(layers, Absent):
        return "not known"
    ratio = plans.ratio(layers).steady()
    if isinstance(ratio, Absent):
        return "not known"
    return f"{ratio.median:.2f}" if ratio.median < LEAST else ""
