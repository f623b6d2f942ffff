"""Convolutional models in 8-bit integers, beside onnxruntime's and OpenVINO's, each in a process of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxopt
from benchmarks.apart import Make, Ready, rounds_apart
from benchmarks.models import CONVOLUTIONAL, SMALL
from benchmarks.peers import peer
from benchmarks.runners import onnx_session, openvino_request
from benchmarks.suite import Absent, Cell, Measured, Row, Settings, Table

TEXT = """One call for one image. {note} Static ranges are those of {calibration} drawn images. Over {tried} other \
ones: the cosine of the results with those of eager in float32, how often the first class is eager's, and how many of \
eager's five first classes are among the five first. Only EfficientNet-Lite0 has trained weights; with drawn weights, \
classes lie so close together that their order says little. Values whose quartiles are more than 15 % apart are not \
shown."""
CALIBRATION, TRIED = 32, 64
MODELS = ("EfficientNet-Lite0", "ResNet-50", "MobileNetV2", "ResNet-18")


def tables(settings: Settings) -> Iterator[Table]:
    """A table for each model, with one thread, and with the number that is set."""
    names = tuple(SMALL) if settings.quick else MODELS
    for threads in sorted({1, settings.threads}):
        given = replace(settings, threads=threads)
        for name in names:
            title = f"{name}, int8, {threads} threads" if threads > 1 else f"{name}, int8"
            if title in settings.known:
                yield settings.known[title]
            elif settings.wants(title):
                print(f"{title}: {given.note}", file=sys.stderr, flush=True)
                text = TEXT.format(note=given.note, calibration=CALIBRATION, tried=TRIED)
                columns = ("", "1 call", "times eager", "cosine", "first class", "of five")
                yield Table(title, columns, tuple(rows(name, given)), text)


def rows(name: str, settings: Settings) -> Iterator[Row]:
    """Measure a model in all ways, a row for each."""
    makes: dict[str, Make] = {way: partial(made, name, way) for way in WAYS}
    found = rounds_apart(makes, settings)
    plain = found["eager"]
    for way, each in found.items():
        if isinstance(each, Absent) or isinstance(plain, Absent):
            yield Row(way, (each, "", "", "", "") if isinstance(each, Absent) else ("", "", "", "", ""))
            continue
        speed: Cell = each.ratio(plain).steady()
        notes = (each.note[key] for key in ("cosine", "first", "five"))
        yield Row(way, (Measured.of(each.seconds).steady(), speed, *notes))


def images(count: int, size: tuple[int, ...], seed: int) -> Tensor:
    """Return generated images with large and small structures."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, size[1], 9, 9, generator=generator)
    return F.interpolate(coarse, size[2:], mode="bicubic") + torch.randn(count, *size[1:], generator=generator) / 4


def made(name: str, way: str) -> Ready | Absent:
    """Prepare a model in one way, and compare its results."""
    subject = {**CONVOLUTIONAL, **SMALL}[name]()
    if isinstance(subject, Absent):
        return subject
    model, x = subject
    seen, tried = images(CALIBRATION, tuple(x.shape), 1), images(TRIED, tuple(x.shape), 2)
    try:
        call = WAYS[way](model, x, list(seen.chunk(len(seen))))
    except ModuleNotFoundError as error:
        return Absent(str(error))
    with torch.no_grad():
        wanted = torch.cat([model(each).flatten(1) for each in tried.chunk(len(tried))])
        found = torch.cat([torch.as_tensor(call(each)).flatten(1) for each in tried.chunk(len(tried))])
    five = [set(one.tolist()) & set(other.tolist()) for one, other in zip(_five(wanted), _five(found), strict=True)]
    note = {
        "cosine": f"{F.cosine_similarity(wanted, found).mean():.4f}",
        "first": f"{(wanted.argmax(1) == found.argmax(1)).float().mean():.0%}",
        "five": f"{sum(map(len, five)) / len(five):.2f}",
    }
    return Ready(partial(call, x), note)


def _five(results: Tensor) -> Tensor:
    return results.topk(min(5, results.shape[1]), 1).indices


Call = Callable[[Tensor], Any]


def by_pipeline(pipeline: str, model: nn.Module, x: Tensor, seen: list[Tensor]) -> Call:
    """The model after a pipeline."""
    calibrate = partial(_calls, seen) if pipeline.endswith("static") else None
    return fxopt.optimize(model, (x,), pipeline=pipeline, calibrate=calibrate, verify=False)


def _calls(seen: list[Tensor], stand_in: Any) -> None:
    for each in seen:
        stand_in(each)


def by_onnxruntime(model: nn.Module, x: Tensor, seen: list[Tensor], *, int8: bool = True) -> Call:
    """The model in onnxruntime, quantized by its tool with a scale for each channel."""
    session = onnx_session(model, (x,), changed=partial(_quantized, seen) if int8 else lambda path: path)
    (given,) = session.get_inputs()
    return lambda each: session.run(None, {given.name: each.numpy()})[0]


def _quantized(seen: list[Tensor], path: Path) -> Path:
    quantization, onnx = import_module("onnxruntime.quantization"), import_module("onnx")
    name = onnx.load(path).graph.input[0].name

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc, name-defined]  # untyped
        def __init__(self) -> None:
            self.left = list(seen)

        def get_next(self) -> dict[str, Any] | None:
            return {name: self.left.pop().numpy()} if self.left else None

    prepared, target = path.with_name("prepared.onnx"), path.with_name("int8.onnx")
    import_module("onnxruntime.quantization.shape_inference").quant_pre_process(path, prepared)
    quantization.quantize_static(prepared, target, Reader(), per_channel=True)
    return target


def by_openvino(model: nn.Module, x: Tensor, seen: list[Tensor], *, int8: bool = True) -> Call:
    """The model in OpenVINO, quantized by nncf."""

    def changed(found: Any) -> Any:
        nncf = peer("nncf")
        if isinstance(nncf, Absent):
            raise ModuleNotFoundError(nncf.reason)
        given = nncf.Dataset([each.numpy() for each in seen])
        return nncf.quantize(found, given, subset_size=len(seen))

    request = openvino_request(model, (x,), changed=changed if int8 else lambda found: found)
    return lambda each: request.infer([each.numpy()], share_inputs=True)[0].copy()


WAYS: Mapping[str, Callable[[nn.Module, Tensor, list[Tensor]], Call]] = {
    "eager": lambda model, x, seen: model,
    "fxopt, cpu-inference": partial(by_pipeline, "cpu-inference"),
    "onnxruntime": partial(by_onnxruntime, int8=False),
    "OpenVINO": partial(by_openvino, int8=False),
    "fxopt, cpu-inference-int8": partial(by_pipeline, "cpu-inference-int8"),
    "fxopt, cpu-inference-int8-static": partial(by_pipeline, "cpu-inference-int8-static"),
    "onnxruntime, int8": by_onnxruntime,
    "OpenVINO, int8": by_openvino,
}
