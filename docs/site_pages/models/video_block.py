"""a residual block over time, height and width, as networks for video and volumes have them"""

import torch
from torch import nn


class VideoBlock(nn.Module):
    def __init__(self, channels=4):
        super().__init__()
        self.conv1 = nn.Conv3d(channels, channels, 3, padding=1, bias=False)
        self.conv2 = nn.Conv3d(channels, channels, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm3d(channels), nn.BatchNorm3d(channels)

    def forward(self, x):
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y)))


model, inputs = VideoBlock().eval(), (torch.randn(2, 4, 4, 8, 8),)
