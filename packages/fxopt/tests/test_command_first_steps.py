"""What a new user may type wrong: one line each that says what to type instead, at once where no model is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_runs import environment, fxopt

from fxopt.commands.failures import FileError
from fxopt.commands.outputs import check_output_folder

MODEL = "import torch\ndef make():\n    return torch.nn.Linear(4, 3).eval(), (torch.ones(2, 4),)\n"

WRONG = [
    # what is typed, exit code, what is said
    (["optimize", "shop.py", "-o", "out.fxopt"], 3, "in it that makes the model: shop:FUNCTION"),
    (["optimize", "gpt2", "-o", "out.fxopt"], 3, "Hugging Face format, owner/name on the Hub, or package"),
    (["optimize", "shop:make", "-o", "out.fxopt", "--inputs", "input.pt"], 3, "no file 'input.pt' with inputs"),
    (["optimize", "shop:make", "-o", "out.fxopt", "--inputs", "sub"], 3, "no file 'sub' with inputs; expected a file"),
    (["verify", "shop:make", "modle.fxopt"], 3, "there is no file or folder 'modle.fxopt'"),
    (["verify", "modle.fxopt", "shop:make"], 3, "there is no file or folder 'modle.fxopt'"),
    (["undo", "modle.fxopt", "-o", "out.fxopt"], 3, "there is no file or folder 'modle.fxopt'"),
    (["history", "absent/model.fxopt"], 3, "no file or folder 'absent/model.fxopt'; expected a .fxopt archive"),
    (["history", "model.fxopt/model.fxopt"], 3, "there is no file or folder 'model.fxopt/model.fxopt'"),
    (["history", "someone/model"], 3, "expected a .fxopt archive"),
    (["view", "sub"], 3, "'sub' is a directory, not a file"),
    (["bench", "sub"], 3, "sub has no config.json"),
    (["bench", "bert"], 3, "bert/model.safetensors is a special file"),
]

SCRIPT = """
import json, sys
from typer.testing import CliRunner
from fxopt.commands.main import build_app
app = build_app(plain=True)
for arguments, code, words in json.loads(sys.argv[1]):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == code, (arguments, result.exit_code, result.output)
    assert words in " ".join(result.stderr.split()), (arguments, result.stderr)
    assert len(result.stderr.splitlines()) == 1, (arguments, result.stderr)
assert CliRunner().invoke(app, ["optimize", "--help"]).exit_code == 0
assert CliRunner().invoke(app, ["optimise"]).exit_code == 2
assert "torch" not in sys.modules
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in, with a module that makes a model, an archive, and folders."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    (tmp_path / "shop.py").write_text(MODEL)
    for name in ("model.fxopt", "inputs.pt"):
        (tmp_path / name).touch()
    for name in ("bert", "sub"):
        (tmp_path / name).mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.skipif(sys.platform == "win32", reason="has no FIFOs")
def test_wrong_words_are_found_without_torch(folder: Path) -> None:
    """A path that is not there is no reason to wait for torch."""
    os.mkfifo(folder / "bert" / "model.safetensors")
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(WRONG)]
    found = subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert not (folder / "out.fxopt").exists()


def test_no_folder_with_other_files_is_replaced(folder: Path) -> None:
    """Not even with --force."""
    (folder / "mine").mkdir()
    for name in ("model.fxopt", "config.json"):
        (folder / "mine" / name).touch()
    assert check_output_folder("mine", source="bert", force=True) == Path("mine")
    (folder / "mine" / "thesis.tex").touch()
    with pytest.raises(FileError, match=r"'mine' holds 'thesis\.tex', which would be lost"):
        check_output_folder("mine", source="bert", force=True)
    with pytest.raises(FileError, match="'sub' exists and was not written by fxopt, so it is kept"):
        check_output_folder("sub", source="bert", force=True)
    with pytest.raises(FileError, match="there is no folder 'nowhere'"):
        check_output_folder("nowhere/out", source="bert", force=True)


@pytest.mark.parametrize(
    ("architectures", "words"),
    [
        ('["BertModle"]', "names the architecture 'BertModle', which is not a model of transformers"),
        ('["BertTokenizer"]', "names the architecture 'BertTokenizer', which is not a model"),
        ('["pipeline"]', "names the architecture 'pipeline', which is not a model"),
        ('["__class__"]', "names the architecture '__class__', which is not a model"),
        ('"Nothing"', "names the architecture 'Nothing', which is not a model"),
        ("[3]", "names the architecture 3, which is not a model"),
        ('[["BertModel"]]', "a model with code of its own can be loaded by a factory"),
    ],
)
def test_an_architecture_that_is_no_model(architectures: str, words: str, folder: Path) -> None:
    """A folder in Hugging Face format says which class its model has; nothing else is called."""
    pytest.importorskip("transformers")
    (folder / "bert" / "config.json").write_text(f'{{"architectures": {architectures}, "model_type": "bert"}}')
    assert words in fxopt("optimize", "bert", "-o", "out.fxopt", code=3).stderr


def test_an_output_that_cannot_be_made(folder: Path) -> None:
    """The message names what was asked for."""
    if not Path("/proc/self").is_dir():
        pytest.skip("needs /proc")
    said = fxopt("optimize", "shop:make", "-o", "/proc/out.fxopt", code=3).stderr
    assert "'/proc/out.fxopt' cannot be written" in said
    assert ".part" not in said
