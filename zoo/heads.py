"""Models with heads: one at least for each common task, steps with a cache, images in text, bfloat16, train mode."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zoo.inputs import EXAMPLE, OTHERS, Inputs, Maker, NoInputsError, Recipe, Size, find_recipe
from zoo.own import FIELDS, INPUTS
from zoo.shrink import WIDTH, small
from zoo.trial import Built

HEADS: tuple[str, ...] = (
    *("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM"),
    *("GPT2LMHeadModel+decode", "LlamaForCausalLM+decode", "Gemma2ForCausalLM+decode", "MambaForCausalLM"),
    *("BartForConditionalGeneration", "T5ForConditionalGeneration", "MarianMTModel", "PegasusForConditionalGeneration"),
    *("BertForMaskedLM", "RobertaForMaskedLM", "DebertaV2ForMaskedLM", "ModernBertForMaskedLM"),
    *("BertForSequenceClassification", "DistilBertForSequenceClassification", "LlamaForSequenceClassification"),
    *("BertForTokenClassification", "ElectraForTokenClassification", "LayoutLMForTokenClassification"),
    *("BertForQuestionAnswering", "RobertaForQuestionAnswering", "DistilBertForQuestionAnswering"),
    *("ViTForImageClassification", "ResNetForImageClassification", "ConvNextForImageClassification"),
    *("SwinForImageClassification", "MobileNetV2ForImageClassification", "BeitForImageClassification"),
    *("YolosForObjectDetection", "RTDetrForObjectDetection", "DFineForObjectDetection", "LwDetrForObjectDetection"),
    *("SegformerForSemanticSegmentation", "BeitForSemanticSegmentation", "MobileViTForSemanticSegmentation"),
    *("DPTForDepthEstimation", "GLPNForDepthEstimation", "Swin2SRForImageSuperResolution"),
    *("Wav2Vec2ForCTC", "HubertForCTC", "WavLMForCTC", "Wav2Vec2ForSequenceClassification"),
    *("WhisperForConditionalGeneration", "ASTForAudioClassification", "SpeechT5ForTextToSpeech"),
    *("LlavaForConditionalGeneration+images", "Qwen2_5_VLForConditionalGeneration+images"),
    *("PaliGemmaForConditionalGeneration+images", "Gemma3ForConditionalGeneration+images"),
    *("InternVLForConditionalGeneration+images", "BlipForConditionalGeneration", "ViltForQuestionAnswering"),
    *("BertForMaskedLM+bf16", "LlamaForCausalLM+bf16", "ViTForImageClassification+bf16"),
    *("ResNetForImageClassification+train", "BertForMaskedLM+train", "LlamaForCausalLM+train"),
)  # fmt: skip
"""Classes of transformers, and after a plus the way that they are called."""


def build(name: str) -> Built:
    """Build a head by its name in `HEADS`."""
    cls, _, way = name.partition("+")
    head = getattr(importlib.import_module("transformers"), cls)
    return small(head.config_class, lambda config: _built(head, config, way), FIELDS.get(cls))


def _built(head: Any, config: Any, way: str) -> Built:
    config.use_cache = way == "decode" or config.__dict__.get("use_cache", False)
    if way == "train":
        without_dropout(config)
    model = head(config).eval()
    if way == "images":
        return with_images(model, config, find_recipe(model, config))
    recipe = find_recipe(model, config, INPUTS.get(type(model).__name__))
    if way == "decode":
        return Built(model, _step(model, recipe, 9), [_step(model, recipe, 13)])
    sizes = [recipe.make(config, size) for size in (EXAMPLE, *OTHERS)]
    if way == "bf16":
        model, sizes = model.bfloat16(), [halved(inputs) for inputs in sizes]
    return Built(model.train(way == "train"), sizes[0], sizes[1:])


def without_dropout(config: Any) -> None:
    """Let a model compute the same in train mode, except for batch norms."""
    for name, value in list(vars(config).items()):
        if isinstance(value, float) and re.search("drop|_prob$", name):
            setattr(config, name, 0.0)


def halved(inputs: Mapping[str, Any]) -> Inputs:
    """Return inputs in bfloat16."""
    return {
        name: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def _step(model: nn.Module, recipe: Recipe, length: int) -> Inputs:
    """Return the inputs of a step after a prefix of some length: one token, and the cache of the prefix."""
    inputs = recipe.make(model.config, Size(2, length))
    ids = inputs["input_ids"]
    with torch.no_grad():
        output = model(input_ids=ids[:, :-1], use_cache=True)
    mask = {"attention_mask": torch.ones_like(ids)} if "attention_mask" in inputs else {}
    (name,) = output.keys() & inspect.signature(model.forward).parameters  # the cache, which is an output and an input
    return {"input_ids": ids[:, -1:], name: output[name], **mask}


def with_images(model: nn.Module, config: Any, recipe: Recipe) -> Built:
    """Put as many image tokens into the text of a recipe as the model says that an image needs.

    Raises:
        NoInputsError: no images were found that the model takes.
    """
    token = next((vars(config)[name] for name in ("image_token_id", "image_token_index") if name in vars(config)), None)
    if token is None:
        raise NoInputsError("the configuration names no token of images")
    types = {"token_type_ids": 0} if "token_type_ids" in inspect.signature(model.forward).parameters else {}
    form, count, message = 0, 4, ""
    forms = {**recipe.forms, **types}
    for _ in range(12):
        recipe = Recipe({**forms, "pixel_values": form})
        sizes = [Size(2, count + 4), Size(3, count + 4), Size(2, count + 7)]
        made = [_placed(recipe.make(config, size), token, count) for size in sizes]
        try:
            with torch.no_grad():
                model(**made[0])
        except Exception as error:  # whatever the model raises
            message = f"{error}"
            found = re.search(r"tokens:? (\d+)\D+features:? (\d+)", message)
            if "mm_token_type_ids" in message:
                forms = {**forms, "mm_token_type_ids": 0}
            elif found:  # some count the tokens, and the numbers of the features
                tokens, features = int(found[1]), int(found[2])
                count = max(1, count // WIDTH if tokens == features else count * features // max(1, tokens))
            elif "image_grid_thw" not in forms and "grid" in message + str(model.forward.__doc__):
                forms, form = {**forms, "image_grid_thw": 0}, 1
            elif form + 1 < len(Maker(config, EXAMPLE).forms("pixel_values")):
                form += 1
            continue
        return Built(model, made[0], made[1:])
    raise NoInputsError(f"no images that the model takes: {message}")


def _placed(inputs: Inputs, token: int, count: int) -> Inputs:
    for name, value in (("input_ids", token), ("mm_token_type_ids", 1)):
        if name in inputs:
            inputs[name][:, 2 : 2 + count] = value
    if "attention_mask" in inputs:
        inputs["attention_mask"][:] = 1
    return inputs
