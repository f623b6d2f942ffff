"""The zoo: its models go through the same functions here, its page is that of its file, and nothing in it is wrong."""

from __future__ import annotations

import json
import os
import signal
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from zoo import own, results, subjects
from zoo.page import PAGE, page
from zoo.processes import apart
from zoo.results import LIMIT, outcome, read, read_known, worse, write
from zoo.trial import Built, Row, Trial

KNOWN = {"transformers": 2, "timm": 2, "heads": 2}
BASES = "albert bart bert convnext deberta-v2 distilbert gpt_neo mistral opt qwen3 roberta"
NIGHTLY = [*(f"transformers/{name}" for name in BASES.split()), "heads/LlamaForCausalLM+decode", "timm/convnext"]


def tried(name: str, build: Callable[[], Built], *, thorough: bool = False) -> Row:
    reported: list[str] = []
    trial = Trial(name, lambda row: reported.append(json.dumps(row)), thorough=thorough)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        row = trial.run(build)
    assert json.loads(reported[-1]) == row
    return row


@pytest.mark.nightly
@pytest.mark.parametrize("name", NIGHTLY)
def test_models_of_the_zoo_are_as_the_file_says(name: str, request: pytest.FixtureRequest) -> None:
    pytest.importorskip("transformers", minversion="5")
    if name.startswith("timm/"):
        request.getfixturevalue("timm")
    row = tried(name, lambda: subjects.build(name))
    assert outcome(row) == "captured", row
    assert "equal" in row["sizes"]
    assert not worse(read(), [row])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["transformers/moonshine_streaming", "transformers/kosmos-2"])
def test_models_are_built_of_what_they_miss_and_of_words_of_their_own(name: str) -> None:
    pytest.importorskip("transformers", minversion="5")
    built = subjects.build(name)  # the first lacks a field, the second takes as many ones in a mask as its images need
    assert sum(parameter.numel() for parameter in built.model.parameters()) < 1_000_000
    assert [next(iter(inputs.values())).shape[0] for inputs in (built.example, *built.others)] == [2, 3, 1]
    words = {name.partition("/")[2].partition("+")[0] for name in subjects.names()}
    assert {*own.FIELDS, *own.INPUTS} <= words


class Steps(nn.Module):
    """Does what it is told to at each call."""

    def __init__(self, does: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.does, self.linear = does, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, self.linear(x))


def test_a_trial_says_what_is_wrong_and_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = {"x": torch.randn(2, 4)}

    def by_value(model: nn.Module, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x

    row = tried("branch", lambda: Built(Steps(by_value).eval(), x))
    assert outcome(row) == "refused"
    assert row["refused"][:2] == ["capture", "CaptureError"]
    assert not results.exportable(row)

    def broken() -> Built:
        raise ValueError("no size\nmore")

    row = tried("broken", broken)
    assert (outcome(row), row["refused"]) == ("not built", ["build", "ValueError", "no size"])

    def relu(model: nn.Module, x: Tensor) -> Tensor:
        return x.relu()

    def undo_wrongly(graph_module: GraphModule) -> GraphModule:
        with torch.no_grad():
            next(graph_module.parameters()).add_(1)
        return graph_module

    monkeypatch.setattr("zoo.trial.undo", undo_wrongly)
    row = tried("wrong", lambda: Built(Steps(relu).eval(), x, [{"x": torch.randn(3, 4)}, {"x": torch.randn(3, 5)}]))
    assert outcome(row) == "wrong"
    assert (row["varied"], row["sizes"]) == (["batches", "lengths"], ["equal", "model"])
    assert "undo left other" in row["problems"]["undo inference"]
    assert (row["modalities"], row["left_out"], row["weights"]) == (["images"], [], 1.0)


class Seeing(nn.Module):
    """Takes text and images of any size, and has a weight that it does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.conv, self.unread = nn.Embedding(9, 2), nn.Conv2d(3, 2, 3), nn.Linear(4, 5)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, pixel_values: Tensor | None = None) -> Tensor:
        text: Tensor = (self.table(input_ids) * attention_mask[..., None]).sum(1)
        return text if pixel_values is None else text + self.conv(pixel_values).mean((2, 3))


def test_sizes_masks_and_images_are_varied_and_what_is_left_out_is_said() -> None:
    text = {"input_ids": torch.tensor([[1, 2, 3]] * 2), "attention_mask": torch.tensor([[1, 1, 0]] * 2)}
    seen = {**text, "pixel_values": torch.randn(2, 3, 40, 40)}
    row = tried("seeing", lambda: Built(Seeing().eval(), seen))
    assert (row["modalities"], row["left_out"]) == (["text", "images"], [])
    assert dict(zip(row["varied"], row["sizes"], strict=True)) == {"images": "equal", "masks": "equal"}
    assert row["weights"] == round((18 + 56) / (18 + 56 + 25), 3)
    blind = tried("blind", lambda: Built(Seeing().eval(), text))
    assert (blind["modalities"], blind["left_out"], blind["varied"]) == (["text"], ["images"], ["masks"])
    shown = page({row["name"]: {**row, "since": ""} for row in ({**blind, "name": "timm/blind"},)}, KNOWN)
    assert "Tried without the images or sounds that they take: `timm/blind`." in shown


def test_an_optimized_graph_is_compared_at_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[GraphModule] = []

    def refuse(model: nn.Module, captured: GraphModule, inputs: object) -> str:
        compared.append(captured)
        return "equal" if len(compared) == 1 else "refused"

    monkeypatch.setattr("zoo.trial.at_size", refuse)
    x = torch.randn(2, 4)
    row = tried("sizes", lambda: Built(Steps(lambda model, x: x.relu()).eval(), {"x": x}, [{"x": x[:1]}]))
    assert row["problems"]["inference"] == "AssertionError: inference refuses batches that the graph takes"


@pytest.mark.nightly
def test_a_child_ends_with_its_time_and_leaves_what_it_has_reported() -> None:
    def slow(report: Callable[[Row], None]) -> None:
        report({"name": "slow", "problems": {}, "running": "save"})
        time.sleep(60)

    start = time.monotonic()
    assert apart(slow, 5) == {"name": "slow", "problems": {"save": LIMIT}}
    assert time.monotonic() - start < 20

    def crashing(report: Callable[[Row], None]) -> None:
        report({"name": "quick", "problems": {}, "running": "capture"})
        os.kill(os.getpid(), signal.SIGTERM)

    assert apart(crashing, 20)["refused"] == ["capture", "crash", "crashed with SIGTERM"]


def test_what_got_worse_is_named(tmp_path: Path) -> None:
    good = {"name": "transformers/a", "seconds": {}, "problems": {}, "sizes": ["equal", "equal"]}
    refused = {**good, "refused": ["capture", "CaptureError", "no graph"]}
    file = tmp_path / "zoo.json"
    write([good], KNOWN, file)
    stored = read(file)
    assert worse(stored, [good]) == []
    assert worse(stored, [refused]) == ["transformers/a: capture CaptureError no graph"]
    assert worse(stored, [{**good, "problems": {"save": "other values"}}]) == ["transformers/a: save: other values"]
    assert worse(stored, [{**good, "sizes": ["equal", "refused"]}])[0].startswith("transformers/a: other sizes")
    assert worse({"transformers/a": refused}, [good]) == []
    stored["transformers/a"]["since"] = "2020-01-01"
    file.write_text(json.dumps({"known": KNOWN, "models": list(stored.values())}), encoding="utf-8")
    write([{**good, "nodes": 3}, {**refused, "name": "timm/b"}], KNOWN, file)
    assert (read(file)["transformers/a"]["since"], read(file)["transformers/a"]["nodes"]) == ("2020-01-01", 3)
    assert "| `b` | refused | capture CaptureError no graph |" in page(read(file), KNOWN)


def test_the_page_is_that_of_the_file_and_nothing_in_it_is_wrong_or_without_an_end() -> None:
    rows = read()
    assert PAGE.read_text(encoding="utf-8") == page(rows, read_known())
    assert [name for name, row in rows.items() if outcome(row) == "wrong" or row["problems"]] == []
