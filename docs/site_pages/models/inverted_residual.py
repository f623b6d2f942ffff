"""an inverted residual, of which MobileNetV2 and EfficientNet-Lite0 consist"""

import torch
from torch import nn


class InvertedResidual(nn.Module):
    def __init__(self, channels=8, expansion=6):
        super().__init__()
        wide = channels * expansion
        self.expand = nn.Conv2d(channels, wide, 1, bias=False)
        self.depthwise = nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False)
        self.project = nn.Conv2d(wide, channels, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(wide), nn.BatchNorm2d(wide)
        self.norm3 = nn.BatchNorm2d(channels)

    def forward(self, x):
        y = nn.functional.relu6(self.norm1(self.expand(x)))
        y = nn.functional.relu6(self.norm2(self.depthwise(y)))
        return x + self.norm3(self.project(y))


model, inputs = InvertedResidual().eval(), (torch.randn(2, 8, 16, 16),)
