"""Sizes that vary without being asked for: of images, and of texts inside of wrappers."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from test_capture_transformers import layers
from torch import Tensor, nn

from fxopt_capture import capture, load, save
from fxopt_core.errors import CaptureError


class Pyramid(nn.Module):
    """Convolutions with strides, what comes back up, what is pooled to one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.down = nn.Sequential(nn.BatchNorm2d(8), nn.Hardswish(), nn.Conv2d(8, 8, 2, stride=2))
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor, scale: Tensor) -> Any:
        fine = self.stem(image) * scale
        up = nn.functional.interpolate(self.down(fine), fine.shape[-2:], mode="bilinear")
        return self.head((fine + up).mean((2, 3)))


def agrees(model: nn.Module, captured: nn.Module, *args: Any, **kwargs: Any) -> None:
    with torch.no_grad():
        torch.testing.assert_close(captured(*args, **kwargs), model(*args, **kwargs), rtol=1e-5, atol=1e-5)


def test_images_of_other_heights_and_widths() -> None:
    model = Pyramid().eval()
    captured = capture(model, (torch.randn(1, 3, 16, 16), torch.tensor(2.0)))
    for shape in ((1, 16, 16), (4, 9, 40), (2, 33, 17), (3, 64, 5)):
        batch, height, width = shape
        agrees(model, captured, torch.randn(batch, 3, height, width), torch.tensor(0.5))
    with pytest.raises(CaptureError, match=r"valid for inputs with image\.size\(\)\[3\] >= \d only"):
        captured(torch.randn(1, 3, 16, 1), torch.tensor(2.0))
    with pytest.raises(CaptureError, match="size 4 in dimension 1, where the graph was captured for 3"):
        captured(torch.randn(1, 4, 16, 16), torch.tensor(2.0))


class Positions(nn.Module):
    """As vision transformers have it: one position for each patch."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.table = nn.Conv2d(3, 4, 4, stride=4), nn.Parameter(torch.randn(1, 4, 16))

    def forward(self, image: Tensor) -> Any:
        return self.patches(image).flatten(2) + self.table


class Branch(nn.Module):
    """A branch on the values of an image, which torch.export refuses while its size varies, and a fixed one too."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, 1)

    def forward(self, image: Tensor) -> Any:
        grid = torch.arange(int(torch.tensor(image.shape[2]).item()))
        return self.convolution(image) + grid[:, None]


@pytest.mark.parametrize("make", [Positions, Branch])
def test_fixed_images_stay_fixed(make: type[nn.Module]) -> None:
    """And batches vary all the same."""
    model = make().eval()
    captured = capture(model, torch.randn(2, 3, 16, 16))
    agrees(model, captured, torch.randn(5, 3, 16, 16))
    with pytest.raises(CaptureError, match="captured"):
        captured(torch.randn(2, 3, 20, 16))


def test_own_shapes_are_not_widened() -> None:
    """Where the caller names what varies, nothing else does."""
    captured = capture(Pyramid().eval(), (torch.randn(2, 3, 16, 16), torch.ones(())), dynamic_shapes={})
    with pytest.raises(CaptureError, match="size 20 in dimension 2, where the graph was captured for 16"):
        captured(torch.randn(2, 3, 20, 16), torch.ones(()))


def test_images_of_timm(timm: ModuleType, tmp_path: Path) -> None:
    """From memory and from an archive, which holds the arithmetic of five strides."""
    model = timm.create_model("resnet10t", pretrained=False, num_classes=10).eval()
    captured = capture(model, torch.randn(2, 3, 64, 64))
    assert layers(captured) == {"Conv2d": 14, "BatchNorm2d": 14, "Linear": 1}
    assert list(captured.state_dict()) == list(model.state_dict())
    save(captured, tmp_path / "model.fxopt")
    for graph_module in (captured, load(tmp_path / "model.fxopt")):
        for batch, height, width in ((1, 64, 64), (3, 48, 80), (3, 33, 41)):
            agrees(model, graph_module, torch.randn(batch, 3, height, width))


# Texts inside of wrappers


class Sentences(nn.Module):
    """A mean over the tokens, under names of its own; a number for each text beside."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, tokens: Tensor, kept: Tensor, weights: Tensor) -> Any:
        states = self.encoder(input_ids=tokens, attention_mask=kept).last_hidden_state
        return weights[:, :1] * (states * kept[..., None]).sum(1) / kept.sum(1, keepdim=True)


class Features(nn.Module):
    """One dictionary, as sentence-transformers has it."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.auto_model = encoder

    def forward(self, features: dict[str, Tensor]) -> dict[str, Tensor]:
        return {**features, "embedding": self.auto_model(**features).last_hidden_state[:, 0]}


def bert(transformers: ModuleType) -> nn.Module:
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    model: nn.Module = transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, **sizes)).eval()
    return model


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_texts_inside_of_a_wrapper(transformers: ModuleType, dtype: torch.dtype) -> None:
    model = Sentences(bert(transformers)).eval()

    def texts(batch: int, length: int) -> tuple[Tensor, ...]:
        kept = torch.arange(length) <= (torch.arange(batch) % length)[:, None]  # texts of several lengths
        return torch.randint(50, (batch, length)), kept.to(dtype), torch.rand(batch, 8)

    captured = capture(model, texts(1, 8))  # as long as there are weights
    for batch, length in ((1, 8), (5, 3), (2, 40), (3, 1)):
        agrees(model, captured, *texts(batch, length))
    with pytest.raises(CaptureError, match="captured"):
        captured(*texts(2, 600))  # there are 512 positions


def test_texts_in_a_dictionary(transformers: ModuleType) -> None:
    model = Features(bert(transformers)).eval()

    def texts(batch: int, length: int) -> dict[str, Tensor]:
        return {"input_ids": torch.randint(50, (batch, length)), "attention_mask": torch.ones(batch, length).long()}

    captured = capture(model, (texts(2, 6),))
    for batch, length in ((1, 4), (7, 11)):
        agrees(model, captured, texts(batch, length))


def test_a_decoder_inside_of_a_classifier(transformers: ModuleType) -> None:
    """Its arguments go by position; the cache that the decoder makes is dropped."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = transformers.LlamaModel(transformers.LlamaConfig(num_hidden_layers=1, **sizes))
            self.head = nn.Linear(16, 3)

        def forward(self, embedded: Tensor) -> Any:
            return self.head(self.decoder(inputs_embeds=embedded)[0][:, -1])

    model = Classifier().eval()
    captured = capture(model, torch.randn(2, 7, 16))
    for batch, length in ((1, 5), (4, 12)):
        agrees(model, captured, torch.randn(batch, length, 16))
