"""`--dtype`, `--device`, `--dynamic`, and outputs that are folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_runs import fxopt, fxopt_json

from fxopt_capture.archive.files import load

ATTENTION = "command_models:attention"


def test_the_model_and_its_inputs_have_the_dtype_and_the_named_sizes_vary(folder: Path) -> None:
    wanted = ("--dtype", "float64", "--device", "cpu", "--dynamic", "x=1")
    data = fxopt_json("optimize", ATTENTION, "-p", "merge-linears", "-o", "out.fxopt", *wanted)
    assert [output["dtype"] for output in data["verification"]["outputs"]] == ["float64"]
    program = load("out.fxopt")
    assert next(program.parameters()).element_size() == 8
    x = torch.zeros(2, 9, 8, dtype=torch.float64)
    assert program(x).shape == (2, 9, 4)
    with pytest.raises(Exception, match="has size 3 in dimension 0, where the graph was captured for 2"):
        program(x[:1].expand(3, 9, 8))
    again = fxopt("bench", "out.fxopt", "--dtype", "float32", code=2).stderr
    assert "out.fxopt is already a graph, with the dtype, device and dynamic sizes of its capture" in again


@pytest.mark.parametrize(
    ("option", "value", "words", "code"),
    [
        ("--dtype", "int8", "is not one of", 2),
        ("--device", "nowhere", "--device nowhere cannot be used here", 2),
        ("--device", "meta", "has no values to optimize", 2),
        ("--dynamic", "x", "is not NAME=DIMENSION,...; expected, for example, pixel_values=0,2,3", 2),
        ("--dynamic", "y=0", "dynamic_shapes names 'y', which is not among the tensor inputs", 4),
    ],
)
def test_what_cannot_be_had(option: str, value: str, words: str, code: int, folder: Path) -> None:
    assert words in " ".join(fxopt("optimize", ATTENTION, "-o", "out.fxopt", option, value, code=code).stderr.split())
    assert not list(folder.iterdir())


def test_a_folder_is_written_for_a_folder_alone() -> None:
    said = fxopt("optimize", ATTENTION, "-o", "out", code=3).stderr
    assert "names a folder, but command_models:attention is not a folder in Hugging Face format" in said
