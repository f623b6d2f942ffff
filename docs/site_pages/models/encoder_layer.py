"""a layer of a transformer encoder, as BERT and MiniLM stack them"""

import torch
from torch import nn


class EncoderLayer(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.output = nn.Linear(width, width), nn.Linear(width, width)
        self.attention_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x):
        query, key = self.split(self.query(x)), self.split(self.key(x))
        value = self.split(self.value(x))
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5
        weights = self.dropout(scores.softmax(-1))
        context = (weights @ value).transpose(1, 2).flatten(2)
        x = self.attention_norm(x + self.dropout(self.output(context)))
        y = self.down(nn.functional.gelu(self.up(x)))
        return self.norm(x + self.dropout(y))


model, inputs = EncoderLayer().eval(), (torch.randn(2, 10, 32),)
