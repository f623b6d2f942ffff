"""Caches of keys and values: returned by captured decoders, taken by captured decoding steps, changed in place."""

from __future__ import annotations

import copy
import inspect
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from archive_models import in_every_form
from cache_names import CACHE
from hostile_archives import DOCUMENT, entries_of, packed
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fxopt_capture import capture, load, save, symbolic_trace
from fxopt_capture.call.structures import register_structures
from fxopt_core.errors import CaptureError

VOCABULARY = 99
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": VOCABULARY, **SPECIAL}
LLAMA = {**SIZES, "num_key_value_heads": 2, "intermediate_size": 64}
SEQ2SEQ = {"d_model": 32, "vocab_size": VOCABULARY, "decoder_start_token_id": 1, **SPECIAL}
MODELS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": LLAMA,
    "Gemma2ForCausalLM": {**LLAMA, "num_hidden_layers": 2, "head_dim": 8, "sliding_window": 8},
    "GPT2LMHeadModel": {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": VOCABULARY, **SPECIAL},
    "OPTForCausalLM": {**SIZES, "ffn_dim": 64, "word_embed_proj_dim": 32},
    "T5ForConditionalGeneration": {**SEQ2SEQ, "d_kv": 8, "num_layers": 1, "num_heads": 4, "d_ff": 64},
}


def build(transformers: ModuleType, name: str, **changes: object) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**{**MODELS[name], **changes})).eval()


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (batch, length))


def source(name: str, batch: int) -> dict[str, Tensor]:
    """What the encoder takes, for models that have one."""
    return {"input_ids": tokens(batch, 7)} if name.startswith("T5") else {}


def check_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert pytree.tree_structure(found) == pytree.tree_structure(expected)
    for left, right in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


pytestmark = pytest.mark.usefixtures("without_gradients")
BY_DAY = ("T5ForConditionalGeneration",)  # both kinds of caches in one; tests of decoders alone are below


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in BY_DAY else pytest.mark.nightly) for name in MODELS]
)
def test_prefill_and_three_steps(transformers: ModuleType, name: str) -> None:
    """The graph of the first call makes the cache, that of a step takes it and adds to it, as the model does."""
    model = build(transformers, name)
    ids = "decoder_input_ids" if source(name, 1) else "input_ids"
    first = symbolic_trace(model, example_inputs={**source(name, 2), ids: tokens(2, 6), "use_cache": True})
    inputs = {**source(name, 3), ids: tokens(3, 5)}
    expected, found = model(**inputs, use_cache=True), first(**inputs, use_cache=True)
    check_same(found, expected)
    assert type(found.past_key_values) is type(expected.past_key_values)

    encoded = {}
    if source(name, 1):
        states = expected.encoder_last_hidden_state
        encoded = {"encoder_outputs": transformers.modeling_outputs.BaseModelOutput(last_hidden_state=states)}
    example = {**encoded, ids: tokens(3, 1), CACHE: copy.deepcopy(expected.past_key_values)}
    step = capture(model, kwargs={**example, "use_cache": True})
    assert example[CACHE].get_seq_length() == 5
    cache, own = found.past_key_values, expected.past_key_values
    for length in (6, 7, 8):
        chosen = {**encoded, ids: expected.logits[:, -1:].argmax(-1), "use_cache": True}
        expected, found = model(**chosen, **{CACHE: own}), step(**chosen, **{CACHE: cache})
        check_same(found, expected)
        assert found.past_key_values is cache
        assert cache.get_seq_length() == length


def test_a_step_within_a_window_takes_every_length_until_it_is_full(transformers: ModuleType, tmp_path: Path) -> None:
    """Layers count their tokens in a number, which is the number of keys until the window is full; in archives too.

    Of two layers, one has a window.
    """
    model = build(transformers, "Gemma2ForCausalLM")
    step = capture(model, (tokens(2, 1),), {CACHE: model(tokens(2, 5)).past_key_values})
    save(step, tmp_path / "step.fxopt")
    for length, graph_module in zip((1, 3, 6, 7), [step, load(tmp_path / "step.fxopt")] * 2, strict=True):
        own = model(tokens(3, length)).past_key_values
        cache, token = copy.deepcopy(own), tokens(3, 1)
        check_same(graph_module(token, **{CACHE: cache}), model(token, **{CACHE: own}))
        check_same(cache, own)
        assert cache.get_seq_length() == own.get_seq_length() == length + 1
    full = model(tokens(3, 8)).past_key_values
    with pytest.raises(CaptureError, match=r"a DynamicCache .* and other contents"):
        step(tokens(3, 1), **{CACHE: full})
    assert full.get_seq_length() == 8


def test_caches_are_known_to_pytrees_by_the_name_that_transformers_gives(transformers: ModuleType) -> None:
    from transformers.exporters import exporter_dynamo

    register_structures([transformers.DynamicCache()])
    given = pytree.SUPPORTED_SERIALIZED_TYPES[transformers.DynamicCache].serialized_type_name
    assert given == exporter_dynamo._class_to_path(transformers.DynamicCache)
    exporter_dynamo.register_pytree_node(transformers.DynamicCache)  # finds it registered


@pytest.fixture(scope="module")
def llama(transformers: ModuleType) -> Any:
    return build(transformers, "LlamaForCausalLM")


@pytest.fixture
def filled(transformers: ModuleType, llama: Any) -> Any:
    """A cache of two rows of four tokens."""
    return llama(tokens(2, 4), use_cache=True).past_key_values


@pytest.fixture(scope="module")
def step(llama: Any) -> Any:
    with torch.no_grad():
        cache = llama(tokens(2, 4)).past_key_values
        mask = torch.ones(2, 5, dtype=torch.int64)
        return capture(llama, kwargs={"input_ids": tokens(2, 1), "attention_mask": mask, CACHE: cache})


def test_the_model_decides_whether_there_is_a_cache(
    transformers: ModuleType, llama: Any, step: Any, tmp_path: Path
) -> None:
    """A cache that a graph has made is that of the model: a step goes on with it."""
    ids = tokens(2, 4)
    captured = capture(llama, (ids,))
    for each in in_every_form(captured, tmp_path):
        for size in ((2, 4), (1, 3), (4, 9)):
            given = tokens(*size)
            check_same(each(given), llama(given))
        found, expected = each(ids, use_cache=True), llama(ids)
        check_same(found, expected)
        more = {"input_ids": tokens(2, 1), "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
        check_same(step(**more, **{CACHE: found[CACHE]}), llama(**more, **{CACHE: expected[CACHE]}))
    with pytest.raises(CaptureError, match="use_cache=True baked in, and was called with use_cache=False"):
        captured(ids, use_cache=False)
    without = build(transformers, "LlamaForCausalLM", use_cache=False)
    assert list(capture(without, (ids,))(ids)) == ["logits"]


def test_masked_steps_take_a_batch_of_one(transformers: ModuleType, llama: Any, step: Any) -> None:
    model = build(transformers, "OPTForCausalLM")  # counts positions from the mask
    example = {"input_ids": tokens(2, 1), "attention_mask": torch.ones(2, 9).long(), CACHE: model(tokens(2, 8))[CACHE]}
    for decoder, graph_module in ((llama, step), (model, capture(model, (), example))):
        for batch, length in ((1, 8), (3, 5), (1, 4)):
            cache = decoder(tokens(batch, length))[CACHE]
            call = {"input_ids": tokens(batch, 1), "attention_mask": torch.ones(batch, length + 1).long()}
            expected = decoder(**call, **{CACHE: copy.deepcopy(cache)})
            check_same(graph_module(**call, **{CACHE: cache}).logits, expected.logits)


def test_steps_refuse_what_they_are_not_valid_for(llama: Any, step: Any, filled: Any) -> None:
    ids, mask = tokens(2, 1), torch.ones(2, 5, dtype=torch.int64)
    before = pytree.tree_leaves(filled)
    with pytest.raises(CaptureError, match="input_ids"):
        step(tokens(3, 1), mask, **{CACHE: filled})
    with pytest.raises(CaptureError, match="attention_mask"):
        step(ids, mask[:, :4], **{CACHE: filled})
    with pytest.raises(CaptureError, match=f"needs `{CACHE}`"):
        step(ids, mask)
    with pytest.raises(CaptureError, match=rf"`{CACHE}` .* is a tuple of 2, .* with a DynamicCache"):
        step(ids, mask, **{CACHE: (ids, ids)})
    assert all(left is right for left, right in zip(pytree.tree_leaves(filled), before, strict=True))


def test_an_empty_cache_is_an_input_too(transformers: ModuleType, llama: Any) -> None:
    ids = tokens(2, 4)
    example = transformers.DynamicCache(config=llama.config)
    captured = capture(llama, (ids,), {CACHE: example})
    assert example.get_seq_length() == 0
    own, cache = (transformers.DynamicCache(config=llama.config) for _ in range(2))
    check_same(captured(ids, **{CACHE: cache}), llama(ids, **{CACHE: own}))
    check_same(cache, own)
    with pytest.raises(CaptureError, match=CACHE):
        captured(ids, **{CACHE: own})  # no longer empty


def test_steps_return_tuples_where_the_model_does(llama: Any, filled: Any) -> None:
    inputs = {"input_ids": tokens(2, 1), "return_dict": False}
    captured = capture(llama, kwargs={**inputs, CACHE: filled})
    own, cache = copy.deepcopy(filled), copy.deepcopy(filled)
    found = captured(**inputs, **{CACHE: cache})
    check_same(found, llama(**inputs, **{CACHE: own}))
    assert found[1] is cache


def test_copies_pickles_and_archives_of_steps(llama: Any, step: Any, filled: Any, tmp_path: Path) -> None:
    inputs = {"input_ids": tokens(2, 1), "attention_mask": torch.ones(2, 5, dtype=torch.int64)}
    expected = llama(**inputs, **{CACHE: copy.deepcopy(filled)})
    for other in (copy.copy(step), *in_every_form(step, tmp_path)):
        cache = copy.deepcopy(filled)
        found = other(**inputs, **{CACHE: cache})
        check_same(found, expected)
        assert found.past_key_values is cache and cache.get_seq_length() == 5
        with pytest.raises(CaptureError, match="attention_mask"):
            other(inputs["input_ids"], inputs["attention_mask"][:, :3], **{CACHE: cache})


def test_archives_of_another_release(step: Any, tmp_path: Path) -> None:
    saved, other = tmp_path / "saved.fxopt", tmp_path / "other.fxopt"
    save(step, saved)
    entries = entries_of(saved)
    fields = f'"logits","{CACHE}"'.encode()
    assert fields in entries[DOCUMENT]
    document = entries[DOCUMENT].replace(fields, b'"logits","memory"')
    other.write_bytes(packed({**entries, DOCUMENT: document}))
    with pytest.raises(CaptureError, match="it returns a CausalLMOutputWithPast with logits, memory, which transf"):
        load(other)


class Wrapped(nn.Module):
    """A module of one's own around a decoder."""

    def __init__(self, decoder: nn.Module) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Tensor, cache: Any) -> Any:
        output = self.decoder(ids, **{CACHE: cache})
        return output.logits.argmax(-1), output.past_key_values


def test_caches_of_a_module_around_a_decoder(llama: Any, filled: Any) -> None:
    wrapped = Wrapped(llama).eval()
    captured = capture(wrapped, (tokens(2, 1), copy.deepcopy(filled)))
    ids, cache = tokens(2, 1), copy.deepcopy(filled)
    check_same(captured(ids, cache), wrapped(ids, filled))
    check_same(cache, filled)


class Forgetful(nn.Module):
    """Does not return the cache that it fills."""

    def forward(self, keys: Tensor, cache: Any) -> Any:
        return cache.update(keys, 2 * keys, 0)[0].sum()


def test_a_cache_that_is_not_returned_is_refused(filled: Any) -> None:
    with pytest.raises(CaptureError, match="Forgetful adds to `cache` and does not return it"):
        capture(Forgetful().eval(), (torch.ones(2, 2, 1, 8), filled))


def test_a_cache_that_no_graph_can_hold_is_left_out_and_said(
    llama: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    forward = type(llama).forward

    def fussy(self: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("use_cache"):
            raise NotImplementedError("a cache of its own kind")
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(llama), "forward", fussy)
    monkeypatch.setattr(fussy, "__signature__", inspect.signature(forward), raising=False)
    ids = tokens(2, 4)
    with caplog.at_level(logging.WARNING, "fxopt_capture"):
        captured = capture(llama, (ids,))
    assert list(captured(ids)) == ["logits"]
    assert "LlamaForCausalLM makes no cache of keys and values (use_cache=False)" in caplog.text
    assert "a cache of its own kind" in caplog.text
    with pytest.raises(CaptureError, match="a cache of its own kind"):
        capture(llama, (ids,), {"use_cache": True})
