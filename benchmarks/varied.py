"""Models of many kinds, each taking some milliseconds: classifiers, decoders, detectors, sound, encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.models import efficientnet_lite0, from_timm, randomised, small_convolutions
from benchmarks.peers import peer
from benchmarks.suite import Absent

Given = tuple[nn.Module, tuple[Tensor, ...]]
"""A model in evaluation mode, and its inputs by position."""
Maker = Callable[[], "Given | Absent"]


def block(inputs: int, outputs: int, size: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution, a batch norm and ReLU."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


class TwoScales(nn.Module):
    """Downsampling, nearest upsampling, concatenation, convolution: as in every U-Net and pyramid."""

    def __init__(self) -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 16, 3, 1, 1), nn.Conv2d(16, 32, 3, 2, 1)
        self.both = nn.Conv2d(48, 16, 3, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, 16, height, width)."""
        fine = self.fine(x).relu()
        coarse = self.coarse(fine).relu()
        up = F.interpolate(coarse, size=fine.shape[-2:], mode="nearest")
        mixed: Tensor = self.both(torch.cat((up, fine), 1)).relu()
        return mixed


class UNet(nn.Module):
    """Two convolutions at each of four scales, pools down, transposed convolutions up."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64, 128), classes: int = 2) -> None:
        super().__init__()
        pairs = list(zip((3, *widths), widths, strict=False))
        self.down = nn.ModuleList(nn.Sequential(block(*pair), block(pair[1], pair[1])) for pair in pairs)
        steps = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.up = nn.ModuleList(nn.ConvTranspose2d(*step, 2, 2) for step in steps)
        self.mix = nn.ModuleList(nn.Sequential(block(2 * width, width), block(width, width)) for _, width in steps)
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 3, height, width) to (batch, classes, height, width)."""
        scales: list[Tensor] = []
        for place, down in enumerate(self.down):
            x = down(F.max_pool2d(x, 2) if place else x)
            scales.append(x)
        for up, mix, skip in zip(self.up, self.mix, scales[-2::-1], strict=True):
            x = mix(torch.cat((up(x), skip), 1))
        result: Tensor = self.head(x)
        return result


class Detector(nn.Module):
    """A pyramid of three scales, added from above, and one head of separable convolutions for all of them."""

    def __init__(self, width: int = 64, classes: int = 20) -> None:
        super().__init__()
        self.stem = nn.Sequential(block(3, 24, stride=2), block(24, 32, stride=2))
        sizes = ((32, 64), (64, 128), (128, 256))
        self.stages = nn.ModuleList(nn.Sequential(block(*size, stride=2), block(size[1], size[1])) for size in sizes)
        self.lateral = nn.ModuleList(nn.Conv2d(size[1], width, 1) for size in sizes)
        tower = [[block(width, width, groups=width), block(width, width, 1)] for _ in range(2)]
        self.tower = nn.Sequential(*(layer for pair in tower for layer in pair))
        self.classes, self.boxes = nn.Conv2d(width, classes, 3, 1, 1), nn.Conv2d(width, 4, 3, 1, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(batch, 3, height, width) to scores and boxes, (batch, places, classes) and (batch, places, 4)."""
        x, levels = self.stem(x), []
        for stage, lateral in zip(self.stages, self.lateral, strict=True):
            x = stage(x)
            levels.append(lateral(x))
        for place in (1, 0):
            up = F.interpolate(levels[place + 1], size=levels[place].shape[-2:], mode="nearest")
            levels[place] = levels[place] + up
        found = [self.tower(level) for level in levels]
        scores, boxes = (
            torch.cat([head(each).flatten(2).transpose(1, 2) for each in found], 1)
            for head in (self.classes, self.boxes)
        )
        return scores.sigmoid(), boxes


class SuperResolution(nn.Sequential):
    """ESPCN: three convolutions, and channels become pixels."""

    def __init__(self, scale: int = 3) -> None:
        layers = (nn.Conv2d(1, 64, 5, 1, 2), nn.ReLU(), nn.Conv2d(64, 32, 3, 1, 1), nn.ReLU())
        super().__init__(*layers, nn.Conv2d(32, scale**2, 3, 1, 1), nn.PixelShuffle(scale))


class Vocoder(nn.Module):
    """A small HiFi-GAN: transposed convolutions up to the rate of sound, dilated ones after each."""

    def __init__(self, bands: int = 80, width: int = 128) -> None:
        super().__init__()
        self.first = nn.Conv1d(bands, width, 7, padding=3)
        self.up, self.residual = nn.ModuleList(), nn.ModuleList()
        for stride in (8, 8, 4):
            self.up.append(nn.ConvTranspose1d(width, width // 2, 2 * stride, stride, stride // 2))
            width //= 2
            self.residual.extend(nn.Conv1d(width, width, 3, padding=step, dilation=step) for step in (1, 3, 5))
        self.last = nn.Conv1d(width, 1, 7, padding=3)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, bands, frames) to (batch, 1, 256 * frames)."""
        x = self.first(x)
        for place, up in enumerate(self.up):
            x = up(F.leaky_relu(x, 0.1))
            for layer in self.residual[3 * place : 3 * place + 3]:
                x = x + layer(F.leaky_relu(x, 0.1))
        return torch.tanh(self.last(F.leaky_relu(x, 0.1)))


class SpeakerBlock(nn.Module):
    """A block of ECAPA-TDNN: dilated convolutions part after part, squeeze and excitation, a residual sum."""

    def __init__(self, width: int, dilation: int, parts: int = 4) -> None:
        super().__init__()
        self.parts, part = parts, width // parts
        self.enter, self.leave = self.mixed(width), self.mixed(width)
        layers = [nn.Conv1d(part, part, 3, padding=dilation, dilation=dilation) for _ in range(parts - 1)]
        self.steps = nn.ModuleList(nn.Sequential(layer, nn.ReLU(), nn.BatchNorm1d(part)) for layer in layers)
        self.gate = nn.Sequential(nn.Conv1d(width, 64, 1), nn.ReLU(), nn.Conv1d(64, width, 1), nn.Sigmoid())

    @staticmethod
    def mixed(width: int) -> nn.Sequential:
        """A convolution over one position."""
        return nn.Sequential(nn.Conv1d(width, width, 1), nn.ReLU(), nn.BatchNorm1d(width))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, width, frames) to the same."""
        first, *others = self.enter(x).chunk(self.parts, 1)
        found = [first]
        for step, part in zip(self.steps, others, strict=True):
            found.append(step(part + found[-1] if len(found) > 1 else part))
        y = self.leave(torch.cat(found, 1))
        gated: Tensor = y * self.gate(y.mean(2, keepdim=True)) + x
        return gated


class Speaker(nn.Module):
    """A small ECAPA-TDNN: a vector for a voice."""

    def __init__(self, bands: int = 80, width: int = 256) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv1d(bands, width, 5, padding=2), nn.ReLU(), nn.BatchNorm1d(width))
        self.blocks = nn.ModuleList(SpeakerBlock(width, dilation) for dilation in (2, 3, 4))
        self.mix = nn.Sequential(nn.Conv1d(3 * width, 768, 1), nn.ReLU())
        self.attend = nn.Sequential(nn.Conv1d(768, 64, 1), nn.Tanh(), nn.Conv1d(64, 768, 1))
        self.last = nn.Sequential(nn.BatchNorm1d(1536), nn.Linear(1536, 192))

    def forward(self, x: Tensor) -> Tensor:
        """(batch, bands, frames) to (batch, 192)."""
        x, found = self.first(x), []
        for each in self.blocks:
            x = each(x)
            found.append(x)
        x = self.mix(torch.cat(found, 1))
        weights = self.attend(x).softmax(2)
        mean = (x * weights).sum(2)
        deviation = ((x * x * weights).sum(2) - mean * mean).clamp(min=1e-6).sqrt()
        vector: Tensor = self.last(torch.cat((mean, deviation), 1))
        return vector


class Waves(nn.Sequential):
    """The convolutions of wav2vec 2.0, half as wide: from sound to 50 vectors a second."""

    def __init__(self, width: int = 256) -> None:
        sizes = ((10, 5), *((3, 2),) * 4, *((2, 2),) * 2)
        layers: list[nn.Module] = []
        for place, size in enumerate(sizes):
            norm = [] if place else [nn.GroupNorm(width, width)]
            layers += [nn.Conv1d(width if place else 1, width, *size, bias=False), *norm, nn.GELU()]
        super().__init__(*layers)


class TextReader(nn.Module):
    """A small CRNN: convolutions halve an image of a line of text to columns, which a recurrent layer reads."""

    def __init__(self, width: int = 64, letters: int = 97) -> None:
        super().__init__()
        sizes = ((1, width), (width, 2 * width), (2 * width, 4 * width))
        self.columns = nn.Sequential(*(part for size in sizes for part in (block(*size), nn.MaxPool2d(2))))
        self.steps = nn.LSTM(4 * width * 4, 2 * width, num_layers=2, bidirectional=True, batch_first=True)
        self.letters = nn.Linear(4 * width, letters)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, 1, 32, width) to (batch, width / 8, letters)."""
        steps, _ = self.steps(self.columns(x).flatten(1, 2).transpose(1, 2))
        letters: Tensor = self.letters(steps)
        return letters


def normed_vocoder() -> nn.Module:
    """`Vocoder` with weight norm, as it is trained."""
    vocoder = Vocoder()
    for module in list(vocoder.modules()):
        if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            nn.utils.parametrizations.weight_norm(module)
    return vocoder


def own(cls: Callable[[], nn.Module], *size: int) -> Given:
    """A model of this file with random weights, and a random input."""
    torch.manual_seed(0)
    return randomised(cls()), (torch.randn(*size),)


def images(maker: Callable[[], tuple[nn.Module, Tensor] | Absent]) -> Given | Absent:
    """A model of `benchmarks.models`."""
    found = maker()
    return found if isinstance(found, Absent) else (found[0], (found[1],))


def timm(name: str, size: int = 224) -> Maker:
    """A maker of a model of timm."""
    return partial(images, partial(from_timm, name, size))


def text(kind: str, tokens: int, **settings: object) -> Given | Absent:
    """An encoder of transformers with random weights, given tokens and a mask of ones."""
    model = of_transformers(kind, settings)
    ids = torch.randint(1000, 20000, (1, tokens))
    return model if isinstance(model, Absent) else (model, (ids, torch.ones_like(ids)))


def sound(kind: str, samples: int, **settings: object) -> Given | Absent:
    """A model of transformers with random weights, given sound."""
    model = of_transformers(kind, settings)
    return model if isinstance(model, Absent) else (model, (torch.randn(1, samples),))


def of_transformers(kind: str, settings: Mapping[str, object]) -> nn.Module | Absent:
    """A model of transformers with random weights."""
    transformers = peer("transformers")
    if isinstance(transformers, Absent):
        return transformers
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind.replace('Encoder', '')}Config")(**settings)
    model: nn.Module = getattr(transformers, f"{kind}Model")(config)
    return model.eval()


_SMALL = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536}
PLANS: Mapping[str, Mapping[str, Maker]] = {
    "Classifiers": {
        "MobileNetV2, 224": timm("mobilenetv2_100"),
        "MobileNetV3-Large, 224": timm("mobilenetv3_large_100"),
        "ResNet-26, 224": timm("resnet26"),
        "EfficientNet-Lite0, 224": partial(images, efficientnet_lite0),
        "ResNeXt-26-TS, 128": timm("resnext26ts", 128),
        "RegNetY-200MF, 224": timm("regnety_002"),
        "ConvNeXt-Atto, 224": timm("convnext_atto"),
        "RepVGG-A0, 160": timm("repvgg_a0", 160),
    },
    "Decoders": {
        "U-Net, 256": partial(own, UNet, 1, 3, 256, 256),
        "two-scale decoder, 256": partial(own, TwoScales, 1, 3, 256, 256),
        "detector with a pyramid, 320": partial(own, Detector, 1, 3, 320, 320),
        "super-resolution, 128": partial(own, SuperResolution, 1, 1, 128, 128),
    },
    "Sound": {
        "vocoder, 50 frames": partial(own, Vocoder, 1, 80, 50),
        "speaker's vector, 200 frames": partial(own, Speaker, 1, 80, 200),
        "wav2vec 2.0's convolutions, 1 s": partial(own, Waves, 1, 1, 16000),
    },
    "Encoders": {
        "small BERT, 4 layers, 64 tokens": partial(text, "Bert", 64, num_hidden_layers=4, **_SMALL),
        "ViT-S/16, 4 blocks, 224": timm("vit_small_patch16_224"),
    },
}
"""The models of the topic `plans`, a table for each kind."""
MORE: Mapping[str, Maker] = {
    **{
        name: timm(name)
        for name in (
            "resnet18", "efficientnet_b0", "mobilenetv4_conv_small", "ghostnet_100", "densenet121", "mobilevit_xxs",
            "edgenext_xx_small", "fastvit_t8", "levit_128s", "deit_tiny_patch16_224", "tinynet_e",
            "hardcorenas_a", "lcnet_050", "starnet_s1", "repghostnet_050", "poolformer_s12",
        )
    },
    **{
        f"{kind}, 2 layers, 64 tokens": partial(text, kind, 64, num_hidden_layers=2, **_SMALL)
        for kind in ("Roberta", "Albert", "Electra", "MPNet", "ModernBert")
    },
    "DistilBert, 2 layers, 64 tokens": partial(text, "DistilBert", 64, n_layers=2, dim=384, hidden_dim=1536),
    "T5Encoder, 2 layers, 64 tokens": partial(text, "T5Encoder", 64, num_layers=2),
    "Llama, 2 layers, 64 tokens": partial(text, "Llama", 64, num_hidden_layers=2, use_cache=False, **_SMALL),
}  # fmt: skip
"""Further models of the topic `never-slower`."""
_RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 256, "share_att_key": True}
NAMED: Mapping[str, Maker] = {
    "DeBERTa-v3-base, 4 of 12 layers, 16 tokens": partial(
        text, "DebertaV2", 16, num_hidden_layers=4, hidden_size=768, num_attention_heads=12, intermediate_size=3072,
        vocab_size=20000, norm_rel_ebd="layer_norm", **_RELATIVE,
    ),
    "Conformer, 2 layers, 1 s": partial(
        sound, "Wav2Vec2Conformer", 16000, num_hidden_layers=2, hidden_size=256, num_attention_heads=4,
        intermediate_size=1024,
    ),
    "vocoder with weight norm, 50 frames": partial(own, normed_vocoder, 1, 80, 50),
    "CRNN, 32 x 256": partial(own, TextReader, 1, 1, 32, 256),
    "NFNet (nf_regnet_b0), 192": timm("nf_regnet_b0", 192),
    "RepViT-M0.9, 224": timm("repvit_m0_9"),
}  # fmt: skip
"""Further models of the topic `architectures`."""
QUICK: Mapping[str, Mapping[str, Maker]] = {
    "Small": {
        "three convolutions": partial(images, small_convolutions),
        "two-scale decoder, 32": partial(own, TwoScales, 1, 3, 32, 32),
    }
}


def made(label: str) -> Given | Absent:
    """Make a model by its label."""
    return next(makers[label] for makers in (*PLANS.values(), *QUICK.values(), MORE, NAMED) if label in makers)()
