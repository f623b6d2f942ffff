"""SOURCE and inputs that are missing, wrong, or of every kind that is right."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from command_models import attention
from command_runs import fxopt
from torch import Tensor, nn

from fxopt.commands.models.inputs import drawn
from fxopt_capture.archive.files import load, save
from fxopt_capture.capture import capture
from fxopt_tools.inputs import Inputs

FLAG = "--trusted"


def failure(source: object, *, code: int = 3) -> str:
    """Return what `optimize` says of a source."""
    return fxopt("optimize", source, "-o", "out.fxopt", code=code).stderr


class Marker:
    """Leaves a file behind where it is unpickled."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, ("unpickled",)


@pytest.mark.usefixtures("folder")
def test_a_model_in_training_mode_is_refused_where_that_changes_it(folder: Path) -> None:
    (folder / "dropping.py").write_text(
        "from torch import nn, ones\ndef make(): return nn.Sequential(nn.Linear(2, 2), nn.Dropout()), (ones(2, 2),)"
    )
    said = failure("dropping:make")
    assert "the model of dropping:make is in training mode: every call draws anew in dropout " in said


@pytest.mark.usefixtures("folder")
class TestFiles:
    def test_an_archive_that_is_cut_off(self, folder: Path) -> None:
        save(capture(*attention()), "whole.fxopt")
        content = Path("whole.fxopt").read_bytes()
        Path("half.fxopt").write_bytes(content[: len(content) // 2])
        assert "cut off or damaged" in failure("half.fxopt")
        assert not Path("out.fxopt").exists()

    def test_pickles_are_not_opened(self) -> None:
        torch.save({"weight": Marker()}, "weights.pt")
        assert "If torch.save wrote it, name a function that loads the model" in failure("weights.pt")
        assert not Path("unpickled").exists()


@pytest.mark.usefixtures("folder")
class TestFactories:
    def test_one_that_raises_shows_its_own_traceback_briefly(self) -> None:
        message = failure("command_models:raises")
        assert "the factory command_models:raises raised:" in message
        assert "ValueError: no weights in weights.bin" in message
        assert "in _broken" in message
        assert "importlib" not in message
        assert "factories.py" not in message
        assert len(message.splitlines()) < 12

    def test_one_that_ends_the_process(self) -> None:
        assert "the factory wants out" in failure("command_models:leaves")

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("command_models:nothing_like_it", "has no attribute 'nothing_like_it'"),
            ("command_models:NOT_A_FACTORY", "is an int, expected a function"),
            ("command_models:number", "returned an int; expected a model, or (model, args)"),
            ("command_models:model_and_tensor", "args as Tensor"),
            ("no_such_module:make", "No module named 'no_such_module'"),
            ("command_models.sub:make", "No module named 'command_models.sub'"),
            ("command_models:seeded", "comes without inputs"),
        ],
    )
    def test_wrong_ones(self, name: str, words: str) -> None:
        assert words in failure(name)

    def test_a_module_of_the_current_folder(self, folder: Path) -> None:
        (folder / "made_here.py").write_text("from command_models import attention as make\n")
        fxopt("optimize", "made_here:make", "-p", "merge-linears", "-o", "out.fxopt")

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("import no_such_dependency", "No module named 'no_such_dependency'"),
            ("1 / 0", "ZeroDivisionError"),
            ("def (", "SyntaxError"),
            ("raise SystemExit(3)", "SystemExit"),
        ],
    )
    def test_a_module_that_cannot_be_imported(self, text: str, words: str, folder: Path, request: Any) -> None:
        name = f"broken_{abs(hash(request.node.name))}"
        (folder / f"{name}.py").write_text(text)
        message = failure(f"{name}:make")
        assert "cannot be imported" in message
        assert words in message
        assert f"{name}.py" in message

    def test_a_tuple_of_something_else(self, folder: Path) -> None:
        (folder / "tuples.py").write_text("def make():\n    return 1, 2\ndef nothing():\n    return ()\n")
        assert "returned a tuple; expected a model" in failure("tuples:make")
        assert "returned a tuple; expected a model" in failure("tuples:nothing")

    def test_a_graph_that_computes_something_else(self) -> None:
        said = failure("command_models:reading_values", code=4)
        assert "`fxopt optimize --no-verify` accepts the graph anyway" in said
        fxopt("optimize", "command_models:reading_values", "-o", "out.fxopt", "--no-verify")


@pytest.mark.usefixtures("folder")
class TestInputFiles:
    def optimize(self, code: int = 0, *more: str) -> str:
        """Return what `optimize` says with the inputs in ``inputs.pt``."""
        arguments = ("optimize", "command_models:seeded", "-p", "merge-linears", "-o", "out.fxopt", "--force")
        return fxopt(*arguments, "--inputs", "inputs.pt", *more, code=code).output

    @pytest.mark.parametrize("form", [torch.ones(2, 5, 8), (torch.ones(2, 5, 8),), {"x": torch.ones(2, 5, 8)}])
    def test_forms(self, form: Any) -> None:
        torch.save(form, "inputs.pt")
        assert "passed" in self.optimize()

    @pytest.mark.parametrize("form", [[], 3, [3], {1: torch.ones(2)}])
    def test_other_forms(self, form: Any) -> None:
        torch.save(form, "inputs.pt")
        assert "expected a tensor, a tuple of positional inputs" in self.optimize(3)

    def test_a_file_that_torch_has_not_written(self) -> None:
        Path("inputs.pt").write_text("1 2 3")
        said = self.optimize(3)
        assert "inputs.pt was not written by torch.save; expected a tensor, a tuple" in said
        assert FLAG not in said

    def test_pickles_are_not_opened(self) -> None:
        torch.save({"x": Marker()}, "inputs.pt")
        assert FLAG in self.optimize(3)
        assert not Path("unpickled").exists()
        Path("inputs.pt").write_bytes(pickle.dumps(Marker()))
        self.optimize(3)
        assert not Path("unpickled").exists()

    def test_pickles_are_opened_with_the_flag(self) -> None:
        torch.save({"x": Marker()}, "inputs.pt")
        self.optimize(4, FLAG)
        assert Path("unpickled").exists()

    def test_inputs_that_the_model_refuses(self) -> None:
        torch.save(torch.ones(2, 5, 7), "inputs.pt")
        assert self.optimize(4)
        save(capture(*attention()), "model.fxopt")
        message = fxopt("optimize", "model.fxopt", "-o", "out.fxopt", "--inputs", "inputs.pt", code=3).stderr
        assert "captured for 8" in message

    def test_safetensors_that_are_not_there(self) -> None:
        pytest.importorskip("safetensors")
        Path("inputs.safetensors").write_text("none")
        message = fxopt(
            "optimize", "command_models:seeded", "-o", "out.fxopt", "--inputs", "inputs.safetensors", code=3
        )
        assert "cannot be read as safetensors" in message.stderr


class Looked(nn.Module):
    """Reads tables of different sizes, a mask, pixels and a factor."""

    def __init__(self) -> None:
        super().__init__()
        self.word_table, self.kind_table = nn.Embedding(50, 4), nn.Embedding(2, 4)

    def forward(self, words: Tensor, kinds: Tensor, mask: Tensor, keep: Tensor, pixels: Tensor, x: Tensor) -> Tensor:
        found = self.word_table(words) + nn.functional.embedding(kinds.reshape(-1, 6), self.kind_table.weight)
        return torch.mul(found + pixels.unsqueeze(-1) + x.unsqueeze(-1), (mask * keep).unsqueeze(-1))


class TestDrawnInputs:
    @pytest.fixture
    def inputs(self, tmp_path: Path) -> Inputs:
        """What is drawn for an archive."""
        kinds = (torch.int64, torch.int64, torch.int64, torch.bool, torch.uint8, torch.bfloat16)
        args = tuple(torch.ones(3, 6, dtype=dtype) for dtype in kinds)
        model = Looked().eval()
        save(capture(model, args), tmp_path / "model.fxopt")
        self.loaded = load(tmp_path / "model.fxopt")
        return drawn(self.loaded)

    def test_they_are_what_the_archive_takes(self, inputs: Inputs) -> None:
        words, kinds, mask, keep, pixels, x = inputs.args
        assert words.max() > 20
        assert words.max() < 50
        assert set(kinds.flatten().tolist()) == {0, 1}
        assert mask.all()
        assert keep.dtype is torch.bool
        assert keep.all()
        assert pixels.dtype is torch.uint8
        assert pixels.max() > 100
        assert x.dtype is torch.bfloat16
        assert x.std() > 0.1
        self.loaded(*inputs.args)
        assert torch.equal(drawn(self.loaded).args[0], words)

    def test_values_that_decide_sizes_are_those_of_the_capture(self) -> None:
        class Repeated(nn.Module):
            def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
                return torch.cat([x] * int(lengths.sum()))

        lengths = torch.tensor([2, 3])
        assert torch.equal(drawn(capture(Repeated(), (torch.ones(2), lengths))).args[1], lengths)

    def test_a_graph_that_does_not_know_its_inputs(self, folder: Path) -> None:
        (folder / "bare.py").write_text("from torch import fx, nn\ndef make(): return fx.symbolic_trace(nn.ReLU())\n")
        message = failure("bare:make")
        assert "no inputs for" in message
        assert "--inputs FILE" in message


def test_a_folder_without_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text("{}")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "pip install 'fxopt[transformers]'" in failure("model")
