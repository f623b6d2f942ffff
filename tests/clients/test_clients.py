"""Libraries that hold Hugging Face models: sentence-transformers and PEFT."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import fxopt


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # peft reads it
def test_a_captured_adapter_takes_other_lengths() -> None:
    """An adapter that is on is part of the graph; merged first, its layers are plain, and passes merge them."""
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 50}
    base = transformers.BertModel(transformers.BertConfig(num_hidden_layers=1, **sizes))
    model = peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["query", "value"])).eval()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter)

    def texts(batch: int, length: int) -> dict[str, Tensor]:
        return {"input_ids": torch.randint(50, (batch, length)), "attention_mask": torch.ones(batch, length).long()}

    captured = fxopt.capture(model, kwargs=texts(2, 6))
    plain = copy.deepcopy(model).merge_and_unload()  # in place, and what is captured shares its weights
    merged = fxopt.MergeLinears()(fxopt.capture(plain, kwargs=texts(2, 6)), expect=1)
    for batch, length in ((1, 9), (3, 4)):
        inputs = texts(batch, length)
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state
            for found in (captured, merged):
                torch.testing.assert_close(found(**inputs).last_hidden_state, expected, rtol=1e-4, atol=1e-5)
