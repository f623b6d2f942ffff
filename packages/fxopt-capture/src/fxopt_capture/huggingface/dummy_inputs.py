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
    # A model with a token for images takes texts without any; another one needs the image beside the text.
    if {"input_ids", "pixel_values"} <= set(names) and getattr(model.config, "image_token_id", None) is None:
        chosen = [name for name in names if name in {*chosen, "input_ids", "pixel_values", "attention_mask"}]
    return [name for name in names if name in chosen]


def dummy_inputs(model: Any, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return example inputs by name, on the model's device and in its dtype, in batches of `BATCH`.

    The values are the same every time, and the random state stays as it is.
    """
    check_names(model, names)
    first = next(model.parameters(), torch.empty(0))
    generator = torch.Generator().manual_seed(0)
    found: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            made = _example(name, model.config, generator)
        except AttributeError as error:
            raise CaptureError(_unknown(model, name, str(error))) from error
        if made is None:
            raise CaptureError(_unknown(model, name, "no rule for it"))
        found[name] = made.to(first.device, first.dtype if made.is_floating_point() else made.dtype)
    return found


def _example(name: str, config: Any, generator: torch.Generator) -> torch.Tensor | None:
    """Return an example of the input of this name for models of this configuration; None if no rule is known."""
    text, vision = config.get_text_config(), getattr(config, "vision_config", config)
    shape = (BATCH, DECODER_LENGTH if name.startswith("decoder") else LENGTH)
    match name:
        case "input_ids" | "decoder_input_ids":
            special = {value for key, value in text.to_dict().items() if key.endswith("token_id")}
            ordinary = [token for token in range(min(text.vocab_size, 1000)) if token not in special] or [0]
            return torch.tensor(ordinary)[torch.randint(len(ordinary), shape, generator=generator)]
        case "attention_mask" | "decoder_attention_mask":
            return torch.ones(shape, dtype=torch.int64)
        case "token_type_ids":
            return torch.zeros(shape, dtype=torch.int64)
        case "position_ids":
            return torch.arange(LENGTH).expand(shape).clone()
        case "inputs_embeds" | "decoder_inputs_embeds":
            return torch.randn(*shape, text.hidden_size, generator=generator)
        case "pixel_values":
            size = getattr(vision, "image_size", 224)
            sizes = size if isinstance(size, list | tuple) else (size, size)
            return torch.randn(BATCH, getattr(vision, "num_channels", 3), *sizes, generator=generator)
        case "input_values":
            return torch.randn(BATCH, _SAMPLES, generator=generator)
        case "input_features":
            # The encoder's second convolution has a stride of 2, as in Whisper.
            return torch.randn(BATCH, config.num_mel_bins, 2 * config.max_source_positions, generator=generator)
    return None


def _unknown(model: nn.Module, name: str, reason: str) -> str:
    return (
        f"the shape of the input {name!r} of {type(model).__name__} does not follow from its configuration "
        f"({reason}); give example_inputs={{{name!r}: ...}} with all inputs instead"
    )
