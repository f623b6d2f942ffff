"""`--dynamic`, and outputs that are folders."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command_runs import fxopt

from fxopt_capture.archive.files import load

ATTENTION = "command_models:attention"


def test_the_named_sizes_vary(folder: Path) -> None:
    fxopt("optimize", ATTENTION, "-p", "merge-linears", "-o", "out.fxopt", "--dynamic", "x=1")
    program, x = load("out.fxopt"), torch.zeros(2, 9, 8)
    assert program(x).shape == (2, 9, 4)
    with pytest.raises(Exception, match="has size 3 in dimension 0, where the graph was captured for 2"):
        program(x[:1].expand(3, 9, 8))
    again = fxopt("bench", "out.fxopt", "--dynamic", "x=0", code=2).stderr
    assert "out.fxopt is already a graph, with the sizes of its capture" in again


@pytest.mark.parametrize(
    ("value", "words", "code"),
    [
        ("x", "is not NAME=DIMENSION,...; expected, for example, pixel_values=0,2,3", 2),
        ("y=0", "dynamic_shapes names 'y', which is not among the tensor inputs", 4),
    ],
)
def test_what_cannot_be_had(value: str, words: str, code: int, folder: Path) -> None:
    said = fxopt("optimize", ATTENTION, "-o", "out.fxopt", "--dynamic", value, code=code).stderr
    assert words in " ".join(said.split())
    assert not list(folder.iterdir())


def test_a_folder_is_written_for_a_folder_alone() -> None:
    said = fxopt("optimize", ATTENTION, "-o", "out", code=3).stderr
    assert "names a folder, but command_models:attention is not a folder in Hugging Face format" in said
