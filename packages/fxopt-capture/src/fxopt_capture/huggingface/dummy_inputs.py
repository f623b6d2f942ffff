"""Example inputs for models of the transformers library, made from their configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fxopt_capture.call.arguments import forward_signature
from fxopt_capture.call.names import check_names
from fxopt_core.errors import CaptureError

BATCH = 2
LENGTH = 8
DECODER_LENGTH = 6
CHOICES = 3
_SAMPLES = 4000  # of sound; enough for the strided convolutions of wav2vec 2


def default_names(model: Any) -> list[str]:
    """Return the inputs that a Hugging Face model is captured with unless told otherwise.

    These are its main input, the attention mask for text, the decoder's ids if it has a decoder, and the image if it
    needs both an image and a text.
    """
    names = list(forward_signature(model).parameters)
    main = str(getattr(model, "main_input_name", names[0]))
    chosen = [main]
    if main == "input_ids" and "attention_mask" in names:
        chosen.append("attention_mask")
    if "decoder_input_ids" in names:
        chosen.append("decoder_input_ids")
    if {"input_ids", "pixel_values"} <= set(names) and getattr(model.config, "image_token_id", None) is None:
        chosen = [name for name in names if name in {*chosen, "input_ids", "pixel_values", "attention_mask"}]
    return [name for name in names if name in chosen]


def dummy_inputs(model: nn.Module, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return example inputs by name, on the model's device and in its dtype, in batches of `BATCH`.

    The values are the same every time, and the random state stays as it is.
    """
    check_names(model, names)
    maker = _Maker(model)
    return {name: maker.make(name) for name in names}


class _Maker:
    """Makes inputs of one model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.config = model.config
        self.text = self.config.get_text_config()
        self.vision = getattr(self.config, "vision_config", self.config)
        first = next(model.parameters(), torch.empty(0))
        self.device, self.dtype = first.device, first.dtype
        self.generator = torch.Generator().manual_seed(0)

    def make(self, name: str) -> torch.Tensor:
        """Return the input of this name."""
        try:
            made = self._made(name)
        except AttributeError as error:
            raise CaptureError(self._unknown(name, str(error))) from error
        if made is None:
            raise CaptureError(self._unknown(name, "no rule for it"))
        return made.to(self.device)

    def _made(self, name: str) -> torch.Tensor | None:
        match name:
            case "input_ids" | "decoder_input_ids":
                return self.tokens(name)
            case "attention_mask" | "decoder_attention_mask" | "encoder_attention_mask":
                return torch.ones(self.shape(name), dtype=torch.int64)
            case "token_type_ids" | "global_attention_mask":
                return torch.zeros(self.shape(name), dtype=torch.int64)
            case "position_ids" | "decoder_position_ids":
                return torch.arange(self.shape(name)[-1]).expand(self.shape(name)).clone()
            case "inputs_embeds" | "decoder_inputs_embeds":
                return self.floats(*self.shape(name), self.text.hidden_size)
            case "bbox":
                return torch.tensor([10, 20, 30, 40]).expand(*self.shape(name), 4).clone()
            case "pixel_values":
                return self.image()
            case "input_values":
                return self.floats(BATCH, _SAMPLES)
            case "input_features":
                return self.floats(BATCH, self.config.num_mel_bins, 2 * self.config.max_source_positions)
            case "labels" | "next_sentence_label":
                return self.labels()
            case "start_positions" | "end_positions":
                return self.integers(range(LENGTH), (BATCH,))
        return None

    def _unknown(self, name: str, reason: str) -> str:
        return (
            f"the shape of the input {name!r} of {type(self.model).__name__} does not follow from its configuration "
            f"({reason}); give example_inputs={{{name!r}: ...}} with all inputs instead"
        )

    def shape(self, name: str) -> tuple[int, ...]:
        length = DECODER_LENGTH if name.startswith("decoder") else LENGTH
        choices = (CHOICES,) if type(self.model).__name__.endswith("ForMultipleChoice") else ()
        return (BATCH, *choices, length)

    def floats(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype)

    def integers(self, allowed: Sequence[int], shape: tuple[int, ...]) -> torch.Tensor:
        picked = torch.randint(len(allowed), shape, generator=self.generator)
        return torch.tensor(allowed)[picked]

    def tokens(self, name: str) -> torch.Tensor:
        special = {value for key, value in self.text.to_dict().items() if key.endswith("token_id")}
        ordinary = [token for token in range(min(self.text.vocab_size, 1000)) if token not in special]
        return self.integers(ordinary or [0], self.shape(name))

    def image(self) -> torch.Tensor:
        size = getattr(self.vision, "image_size", 224)
        height, width = size if isinstance(size, list | tuple) else (size, size)
        return self.floats(BATCH, getattr(self.vision, "num_channels", 3), height, width)

    def labels(self) -> torch.Tensor:
        kind = type(self.model).__name__
        if kind.endswith("ForMultipleChoice"):
            return self.integers(range(CHOICES), (BATCH,))
        if kind.endswith("ForTokenClassification"):
            return self.integers(range(self.config.num_labels), (BATCH, LENGTH))
        if kind.endswith(("Classification", "ForNextSentencePrediction")):
            return self.integers(range(2), (BATCH,))
        decodes = getattr(self.config, "is_encoder_decoder", False)
        return self.tokens("decoder_input_ids" if decodes else "input_ids")
