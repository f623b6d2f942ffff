"""`FoldLayerNormAffine` on models that others wrote: layer norms, and RMS norms that are written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxopt_capture import capture
from fxopt_checkpoints import load_original_state_dict, original_state_dict
from fxopt_core import history
from fxopt_norm import FoldLayerNormAffine

transformers: Any = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaModel": SIZES | {"num_key_value_heads": 2, "vocab_size": 60, "use_cache": False},
    "ViTModel": SIZES | {"image_size": 16, "patch_size": 8},
}


@pytest.mark.parametrize("name", MODELS)
def test_two_norms_of_each_block(name: str) -> None:
    cls: Any = getattr(transformers, name)

    def made() -> Any:
        model = cls(cls.config_class(**MODELS[name])).eval()
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "norm" in key:
                    parameter.normal_(1.0, 0.2)
        return model

    torch.manual_seed(0)
    model, other = made(), made()
    given = {"pixel_values": torch.randn(2, 3, 16, 16)}
    if name == "LlamaModel":
        given = {"input_ids": torch.randint(0, 60, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.long)}
    graph_module = capture(model, (), given)
    FoldLayerNormAffine()(graph_module, expect=4)
    assert history(graph_module)[-1].refusals == ()
    assert not [
        key for key in graph_module.state_dict() if "layernorm" in key and "folded" not in key and "final" in key
    ]
    with torch.no_grad():
        expected, wanted = (each(**given).last_hidden_state for each in (model, other))
        torch.testing.assert_close(graph_module(**given).last_hidden_state, expected, rtol=0, atol=1e-5)
        again = made()
        again.load_state_dict(original_state_dict(graph_module))
        torch.testing.assert_close(again(**given).last_hidden_state, expected, rtol=0, atol=1e-5)
        load_original_state_dict(graph_module, other.state_dict())
        torch.testing.assert_close(graph_module(**given).last_hidden_state, wanted, rtol=0, atol=1e-5)
