"""The command on folders in Hugging Face format, and on inputs in safetensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_runs import fxopt_json as fxopt

transformers = pytest.importorskip("transformers")
safetensors = pytest.importorskip("safetensors.torch")
pytestmark = pytest.mark.filterwarnings("ignore")

SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small BERT, as `save_pretrained` writes it."""
    torch.manual_seed(0)
    transformers.BertModel(transformers.BertConfig(**SIZES)).save_pretrained(tmp_path / "bert")
    return tmp_path / "bert"


def test_the_class_that_the_folder_names_and_inputs_in_safetensors(tmp_path: Path) -> None:
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, num_labels=4))
    model.save_pretrained(tmp_path / "classifier")
    inputs = {"input_ids": torch.randint(64, (3, 7)), "attention_mask": torch.ones(3, 7, dtype=torch.int64)}
    safetensors.save_file(inputs, tmp_path / "inputs.safetensors")
    arguments = ("-o", tmp_path / "out.fxopt", "--inputs", tmp_path / "inputs.safetensors")
    data = fxopt("optimize", tmp_path / "classifier", *arguments)
    assert [output["shape"] for output in data["verification"]["outputs"]] == [[3, 4]]


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"model_type": "bert"', "transformers cannot load"),
        ('{"model_type": "no-such-model"}', "no-such-model"),
        ('{"model_type": "mine", "auto_map": {"AutoModel": "code.Mine"}}', "by a factory"),
        (None, "transformers cannot load"),  # without weights
    ],
)
def test_folders_that_cannot_be_loaded(config: str | None, words: str, folder: Path, tmp_path: Path) -> None:
    if config is None:
        (folder / "model.safetensors").unlink()
    else:
        (folder / "config.json").write_text(config)
    (folder / "code.py").write_text("raise AssertionError('the code of the folder runs')\n")
    error = fxopt("optimize", folder, "-o", tmp_path / "out.fxopt", code=3)["error"]
    assert words in error["message"]


@pytest.mark.nightly  # by day, README's commands write a report of a text model
def test_a_report_of_a_published_cnn(tmp_path: Path) -> None:
    torch.save((torch.randn(2, 3, 64, 64),), tmp_path / "images.pt")
    out, page = tmp_path / "fast.fxopt", tmp_path / "fast.html"
    arguments = ("-o", out, "--report", page, "--inputs", tmp_path / "images.pt")
    data = fxopt("optimize", "published_weights:efficientnet", *arguments)
    assert (data["output"], data["report"]) == (str(out), str(page))
    assert "PackedConv2d" in page.read_text(encoding="utf-8")
