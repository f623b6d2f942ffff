"""Archives of Hugging Face models: their output types, caches as inputs and outputs, a process without the model."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from archive_models import in_every_form
from test_capture_caches import build, check_same, tokens

from fxopt_capture import capture
from fxopt_capture.archive.files import save
from fxopt_capture.huggingface.clients import NOTE, add_attributes, checked_note
from fxopt_core.errors import CaptureError

pytestmark = pytest.mark.usefixtures("without_gradients")


@pytest.fixture(scope="module")
def llama(transformers: ModuleType) -> Any:
    return build(transformers, "LlamaForCausalLM")


@pytest.fixture(scope="module")
def without_cache(llama: Any) -> Any:
    return capture(llama, (tokens(2, 5),), {"use_cache": False})


def test_output_types_are_found_in_another_process(transformers: ModuleType, tmp_path: Path) -> None:
    settings = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**settings, vocab_size=99)).eval()
    ids = tokens(2, 5)
    save(capture(model, (ids,)), tmp_path / "model.fxopt")
    torch.save({"ids": ids, "expected": model(ids).last_hidden_state}, tmp_path / "call.pt")
    script = """
        import sys, torch
        from fxopt_capture.archive.files import load
        from fxopt_core.errors import CaptureError
        sys.modules["transformers"] = None
        try:
            load("model.fxopt")
        except CaptureError as error:
            assert "are of type transformers.modeling_outputs.BaseModelOutput" in str(error), error
        else:
            raise SystemExit("it was loaded")
        del sys.modules["transformers"]
        loaded, told = load("model.fxopt"), torch.load("call.pt")
        with torch.no_grad():
            found = loaded(told["ids"])
        assert torch.equal(found.last_hidden_state, told["expected"])
        assert type(found).__module__ == "transformers.modeling_outputs"
        assert not any("modeling_bert" in name for name in sys.modules)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_captured_model_has_what_clients_ask_for(llama: Any, without_cache: Any, tmp_path: Path) -> None:
    """So do copies, pickles and archives; what is set takes the attribute's place."""
    each: Any
    for each in (copy.copy(without_cache), *in_every_form(without_cache, tmp_path)):
        assert type(each.config) is type(llama.config) and each.config.to_dict() == llama.config.to_dict()
        assert each.config is each.config is not llama.config
        assert each.generation_config.to_dict() == llama.generation_config.to_dict()
        assert (each.device, each.dtype, each.main_input_name) == (torch.device("cpu"), torch.float32, "input_ids")
        assert not each.can_generate()
        for name in (
            "input_modalities",
            "base_model_prefix",
            "_no_split_modules",
            "vocab_size",
            "all_tied_weights_keys",
        ):
            assert getattr(each, name) == getattr(llama, name)
    each.config = "mine"
    assert each.config == "mine"
    assert not hasattr(capture(torch.nn.Linear(2, 2), torch.ones(1, 2)), "config")


def test_calls_may_repeat_the_configuration(llama: Any, without_cache: Any) -> None:
    ids, repeated = (
        tokens(2, 7),
        {"use_cache": False, "return_dict": True, "output_attentions": False, "output_hidden_states": False},
    )
    check_same(without_cache(ids, **repeated), llama(ids, use_cache=False))
    check_same(without_cache.forward(input_ids=ids, **repeated), llama(ids, use_cache=False))
    with pytest.raises(CaptureError, match="captured without `output_attentions`"):
        without_cache(ids, use_cache=False, output_attentions=True)


def test_attributes_that_a_file_cannot_have_are_refused(transformers: ModuleType) -> None:
    note: dict[str, Any] = {
        "config": {},
        "config_class": "os:system",
        "generation_config": None,
        "name_or_path": "",
        "attributes": {"input_modalities": "('image', 'text')"},
    }
    assert checked_note(note) == note
    wrong: Any
    for wrong in ({}, [], {**note, "config": 1}, {**note, "name_or_path": None}, {**note, "more": 1}):
        with pytest.raises(CaptureError, match="of a model"):
            checked_note(wrong)
    for name, text in (
        ("forward", "1"),
        ("__call__", "1"),
        ("x", "f()"),
        ("x", 1),
        ("x", "(" * 500),
        ("x", "1" * 20_000),
    ):
        with pytest.raises(CaptureError, match=f"attribute {name} of a model"):
            checked_note({**note, "attributes": {name: text}})
    module: Any = torch.fx.symbolic_trace(torch.nn.ReLU())
    module.meta[NOTE] = note
    add_attributes(module)
    assert module.input_modalities == ("image", "text")
    assert type(module.config).__name__ == "PreTrainedConfig"  # only classes of configurations are looked up
