"""a residual block of a temporal convolutional network, for audio and other sequences"""

import torch
from torch import nn


class TemporalBlock(nn.Module):
    def __init__(self, channels=8, dilation=2):
        super().__init__()
        sizes = {"kernel_size": 3, "padding": dilation, "dilation": dilation}
        self.conv1 = nn.Conv1d(channels, channels, **sizes)
        self.conv2 = nn.Conv1d(channels, channels, **sizes)
        self.norm1, self.norm2 = nn.BatchNorm1d(channels), nn.BatchNorm1d(channels)

    def forward(self, x):
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(x + self.norm2(self.conv2(y)))


model, inputs = TemporalBlock().eval(), (torch.randn(2, 8, 40),)
