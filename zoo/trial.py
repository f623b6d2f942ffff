"""Try one model: build, run, export, capture, compare, optimize, undo, save."""

from __future__ import annotations

import copy
import re
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt import (
    CaptureError,
    Inputs,
    NotReversibleError,
    capture,
    faithful_copy,
    history,
    load,
    registry,
    save,
    undo,
    verify,
)
from fxopt_core import kept
from fxopt_tools.verification.isolated_run import run_once
from zoo.variations import left_out, modalities, share_of_weights, variations

PIPELINES = ("inference", "cpu-inference")
Row: TypeAlias = dict[str, Any]
"""The row of one model: see `Trial`."""


@dataclass(frozen=True)
class Built:
    """A model with keyword inputs: an example, and others of other sizes."""

    model: nn.Module
    example: Mapping[str, Any]
    others: Sequence[Mapping[str, Any]] = ()


class Trial:
    """Fills the row of one model, and reports it after each step, so that a killed process leaves the last step.

    A row has `class`, `parameters`, `seconds` by step, `refused` (the step that ended the trial, with its reason),
    `modalities` of the inputs and those `left_out`, `weights` (the share that changes the outputs), `sizes` (what other
    inputs gave) with what was `varied` in them, `problems` (what is wrong, by step) and `refusals` of passes by reason.
    A trial that is not `thorough` neither saves nor exports what was captured. `unsaved` is why a file cannot hold it,
    and `uncached` is there if the graph makes no cache where the model does.
    """

    def __init__(self, name: str, report: Callable[[Row], None], *, thorough: bool = True) -> None:
        self.thorough = thorough
        self.row: Row = {"name": name, "seconds": {}, "problems": {}}
        self._report = report

    def run(self, build: Callable[[], Built]) -> Row:
        """Try all steps; the row has their outcomes."""
        with self._step("build"):
            built = build()
            self.row["class"] = type(built.model).__name__
            self.row["parameters"] = sum(parameter.numel() for parameter in built.model.parameters())
            self.row["modalities"] = modalities(built.example)
            self.row["left_out"] = left_out(built.model, built.example)
            self.row["weights"] = share_of_weights(built.model, built.example)
            others = variations(built.example, built.others)
        if "refused" in self.row:
            return self.row
        before = fingerprint(built.model)
        with self._step("capture"):
            captured = capture(built.model, kwargs=dict(built.example))
        if fingerprint(built.model) != before:
            self.row["problems"]["capture"] = "the caller's model was changed: " + changes(built.model, before)
        if "refused" in self.row:
            with self._step("export"):
                export_alone(built)
            return self.row
        if makes_no_cache(built.model, captured):  # of which `capture` warns
            self.row["uncached"] = True
            built = replace(built, example={**built.example, "use_cache": False})
            others = [(kind, {**inputs, "use_cache": False}) for kind, inputs in others]
        self.row["nodes"] = len(captured.graph.nodes)
        self._sizes(built, captured, others)
        for pipeline in PIPELINES:
            self._optimize(built, captured, pipeline, others)
        if self.thorough:
            with self._problem("save"):
                save_and_load(built, captured)
        if fingerprint(built.model) != before:
            self.row["problems"].setdefault(
                "capture", "the caller's model was changed: " + changes(built.model, before)
            )
        if self.thorough:
            with self._step("export"):
                export_alone(built)
        return self.row

    def _sizes(self, built: Built, captured: GraphModule, others: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
        self.row["varied"], self.row["sizes"] = [kind for kind, _ in others], ["wrong"] * len(others)
        for number, (_, inputs) in enumerate(others):
            with self._problem("sizes"):
                self.row["sizes"][number] = at_size(built.model, captured, inputs)

    def _optimize(
        self,
        built: Built,
        captured: GraphModule,
        pipeline: str,
        others: Sequence[tuple[str, Mapping[str, Any]]],
    ) -> None:
        with self._problem(pipeline):
            optimized = registry().pipeline(pipeline)(faithful_copy(captured))
            same(built.model, optimized, built.example)
            counts = self.row.setdefault("refusals", {})
            for record in history(optimized):
                for reason, number in Counter(refusal.reason for refusal in record.refusals).items():
                    key = f"{record.pass_name}: {reason}"
                    counts[key] = max(counts.get(key, 0), number)
            sites = sum(len(record.rewrites) for record in history(optimized))
            self.row.setdefault("sites", {})[pipeline] = sites
            for (kind, inputs), found in zip(others, self.row["sizes"], strict=True):
                if found == "equal" and at_size(built.model, optimized, inputs) != found:
                    raise AssertionError(f"{pipeline} refuses {kind} that the graph takes")
            with self._problem(f"undo {pipeline}"):
                self.row.setdefault("undone", {})[pipeline] = is_undone(optimized, captured)

    def _step(self, step: str) -> AbstractContextManager[None]:
        """A step that ends the trial where it fails."""

        def refuse(error: Exception) -> None:
            if step == "export":
                self.row["export"] = reason_of(error)
            else:
                self.row["refused"] = [step, type(error).__name__, reason_of(error)]

        return self._timed(step, refuse)

    def _problem(self, step: str) -> AbstractContextManager[None]:
        """A step whose failure is a mistake of ours, except that a file may say what it cannot hold."""

        def note(error: Exception) -> None:
            if step == "save" and isinstance(error, CaptureError):
                self.row["unsaved"] = reason_of(error)
            else:
                self.row["problems"][step] = f"{type(error).__name__}: {reason_of(error)}"

        return self._timed(step, note)

    @contextmanager
    def _timed(self, step: str, failed: Callable[[Exception], None]) -> Iterator[None]:
        """Report that a step is running, and then its outcome and its seconds."""
        self._report({**self.row, "running": step})
        start = time.perf_counter()
        try:
            yield
        except Exception as error:  # whatever a model, torch or a pass raises
            failed(error)
        if not step.startswith("undo"):
            self.row["seconds"][step] = round(time.perf_counter() - start + self.row["seconds"].get(step, 0), 2)
        self._report(self.row)


def makes_no_cache(model: nn.Module, captured: GraphModule) -> bool:
    """Return whether a model makes a cache that its graph does not make, since it could not be captured with one."""
    binding: Any = captured._input_binding
    chosen = getattr(getattr(model, "config", None), "use_cache", False)
    return bool(chosen) and "use_cache" in binding.form.implied and not binding.form.fixed["use_cache"]


def reason_of(error: BaseException) -> str:
    """Return the first meaningful line of an error, without the place where the libraries are installed."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return re.sub(r"\S*/site-packages/", "", lines[0] if lines else type(error).__name__)[:300]


def same(model: nn.Module, other: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Raise what `verify` raises where two models differ on inputs; notes of the model about calls are removed."""
    with kept(model):
        verify(model, other, Inputs(**inputs)).raise_if_failed()


def at_size(model: nn.Module, captured: GraphModule, inputs: Mapping[str, Any]) -> str:
    """Say what a graph does at another size: `equal`, `refused`, or `model` where the model takes no such size."""
    try:
        run_once(model, Inputs(**inputs))  # on copies of caches and of statistics, to which models add in place
    except Exception:  # whatever the model raises
        return "model"
    try:
        run_once(captured, Inputs(**inputs))
    except CaptureError:
        return "refused"
    same(model, captured, inputs)
    return "equal"


def export_alone(built: Built) -> None:
    """Export a model as its owner would: without options, and without a cache where it cannot be exported with one."""
    try:
        torch.export.export(built.model, (), copy.deepcopy(dict(built.example)))
    except Exception:  # whatever torch raises
        if not hasattr(built.model, "config"):
            raise
        torch.export.export(built.model, (), {**copy.deepcopy(dict(built.example)), "use_cache": False})


def is_undone(optimized: GraphModule, captured: GraphModule) -> bool:
    """Undo a run and compare code, keys and values, bit for bit; False where one of its passes gave up undo."""
    try:
        undone = undo(optimized)
    except NotReversibleError:
        return False
    if undone.code != captured.code:
        raise AssertionError("undo left other code")
    left, right = undone.state_dict(), captured.state_dict()
    if list(left) != list(right):
        raise AssertionError("undo left other keys")
    for name, value in left.items():
        if isinstance(value, Tensor) and not torch.equal(value.nan_to_num(), right[name].nan_to_num()):
            raise AssertionError(f"undo left other values in {name}")
    return True


def save_and_load(built: Built, captured: GraphModule) -> None:
    """Save a captured model, and compare what is loaded with the model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.fxopt")
        save(captured, path)
        same(built.model, load(path), built.example)


Fingerprint: TypeAlias = dict[str, object]


def fingerprint(model: nn.Module) -> Fingerprint:
    """Return the parts of a model: weights, buffers, modes, hooks, attributes, the configuration with its parts."""
    found: Fingerprint = {}
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            place = f"{name}.{key}"
            if isinstance(value, Tensor):
                found[place] = (id(value), value._version)
            elif key in ("_parameters", "_buffers"):
                for part, tensor in value.items():
                    found[f"{place}.{part}"] = (id(tensor), getattr(tensor, "_version", 0))
            elif isinstance(value, dict):
                found[place] = [(each, id(part)) for each, part in value.items()]
            elif hasattr(value, "to_dict") and hasattr(value, "model_type"):
                found[place] = f"{id(value)} {plain(value)}"
            else:
                found[place] = repr(value) if isinstance(value, int | float | str | bool | tuple) else id(value)
    return found


def plain(config: Any) -> str:
    """Return the text of a configuration, private fields and parts included."""
    return str({key: plain(value) if hasattr(value, "model_type") else value for key, value in vars(config).items()})


def changes(model: nn.Module, before: Fingerprint) -> str:
    """Return the names of what differs from before."""
    after = fingerprint(model)
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    return ", ".join(names[:5])
