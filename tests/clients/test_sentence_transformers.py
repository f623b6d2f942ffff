"""Two layers of MiniLM, trained, in sentence-transformers: optimized as an object and as a folder, and then used."""

from __future__ import annotations

import copy
import json
import os
import pickle
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from published_weights import minilm
from typer.testing import CliRunner

import fxopt
from fxopt.commands.main import build_app
from fxopt_core import kept

numpy = pytest.importorskip("numpy")
library = pytest.importorskip("sentence_transformers")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
TEXTS = ["graph", "A text that is longer than the first.", "And one more, of its own length. " * 8, "two words", ""]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder."""
    return minilm(tmp_path_factory.mktemp("folders") / "plain")


@pytest.fixture(scope="module")
def model(plain: Path) -> Any:
    """The model as it is, with prompts."""
    prompts = {"query": "query: ", "passage": "passage: "}
    return library.SentenceTransformer(str(plain), device="cpu", prompts=prompts)


@pytest.fixture(scope="module")
def fast(model: Any) -> Any:
    """The same with its transformer optimized."""
    return fxopt.optimize(model)


@pytest.fixture(scope="module")
def folder(plain: Path) -> Path:
    """What the command makes of the folder."""
    out = plain.with_name("fast")
    result = CliRunner().invoke(build_app(plain=True), ["optimize", str(plain), "-o", str(out)])
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"batch_size": 1},
        {"prompt_name": "query", "batch_size": 2},
        {"prompt": "find: "},
        {"normalize_embeddings": True, "truncate_dim": 64},
        {"precision": "binary"},
        {"show_progress_bar": True, "convert_to_tensor": True},
        {"output_value": "token_embeddings"},
    ],
    ids=str,
)
def test_encode_takes_its_arguments(model: Any, fast: Any, options: dict[str, Any]) -> None:
    expected, found = model.encode(TEXTS, **options), fast.encode(TEXTS, **options)
    assert type(found) is type(expected)
    for one, other in zip(found, expected, strict=True):
        if options.get("precision") == "binary":
            assert numpy.unpackbits((one ^ other).view("uint8")).sum() <= 1  # of 384; a value may lie at zero
        else:
            numpy.testing.assert_allclose(numpy.asarray(one), numpy.asarray(other), atol=2e-5)


def test_it_goes_to_other_processes(model: Any, fast: Any) -> None:
    assert pickle.loads(pickle.dumps(fast)).encode(TEXTS).tolist() == fast.encode(TEXTS).tolist()


@pytest.mark.nightly
def test_several_processes(model: Any, fast: Any) -> None:
    pool = copy.deepcopy(fast).start_multi_process_pool(["cpu", "cpu"])
    try:
        found = fast.encode(TEXTS * 4, pool=pool, chunk_size=10)
    finally:
        fast.stop_multi_process_pool(pool)
    numpy.testing.assert_allclose(found, model.encode(TEXTS * 4), atol=1e-5)


def test_the_callers_model_stays_as_it_was(model: Any, fast: Any) -> None:
    assert type(fast) is type(model)
    assert isinstance(fast.transformers_model, fxopt.CapturedModule)
    assert type(model.transformers_model).__name__ == "BertModel"
    before = model.max_seq_length
    fast.max_seq_length = 16
    try:
        assert model.max_seq_length == before
        assert fast.encode(TEXTS[2] + " another end").tolist() == fast.encode(TEXTS[2]).tolist()
    finally:
        fast.max_seq_length = before
    assert model.prompts == fast.prompts
    assert [record.pass_name for record in fxopt.history(fast.transformers_model) if record.rewrites]


def test_the_folder_opens_and_saves_again(model: Any, plain: Path, folder: Path, tmp_path: Path) -> None:
    expected = model.encode(TEXTS)
    opened = library.SentenceTransformer(str(folder), device="cpu")
    numpy.testing.assert_allclose(opened.encode(TEXTS), expected, atol=1e-5)
    assert (folder / "README.md").read_text() == (plain / "README.md").read_text()

    opened.save(str(tmp_path / "again"))
    again = library.SentenceTransformer(str(tmp_path / "again"), device="cpu")
    assert again.encode(TEXTS).tolist() == opened.encode(TEXTS).tolist()

    found, expected = (
        transformers.pipeline("feature-extraction", model=str(path), device="cpu")(TEXTS[1]) for path in (folder, plain)
    )
    numpy.testing.assert_allclose(found, expected, atol=1e-4)
    with pytest.raises(ValueError, match="holds a BertModel, which AutoModelForSequenceClassification does not open"):
        transformers.AutoModelForSequenceClassification.from_pretrained(str(folder))
    with pytest.raises(ValueError, match="an optimized graph, and dtype=bfloat16 can no longer be chosen"):
        transformers.AutoModel.from_pretrained(str(folder), dtype=torch.bfloat16)


OPENS = {
    "AutoModel": "from transformers import AutoModel; model = AutoModel.from_pretrained(folder)",
    "SentenceTransformer": "from sentence_transformers import SentenceTransformer as Opened; model = Opened(folder)[0]",
}


@pytest.mark.parametrize("client", ["AutoModel", pytest.param("SentenceTransformer", marks=pytest.mark.nightly)])
def test_the_entry_point_opens_it_without_an_import(model: Any, folder: Path, tmp_path: Path, client: str) -> None:
    """The metadata is made here, as an installed distribution has it: that of a development install may be older.

    By day with what sentence-transformers itself opens models with: to import all of it takes many seconds.
    """
    project = (ROOT / "packages/fxopt/pyproject.toml").read_text()
    start = project.index('[project.entry-points."torch.backends"]\n')
    (entry,) = project[start:].splitlines()[1:2]
    metadata = tmp_path / "fxopt-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fxopt\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[torch.backends]\n" + entry.replace('"', "") + "\n")
    path = os.pathsep.join([str(tmp_path), *(str(source) for source in ROOT.glob("packages/*/src"))])
    inputs = {"input_ids": [[101, 10629, 102]], "attention_mask": [[1, 1, 1]]}
    code = f"""
        import torch
        folder, inputs = {str(folder)!r}, {inputs}
        {OPENS[client]}
        model = getattr(model, "auto_model", model)
        print(model(**{{name: torch.tensor(rows) for name, rows in inputs.items()}}).last_hidden_state.tolist())
    """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": path}
    said = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    with torch.no_grad():
        expected = model[0].auto_model(**{name: torch.tensor(rows) for name, rows in inputs.items()}).last_hidden_state
    assert said.returncode == 0, said.stderr
    numpy.testing.assert_allclose(json.loads(said.stdout), expected, atol=1e-5)


def test_without_fxopt_the_error_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = json.loads((folder / "config_sentence_transformers.json").read_text())
    requirements = library.util.environment
    requirements.check_version_requirements(config["requirements"])
    with pytest.raises(ImportError, match="pip install"):
        requirements.check_version_requirements({"no-such-package": config["requirements"]["fxopt"]})
    kind = "fxopt (pip install fxopt)"
    monkeypatch.delitem(transformers.CONFIG_MAPPING._extra_content, kind)  # where fxopt registers itself
    with pytest.raises(ValueError, match=f"has model type `{re.escape(kind)}`"):
        library.SentenceTransformer(str(folder), device="cpu")


def test_a_stored_dtype_that_is_slow_here_is_not_computed_in(plain: Path) -> None:
    supported = torch.ops.mkldnn._is_mkldnn_fp16_supported, torch.ops.mkldnn._is_mkldnn_bf16_supported
    slow = [dtype for dtype, fast in zip((torch.float16, torch.bfloat16), supported, strict=True) if not fast()]
    if not slow:
        pytest.skip("this processor has instructions for both")
    half = library.SentenceTransformer(str(plain), device="cpu", model_kwargs={"dtype": slow[0]})
    half.append(library.sentence_transformer.modules.Dense(384, 8).to(slow[0]))
    found = fxopt.optimize(half)
    assert (half.dtype, found.dtype) == (slow[0], torch.float32)
    first = fxopt.history(found.transformers_model)[0]
    assert (first.pass_name, first.options_text) == ("compute-in-float32", f"stored='{str(slow[0])[6:]}'")
    assert {parameter.dtype for parameter in half.parameters()} == {slow[0]}
    similarity = torch.nn.functional.cosine_similarity(
        torch.tensor(half.encode(TEXTS)).float(), torch.tensor(found.encode(TEXTS)).float()
    )
    assert (similarity > 0.99).all()


def test_plans_made_while_a_result_was_verified_see_what_is_replaced_later(fast: Any) -> None:
    graph = copy.deepcopy(fast[0].auto_model)
    inputs = {"input_ids": torch.arange(1000, 1010)[None], "attention_mask": torch.ones(1, 10, dtype=torch.int64)}
    name, layer = next((name, each) for name, each in graph.named_modules() if type(each).__name__ == "PanelLinear")
    with torch.inference_mode(False), torch.no_grad():
        with kept(graph):
            before = [graph(**inputs).last_hidden_state for _ in range(2)][-1]
        layer.bias = torch.nn.Parameter(layer.bias + 1)
        found = [graph(**inputs).last_hidden_state for _ in range(3)]
        expected = fxopt.undo(graph)(**inputs).last_hidden_state
    assert not torch.allclose(before, expected, atol=1e-3), name
    for each in found:
        torch.testing.assert_close(each, expected, rtol=1e-4, atol=1e-5)
