"""Find inputs that a model takes, from the names of its arguments, its configuration and its error messages."""

from __future__ import annotations

import inspect
import itertools
import re
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from zoo.shrink import nested

WORDS = 90
"""Ordinary tokens are 3 to 89."""
Inputs = dict[str, Any]
Shape: TypeAlias = tuple[int, ...]
Form: TypeAlias = int | Shape | tuple[str | int, ...]


@dataclass(frozen=True)
class Size:
    """A batch and a length of sequences."""

    batch: int = 2
    length: int = 9


EXAMPLE, OTHERS = Size(), (Size(3, 12), Size(1, 7))


class NoInputsError(Exception):
    """No inputs were found that the model takes."""


class Maker:
    """Makes inputs by the name of an argument, in one of several forms that models ask for."""

    def __init__(self, config: Any, size: Size, image: Shape = ()) -> None:
        self.configs, self.size = nested(config), size
        self.image = image or self._image()
        self.generator = torch.Generator().manual_seed(1000 * size.batch + size.length)

    def field(self, default: int, *names: str) -> int:
        """Return the first of these fields that a configuration or one of its parts has."""
        for name, config in itertools.product(names, self.configs):
            value = vars(config).get(name)
            if isinstance(value, list | tuple) and value and isinstance(value[0], int):
                return int(value[0])
            if isinstance(value, int) and not isinstance(value, bool):
                return value
        return default

    def floats(self, *shape: int) -> Tensor:
        """Return random numbers."""
        return torch.randn(shape, generator=self.generator)

    def tokens(self, *shape: int) -> Tensor:
        """Return ordinary tokens."""
        high = max(4, min(WORDS, self.field(WORDS, "vocab_size", "text_vocab_size")))
        return torch.randint(3, high, shape, generator=self.generator)

    def ones(self, *shape: int) -> Tensor:
        """Return a mask of ones."""
        return torch.ones(shape, dtype=torch.int64)

    def zeros(self, *shape: int) -> Tensor:
        """Return a mask of zeros."""
        return torch.zeros(shape, dtype=torch.int64)

    def numbers(self, batch: int, *numbers: int) -> Tensor:
        """Return the same numbers for each sample."""
        return torch.tensor(numbers).repeat(batch, 1)

    def forms(self, name: str) -> list[Callable[[], Any]]:
        """Return ways to make the argument of this name, the most common first; none for an unknown name."""
        batch, length = self.size.batch, self.size.length
        image = self.image
        channels = self.field(3, "num_channels", "in_channels", "in_chans")
        patch, frames = self.field(16, "patch_size"), self.field(4, "num_frames", "frames_per_clip")
        mel = self.field(80, "num_mel_bins", "feature_size", "input_feat_per_channel", "n_mels", "input_dim")
        times = 2 * self.field(64, "max_source_positions") if self._has("max_source_positions") else 128
        width = self.field(64, "hidden_size", "d_model", "n_embd")
        temporal = self.field(1, "temporal_patch_size")
        grid = [[1, 4, 4]] * batch
        context = self.field(32, "context_length")
        series = self.field(2, "num_input_channels", "input_size")
        table: dict[str, list[Callable[[], Any]]] = {
            r"(.*_)?input_ids|input_tokens": [
                lambda: self.tokens(batch, length),
                lambda: self.tokens(batch, length, self.field(4, "num_codebooks", "num_input_codebooks")),
                lambda: self.tokens(batch, self.field(4, "num_codebooks"), length),
            ],
            r"decoder_attention_mask": [lambda: self.ones(batch, length)],
            r"(.*_)?attention_mask": [lambda: self._mask(batch, length)],
            r"(mm_)?token_type_ids|langs": [lambda: torch.zeros(batch, length, dtype=torch.int64)],
            r"bbox": [lambda: self._boxes(batch, length), lambda: self._boxes(batch, length).float() / 100],
            r"pixel_mask": [lambda: self.ones(batch, *image)],
            r"(pixel_values|images?|x)(_vid.*)?|input_image|.*pixel_values": [
                *([lambda: self.floats(batch, frames, channels, *image)] if "vid" in name else []),
                lambda: self.floats(batch, channels, *image),
                lambda: self.floats(batch * 16, channels * temporal * patch * patch),
                lambda: self.floats(batch, frames, channels, *image),
                lambda: self.floats(batch, 16, channels * patch * patch),
                lambda: self.floats(batch * 16, channels, patch, patch),
                lambda: self.floats(batch, channels, 64, 64),
                lambda: self.floats(batch, channels, 224, 224),
                lambda: self.floats(batch, 1, *image),
                lambda: self.floats(batch, 2, channels, *image),
            ],
            r".*grid_thw|.*grid_thw.*|grids?|tgt_sizes|image_grid.*": [
                lambda: torch.tensor(grid), lambda: torch.tensor(grid)[:, 1:],
            ],
            r"spatial_shapes|image_sizes|target_sizes|.*position_ids_shape": [lambda: torch.tensor([[4, 4]] * batch)],
            r"pixel_position_ids|image_position_ids": [
                lambda: torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"), -1)
                .reshape(1, 16, 2)
                .repeat(batch, 1, 1)
            ],
            r"pixel_attention_mask": [lambda: self.ones(batch, 16), lambda: self.ones(batch, *image)],
            r"(.*_)?input_features|audio_features|audio_values|audio|audio_mel": [
                lambda: self.floats(batch, mel, times),
                lambda: self.floats(batch, times, mel),
                lambda: self.floats(batch, 1, times, mel),
                lambda: self.floats(batch, 1, 1920),
                lambda: self.floats(batch, 1920),
            ],
            r"(.*_)?input_values|raw_audio|waveform|speech": [
                lambda: self.floats(batch, 1920),
                lambda: self.floats(batch, 1, 1920),
                lambda: self.floats(batch, self.field(128, "max_length"), self.field(80, "num_mel_bins")),
                lambda: self.floats(batch, 1, 7680),
                lambda: self.floats(batch, 7680),
                lambda: self.floats(batch, times, mel),
            ],
            r"feature_lens|.*feature_lengths|.*_lengths|.*lens": [lambda: torch.tensor([times] * batch)],
            r"(input_|.*)features_mask|.*feature_attention_mask|padding_mask": [
                lambda: self.ones(batch, times), lambda: self.ones(batch, times).bool(),
            ],
            r"past_values": [
                lambda: self.floats(batch, context, series),
                lambda: self.floats(batch, context),
                lambda: self.floats(batch, context + 7),
                lambda: [self.floats(context)] * batch,
            ],
            r"past_time_features": [lambda: self.floats(batch, context + 7, self.field(1, "num_time_features"))],
            r"past_observed_mask": [
                lambda: torch.ones(batch, context, series), lambda: torch.ones(batch, context + 7)
            ],
            r"future_values": [lambda: self.floats(batch, self.field(8, "prediction_length"))],
            r"freq|past_is_padding|past_values_padding": [lambda: torch.zeros(batch, context, dtype=torch.int64)],
            r"(.*_)?inputs_embeds|.*hidden_states|.*_embeds|.*embeddings": [
                lambda: self.floats(batch, length, width),
                lambda: self.floats(batch * 16, channels * temporal * patch * patch),
                lambda: self.floats(batch, 16, width),
            ],
            r"audio_codes|codes|speech_tokens|.*codes": [
                lambda: self.tokens(batch, self.field(4, "num_quantizers", "num_codebooks"), length),
                lambda: self.tokens(batch, length),
            ],
            r"input_points": [lambda: self.floats(batch, 1, 2, 2)],
            r"states|actions|returns_to_go|timesteps|rewards": [lambda: self._trajectory(name, batch, length)],
            r"visual_feats": [lambda: self.floats(batch, 4, self.field(64, "visual_feat_dim"))],
            r"visual_pos": [lambda: self.floats(batch, 4, 4)],
            r"visual_embeds": [lambda: self.floats(batch, 4, self.field(64, "visual_embedding_dim"))],
            r"inputs": [
                lambda: self.floats(batch, length, self.field(64, "d_model")), lambda: self.tokens(batch, length)
            ],
            r"prompt_(pixel_values|masks)|bool_masked_pos|.*mask.*": [
                lambda: torch.zeros(batch, 16, dtype=torch.bool), lambda: self.ones(batch, length)
            ],
            r"classes_structure|merge_sizes": [lambda: torch.ones(batch, dtype=torch.int64)],
            r"noise|latents?|input_latents": [lambda: self.floats(batch, length, width)],
            r"task_inputs": [lambda: self.tokens(batch, self.field(77, "task_seq_len"))],
            r"keypoints": [lambda: self.floats(batch, 2, length, 2)],
            r"descriptors": [lambda: self.floats(batch, 2, length, self.field(64, "descriptor_dim"))],
            r"position_ids|.*positions": [lambda: torch.arange(length).repeat(batch, 1)],
        }  # fmt: skip
        return next((forms for pattern, forms in table.items() if re.fullmatch(pattern, name)), [])

    def _image(self) -> Shape:
        """Return the height and the width of images."""
        for name, each in itertools.product(
            ("image_size", "img_size", "input_size", "pretrain_image_size"), self.configs
        ):
            value = vars(each).get(name)
            if isinstance(value, list | tuple) and len(value) == 2 and all(isinstance(side, int) for side in value):
                return tuple(value)
            if isinstance(value, int) and not isinstance(value, bool):
                return value, value
        return 64, 64

    def _has(self, name: str) -> bool:
        return any(name in vars(config) for config in self.configs)

    def _mask(self, batch: int, length: int) -> Tensor:
        mask = self.ones(batch, length)
        mask[0, length - 2 :] = 0
        return mask

    def _boxes(self, batch: int, length: int) -> Tensor:
        return torch.randint(0, 50, (batch, length, 4), generator=self.generator).sort(-1).values

    def _trajectory(self, name: str, batch: int, length: int) -> Tensor:
        if name == "timesteps":
            return torch.arange(length).repeat(batch, 1)
        last = {"states": self.field(17, "state_dim"), "actions": self.field(4, "act_dim")}.get(name, 1)
        return self.floats(batch, length, last)


@dataclass(frozen=True)
class Recipe:
    """The arguments that a model takes, each with the number of its form, or with its shape.

    A shape is that of one sample, or where it begins with 0, that of the 16 rows of one; -1 stands for the length of
    sequences. A method of `Maker` before it makes other than floats. `image` is the size of images where the
    configuration does not give it.
    """

    forms: Mapping[str, Form]
    image: Shape = ()

    def make(self, config: Any, size: Size) -> Inputs:
        """Make inputs of a size, the same every time."""
        maker = Maker(config, size, self.image)
        return {name: self._made(maker, name, form) for name, form in self.forms.items()}

    def _made(self, maker: Maker, name: str, form: Form) -> Any:
        if isinstance(form, int):
            return maker.forms(name)[form]()
        method = form[0] if isinstance(form[0], str) else "floats"
        shape = [maker.size.length if each == -1 else each for each in form if isinstance(each, int)]
        rows = (16 * maker.size.batch, *shape[1:]) if shape and shape[0] == 0 else (maker.size.batch, *shape)
        return getattr(maker, method)(*rows)


def find_recipe(model: nn.Module, config: Any, own: Mapping[str, Form] | None = None, *, seconds: float = 3) -> Recipe:
    """Return the first recipe with which the model runs, trying `own` first.

    Raises:
        NoInputsError: the model ran with none; the message is that of the model's first failure.
    """
    first: Exception | None = None
    tried: list[Recipe] = []
    waiting = [Recipe(own or dict.fromkeys(_needed(model), 0))]
    end = time.process_time() + seconds
    while waiting and time.process_time() < end:
        recipe = waiting.pop(0)
        if recipe in tried:
            continue
        tried.append(recipe)
        try:
            inputs = recipe.make(config, EXAMPLE)
            with torch.no_grad():
                model(**inputs)
        except Exception as error:  # whatever the model raises
            first = first or error
            likely, others = _mended(model, config, recipe, error)
            waiting = [*likely, *waiting, *others]
            continue
        return recipe
    raise NoInputsError(f"{type(first).__name__}: {first}") from first


def _parameters(model: nn.Module) -> dict[str, inspect.Parameter]:
    return {
        name: parameter
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }


def _needed(model: nn.Module) -> list[str]:
    """Return the main input, arguments without a default, and arguments that belong to these."""
    parameters, main = _parameters(model), getattr(model, "main_input_name", "input_ids")
    mains = {main} if isinstance(main, str) else set(main)
    maker = Maker(model.config, EXAMPLE)
    names = {name for name, parameter in parameters.items() if parameter.default is parameter.empty}
    names |= mains & set(parameters)
    if "input_ids" in parameters and maker.forms("input_ids"):
        names.add("input_ids")
    if "input_ids" in names and "attention_mask" in parameters and "input_ids" in mains:
        names.add("attention_mask")
    if getattr(model.config, "is_encoder_decoder", False) and "decoder_input_ids" in parameters:
        names.add("decoder_input_ids")
    if not names:
        names = set(list(parameters)[:1])
    return [name for name in parameters if name in names and maker.forms(name)]


def _mended(model: nn.Module, config: Any, recipe: Recipe, error: Exception) -> tuple[list[Recipe], list[Recipe]]:
    """Return recipes to try after a failure: those that the message or the failing line suggests, and others."""
    maker, forms, message = Maker(config, EXAMPLE), dict(recipe.forms), f"{error}"
    absent = [name for name in _parameters(model) if name not in forms and maker.forms(name)]
    modal = [name for name in absent if re.fullmatch(r"pixel_values|decoder_input_ids|bbox|.*grid_thw|input_\w+", name)]
    named = [name for name in absent if re.search(rf"\b{name}\b", f"{message} {_failing_line(error)}")]
    likely = [{**forms, name: 0} for name in (named or (modal if "None" in message else []))]
    others = [{**forms, name: 0} for name in modal]
    numbered = {name: form for name, form in forms.items() if isinstance(form, int)}
    others += [{**forms, name: form + 1} for name, form in numbered.items() if form + 1 < len(maker.forms(name))]
    if len(forms) > 1:
        optional = [name for name in ("attention_mask", "input_ids") if name in forms]
        others += [{other: form for other, form in forms.items() if other != name} for name in optional]
    hinted = [] if recipe.image else _hinted(recipe, message)
    return [*hinted, *(replace(recipe, forms=each) for each in likely)], [
        replace(recipe, forms=each) for each in others
    ]


def _failing_line(error: Exception) -> str:
    """Return the innermost line of a model's own source."""
    lines = [f"{frame.line}" for frame in traceback.extract_tb(error.__traceback__) if "/models/" in frame.filename]
    return lines[-1] if lines else ""


def _hinted(recipe: Recipe, message: str) -> list[Recipe]:
    """Return recipes with the size of images or the number of features that a message asks for."""
    if found := re.search(r"doesn't match model \(?(\d+)(?:\*(\d+))?", message):
        return [replace(recipe, image=(int(found[1]), int(found[2] or found[1])))]
    shapes: list[Shape] = []
    if found := re.search(r"shapes cannot be multiplied \(\d+x\d+ and (\d+)x\d+\)|normalized_shape=\[(\d+)\]", message):
        features = int(found[1] or found[2])
        shapes = [(16, features), (0, features), (128, features)]
    if found := re.search(r"weight of size \[\d+, (\d+), \d+\]", message):
        shapes = [(int(found[1]), 1920), (int(found[1]), 128)]
    floats = [name for name in recipe.forms if re.search(r"values|features|images|frames|inputs$", name)]
    if any(isinstance(recipe.forms[name], tuple) for name in floats):
        return []
    return [replace(recipe, forms={**recipe.forms, name: shape}) for shape in shapes for name in floats]
