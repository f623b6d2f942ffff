"""Archives of Hugging Face models: their output types, caches as inputs and outputs, a process without the model."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from cache_names import CACHE, FORMER, IS_RENAMED
from hostile_archives import DOCUMENT, entries_of, packed
from torch import Tensor
from torch.utils import _pytree as pytree

from fxopt_capture import capture
from fxopt_capture.archive.files import load, save
from fxopt_capture.huggingface.clients import NOTE, add_attributes, checked_note
from fxopt_core.errors import CaptureError

LLAMA = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
}


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def llama(transformers: ModuleType) -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA)).eval()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, 99, (batch, length))


def check_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    for left, right in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


def test_a_cache_is_returned(llama: Any, tmp_path: Path) -> None:
    captured = capture(llama, (tokens(2, 5),), {"use_cache": True})
    save(captured, tmp_path / "model.fxopt")
    loaded = load(tmp_path / "model.fxopt")
    for size in ((2, 5), (1, 3), (4, 9)):
        ids = tokens(*size)
        check_same(loaded(ids, use_cache=True), llama(ids, use_cache=True))


def test_a_step_changes_the_caller_s_cache(llama: Any, tmp_path: Path) -> None:
    mask = torch.ones(2, 5, dtype=torch.int64)
    cache = llama(tokens(2, 4)).past_key_values
    captured = capture(llama, kwargs={"input_ids": tokens(2, 1), "attention_mask": mask, CACHE: cache})
    save(captured, tmp_path / "step.fxopt")
    loaded = load(tmp_path / "step.fxopt")
    for batch, length in ((2, 4), (3, 7)):
        own = llama(tokens(batch, length)).past_key_values
        inputs = {"input_ids": tokens(batch, 1), "attention_mask": torch.ones(batch, length + 1, dtype=torch.int64)}
        given = copy.deepcopy(own)
        found, expected = loaded(**inputs, **{CACHE: given}), llama(**inputs, **{CACHE: own})
        check_same(found, expected)
        assert found.past_key_values is given
    with pytest.raises(CaptureError, match="attention_mask"):
        loaded(tokens(2, 1), mask[:, :3], **{CACHE: llama(tokens(2, 4)).past_key_values})


def test_archives_of_another_release(llama: Any, tmp_path: Path) -> None:
    """What fits is taken; what does not is refused, with both releases named."""
    saved, other = tmp_path / "saved.fxopt", tmp_path / "other.fxopt"
    save(capture(llama, (tokens(2, 1),), {CACHE: llama(tokens(2, 4)).past_key_values}), saved)
    entries = entries_of(saved)

    document = entries[DOCUMENT].replace(version("transformers").encode(), b"5.0.0")
    other.write_bytes(packed({**entries, DOCUMENT: document}))
    loaded, own = load(other), llama(tokens(3, 4)).past_key_values
    token, given = tokens(3, 1), copy.deepcopy(own)
    check_same(loaded(token, **{CACHE: given}), llama(token, **{CACHE: own}))
    with pytest.raises(CaptureError, match=r"\(saved with transformers 5.0.0, opened with .*\) needs `"):
        loaded(token)

    fields = f'"logits","{CACHE}"'.encode()
    assert fields in entries[DOCUMENT]
    document = entries[DOCUMENT].replace(fields, b'"logits","memory"')
    other.write_bytes(packed({**entries, DOCUMENT: document}))
    with pytest.raises(CaptureError, match="it returns a CausalLMOutputWithPast with logits, memory, which transf"):
        load(other)


@pytest.mark.skipif(not IS_RENAMED, reason="transformers 5.24 has renamed the cache")
def test_a_cache_by_its_former_name(llama: Any, tmp_path: Path) -> None:
    """Capture, the graph and the archive take both names, and warn of the former one, as the model does."""
    cache = llama(tokens(2, 4)).cache
    with pytest.warns(FutureWarning, match="`past_key_values` is deprecated: LlamaForCausalLM calls it `cache`"):
        captured = capture(llama, (tokens(2, 1),), {FORMER: copy.deepcopy(cache)})
    save(captured, tmp_path / "step.fxopt")
    for module in (captured, load(tmp_path / "step.fxopt")):
        token, own = tokens(2, 1), copy.deepcopy(cache)
        expected = llama(token, cache=copy.deepcopy(cache))
        with pytest.warns(FutureWarning, match="the captured LlamaForCausalLM calls it `cache`"):
            found = module(token, past_key_values=own)
        check_same(found, expected)
        assert found.cache is own and found["past_key_values"] is own
        with pytest.raises(CaptureError, match="`cache` was given to the captured LlamaForCausalLM twice"):
            module(token, past_key_values=own, cache=own)


def test_a_step_within_a_sliding_window(transformers: ModuleType, tmp_path: Path) -> None:
    """The number of tokens in a cache is not fixed by saving, and a single token is taken as before."""
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}
    config = transformers.MistralConfig(vocab_size=99, num_hidden_layers=2, sliding_window=16, **sizes)
    model = transformers.MistralForCausalLM(config).eval()
    captured = capture(model, (tokens(2, 1),), {CACHE: model(tokens(2, 5)).past_key_values})
    save(captured, tmp_path / "step.fxopt")
    loaded = load(tmp_path / "step.fxopt")
    for batch, length in ((2, 5), (3, 9), (2, 15)):
        own = model(tokens(batch, length)).past_key_values
        given, token = copy.deepcopy(own), tokens(batch, 1)
        check_same(loaded(token, **{CACHE: given}), model(token, **{CACHE: own}))
        assert given.get_seq_length() == length + 1


def test_dtypes_that_the_model_reads(llama: Any, tmp_path: Path) -> None:
    """What guards know besides what the program says comes back."""
    captured = capture(llama, kwargs={"inputs_embeds": torch.randn(2, 4, 32), "use_cache": False})
    save(captured, tmp_path / "model.fxopt")
    loaded: Any = load(tmp_path / "model.fxopt")
    assert loaded._guards_fn.specs == captured._guards_fn.specs  # type: ignore[union-attr]
    assert loaded._guards_fn.module_dtype == captured._guards_fn.module_dtype  # type: ignore[union-attr]
    assert loaded._guards_fn.conditions == captured._guards_fn.conditions  # type: ignore[union-attr]


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


def test_a_captured_model_has_what_clients_ask_for(llama: Any, tmp_path: Path) -> None:
    """So do copies, pickles and archives; what is set takes the attribute's place."""
    captured: Any = capture(llama, (tokens(2, 5),), {"use_cache": False})
    save(captured, tmp_path / "model.fxopt")
    others: Any = copy.copy(captured), copy.deepcopy(captured), pickle.loads(pickle.dumps(captured))
    each: Any
    for each in (captured, *others, load(tmp_path / "model.fxopt")):
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
    captured.config = "mine"
    assert captured.config == "mine"
    assert not hasattr(capture(torch.nn.Linear(2, 2), torch.ones(1, 2)), "config")


def test_calls_may_repeat_the_configuration(llama: Any) -> None:
    captured: Any = capture(llama, (tokens(2, 5),), {"use_cache": False})
    ids, repeated = (
        tokens(2, 7),
        {"use_cache": False, "return_dict": True, "output_attentions": False, "output_hidden_states": False},
    )
    check_same(captured(ids, **repeated), llama(ids, use_cache=False))
    check_same(captured.forward(input_ids=ids, **repeated), llama(ids, use_cache=False))
    with pytest.raises(CaptureError, match="captured without `output_attentions`"):
        captured(ids, use_cache=False, output_attentions=True)


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
