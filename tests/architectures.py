"""The architectures that people run, small and with random weights, and inputs for them of any size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

Options = Mapping[str, Any]
Inputs = dict[str, Tensor]

VOCABULARY = 99
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PATCHES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
ENCODER = {**PATCHES, "vocab_size": VOCABULARY, "max_position_embeddings": 64}
DECODER = {**ENCODER, **SPECIAL, "num_key_value_heads": 2}
PATCHES |= {"image_size": 32, "patch_size": 8}
SIDES = {"layers": 1, "attention_heads": 4, "ffn_dim": 64}
SEQ2SEQ = {
    **{f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIDES.items()},
    **SPECIAL, "d_model": 32, "vocab_size": VOCABULARY, "decoder_start_token_id": 1,
}  # fmt: skip
TWO = {"num_hidden_layers": 2}
GPT_2 = {**SPECIAL, "n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": VOCABULARY}


@dataclass(frozen=True)
class Architecture:
    """One architecture.

    Attributes:
        name: as people call it.
        cls: a class of transformers, or a model of timm; else it is `Attention`.
        options: of its configuration, or of its constructor.
        inputs: the names of its inputs.
        library: where it comes from: ``"transformers"``, ``"timm"`` or None.
        attentions: the implementations of attention that it has.
    """

    name: str
    cls: str
    options: Options = field(default_factory=dict)
    inputs: tuple[str, ...] = ("input_ids", "attention_mask")
    library: str | None = "transformers"
    attentions: tuple[str, ...] = ("sdpa", "eager")

    def build(self, library: ModuleType | None, attention: str | None = None) -> nn.Module:
        """Make the model, in evaluation mode, the same every time."""
        torch.manual_seed(0)
        if library is None:
            model: nn.Module = Attention()
        elif self.library == "timm":
            model = library.create_model(self.cls, pretrained=False, num_classes=10, **self.options)
        else:
            cls: Any = getattr(library, self.cls)
            configuration = cls.config_class(**self.options)
            if attention is not None:
                configuration._attn_implementation = attention
            model = cls(configuration)
        return randomise_statistics(model).eval()

    def varying(self) -> dict[str, dict[int, Any]] | None:
        """What varies in a capture: only the number of images, whose sizes would take it three times as long."""
        return {name: {0: Dim.AUTO} for name in self.inputs} if self.inputs == IMAGE else None

    def example(self, batch: int, length: int) -> Inputs:
        """Make inputs of a size, the same every time."""
        generator = torch.Generator().manual_seed(100 * batch + length)

        def floats(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        def tokens(length: int) -> Tensor:
            return torch.randint(3, VOCABULARY, (batch, length), generator=generator)

        mask = torch.ones(batch, length, dtype=torch.int64)
        mask[0, : length // 3] = 0
        makers: dict[str, Callable[[], Tensor]] = {
            "input_ids": lambda: tokens(length),
            "attention_mask": lambda: mask,
            "decoder_input_ids": lambda: tokens(length - 2),
            "pixel_values": lambda: floats(batch, 3, 32, 32),
            "input_features": lambda: floats(batch, 8, 40),
            "x": lambda: floats(batch, 3, 32, 32),
            "sequence": lambda: floats(batch, length, 32),
        }
        return {name: makers[name]() for name in self.inputs}


def randomise_statistics(model: nn.Module) -> nn.Module:
    """Give batch norms statistics and weights that a fold cannot ignore."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                for tensor in (module.weight, module.bias, module.running_mean, module.running_var):
                    if tensor is not None:
                        tensor.uniform_(0.5, 1.5, generator=generator)
    return model


class Attention(nn.Module):
    """Attention with linear layers of its own for queries, keys and values, twice with the same weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(32, 32), nn.Linear(32, 16, bias=False), nn.Linear(32, 16)
        self.out, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)
        self.register_buffer("scale", torch.tensor(0.5), persistent=False)

    def forward(self, sequence: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Attend to the sequence itself."""
        q, k, v = self.q(sequence) * self.scale, self.k(sequence), self.v(sequence)
        rows, length = sequence.shape[:2]
        q, k, v = (x.view(rows, length, -1, 8).transpose(1, 2) for x in (q, k, v))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        output = self.norm(self.out(mixed.transpose(1, 2).reshape(rows, length, -1)))
        return output, {"mean": output.mean(1)}


IMAGE = ("pixel_values",)
BOTH = ("input_ids", "attention_mask", "decoder_input_ids")
EAGER = ("eager",)

ARCHITECTURES = (
    Architecture("BERT", "BertModel", ENCODER),
    Architecture("GPT-2", "GPT2LMHeadModel", GPT_2),
    Architecture("Llama", "LlamaForCausalLM", DECODER),
    Architecture("Qwen2", "Qwen2ForCausalLM", {**DECODER, **TWO, "tie_word_embeddings": True}),
    Architecture(
        "Gemma 2", "Gemma2ForCausalLM", {**DECODER, **TWO, "head_dim": 8, "query_pre_attn_scalar": 8}
    ),  # of two kinds
    Architecture(
        "Mixtral", "MixtralForCausalLM", {**DECODER, "num_local_experts": 4, "experts_implementation": "batched_mm"}
    ),
    Architecture(
        "T5",
        "T5ForConditionalGeneration",
        {**SPECIAL, "d_model": 32, "d_kv": 8, "num_layers": 1, "num_heads": 4, "d_ff": 64, "vocab_size": VOCABULARY},
        BOTH,
        attentions=EAGER,
    ),
    Architecture("ViT", "ViTModel", PATCHES, IMAGE),
    Architecture(
        "ResNet",
        "ResNetForImageClassification",
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "bottleneck"},
        IMAGE,
        attentions=EAGER,
    ),
    Architecture(
        "MobileNetV2",
        "MobileNetV2Model",
        {"depth_multiplier": 0.1, "min_depth": 4, "depth_divisible_by": 4},
        IMAGE,
        attentions=EAGER,
    ),
    Architecture(
        "CLIP",
        "CLIPModel",
        {"text_config": {**ENCODER, "eos_token_id": 2}, "vision_config": PATCHES, "projection_dim": 16},
        ("input_ids", "attention_mask", "pixel_values"),
    ),
    Architecture(
        "Whisper",
        "WhisperForConditionalGeneration",
        {**SEQ2SEQ, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 32},
        ("input_features", "decoder_input_ids"),
    ),
    Architecture("timm ResNet-18", "resnet18", {}, ("x",), "timm", EAGER),
    Architecture("plain: attention", "Attention", {}, ("sequence",), None, EAGER),
)
BY_NAME = {architecture.name: architecture for architecture in ARCHITECTURES}
