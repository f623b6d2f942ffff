"""a stage of a U-Net's decoder: upsample, join with what the encoder saw, convolve"""

import torch
from torch import nn


class DecoderStage(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        half = channels // 2
        self.up = nn.ConvTranspose2d(channels, half, 2, stride=2)
        self.conv = nn.Conv2d(channels, half, 3, padding=1)
        self.norm1, self.norm2 = nn.BatchNorm2d(half), nn.BatchNorm2d(half)

    def forward(self, x, skip):
        y = torch.relu(self.norm1(self.up(x)))
        return torch.relu(self.norm2(self.conv(torch.cat([y, skip], dim=1))))


model = DecoderStage().eval()
inputs = (torch.randn(2, 16, 8, 8), torch.randn(2, 8, 16, 16))
