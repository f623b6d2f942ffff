"""Models whose parts decide on a cache, and not the model's own configuration, return one from the graph too."""

from __future__ import annotations

import copy
from types import ModuleType

import torch
from cache_names import CACHE

from fxopt_capture import capture


def test_a_part_decides_whether_there_is_a_cache(transformers: ModuleType) -> None:
    small = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**small, num_key_value_heads=2, vocab_size=32, use_cache=False)
    model = transformers.LlamaForCausalLM(config).eval()
    model.model.config = copy.deepcopy(config)
    model.model.config.use_cache = True
    ids = torch.arange(6).view(2, 3)
    expected = model(ids)
    found = capture(model, (ids,))(ids)
    assert list(found) == list(expected) == ["logits", CACHE]
    torch.testing.assert_close(found.logits, expected.logits)
    assert found.past_key_values.get_seq_length() == 3
