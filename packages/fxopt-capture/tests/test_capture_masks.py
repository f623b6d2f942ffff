"""Masks of other kinds of dtype than at capture: taken where model and graph do the same with them."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt_capture import capture, load, save
from fxopt_core.errors import CaptureError

KINDS = (torch.bool, torch.int64, torch.int32, torch.float32)
IDS = torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 1]])


class Pooled(nn.Module):
    """Reads its mask as numbers of 0 and 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 3)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        weights = mask[..., None].to(torch.bool).to(torch.float32)
        result: Tensor = (self.embedding(ids) * weights).sum(1) / weights.sum(1)
        return result


class Additive(Pooled):
    """Adds a mask of numbers, and fills by one of booleans, as attention does."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        states = self.embedding(ids).sum(-1)
        result: Tensor = states.masked_fill(~mask, -9.0) if mask.dtype == torch.bool else states + mask
        return result


class Negated(Pooled):
    """Takes no booleans: torch subtracts none."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = self.embedding(ids) * (1 - mask)[..., None]
        return result


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_all_kinds_are_taken_where_the_model_takes_all(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Pooled().eval()
    captured = capture(model, (IDS, MASK.to(dtype)))
    save(captured, tmp_path / "model.pt2")
    for each in (captured, copy.deepcopy(captured), pickle.loads(pickle.dumps(captured)), load(tmp_path / "model.pt2")):
        for other in KINDS:
            assert torch.equal(each(IDS, MASK.to(other)), model(IDS, MASK.to(other)))
        with pytest.raises(CaptureError, match=r"`mask` has dtype torch\.complex64"):
            each(IDS, MASK.to(torch.complex64))


def test_what_a_model_does_otherwise_with_another_kind_is_refused() -> None:
    model = Additive().eval()
    for dtype, wrong in ((torch.bool, torch.int64), (torch.int64, torch.bool)):
        captured = capture(model, (IDS, MASK.to(dtype)))
        assert torch.equal(captured(IDS, MASK.to(dtype)), model(IDS, MASK.to(dtype)))
        with pytest.raises(CaptureError, match=rf"`mask` has dtype {wrong}"):
            captured(IDS, MASK.to(wrong))


def test_what_a_model_does_not_take_is_refused() -> None:
    captured = capture(Negated().eval(), (IDS, MASK))
    with pytest.raises(CaptureError, match=r"`mask` has dtype torch\.bool"):
        captured(IDS, MASK.bool())


def test_values_that_are_no_mask_are_not_tried() -> None:
    captured = capture(Pooled().eval(), (IDS, MASK * 7))
    with pytest.raises(CaptureError, match=r"`mask` has dtype torch\.bool"):
        captured(IDS, MASK.bool())


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32], ids=str)
def test_masks_of_texts(attention: str, dtype: torch.dtype) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        vocab_size=10,
        attn_implementation=attention,
    )
    model = transformers.BertModel(config).eval()
    captured: Any = capture(model, (), {"input_ids": IDS, "attention_mask": torch.ones_like(MASK).to(dtype)})
    for other in KINDS:
        inputs = {"input_ids": IDS, "attention_mask": MASK.to(other)}
        with torch.no_grad():
            expected = model(**inputs).last_hidden_state
            torch.testing.assert_close(captured(**inputs).last_hidden_state, expected)
