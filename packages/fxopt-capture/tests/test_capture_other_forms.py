"""Masks of other values than at capture, and other strides: taken where model and graph do the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from archive_models import in_every_form
from site_passes import Called
from test_capture_conversion import text_model
from torch import Tensor, nn

from fxopt_capture import capture, export
from fxopt_capture.archive.calls import read_guards, write_guards
from fxopt_capture.call.guards import InputGuards, InputSpec
from fxopt_core.errors import CaptureError
from fxopt_rewrite import MalformedError

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


def test_a_mask_of_another_kind_is_refused() -> None:
    captured = capture(Pooled().eval(), (IDS, MASK))
    with pytest.raises(CaptureError, match=r"`mask` has dtype torch\.bool, where .* for an integer one"):
        captured(IDS, MASK.bool())


ONES = torch.ones_like(MASK)


class Choosing(Pooled):
    """Looks backwards, and both ways with a mask of ones: unless it is exported, as its values are not there then."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and bool((mask == 1).all()):
            both_ways: Tensor = self.embedding(ids).mean(1, keepdim=True).expand(-1, ids.shape[1], -1)
            return both_ways
        weights = mask[..., None].to(torch.float32)
        result: Tensor = (self.embedding(ids) * weights).cumsum(1) / weights.cumsum(1)
        return result


class Demanding(Choosing):
    """Raises an error for a mask of ones."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        if not torch.compiler.is_exporting() and bool(mask.all()):
            raise ValueError("nothing to fill in")
        return super().forward(ids, mask)


class Exporting(Pooled):
    """Reads no values of its mask when it is exported."""

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        return super().forward(ids, mask | True if torch.compiler.is_exporting() else mask)


@pytest.mark.parametrize(
    ("model", "dtype", "shown", "other", "text"),
    [
        (
            Choosing(),
            torch.bool,
            MASK,
            ONES,
            "is a mask of ones, .* captured with a mask with zeros; .* with a mask of ones",
        ),
        (
            Exporting(),
            torch.int64,
            ONES,
            MASK,
            "is a mask with zeros, .* captured with a mask of ones; .* with a mask with zeros",
        ),
    ],
)
def test_masks_whose_values_a_model_chooses_by_are_refused(
    model: nn.Module, dtype: torch.dtype, shown: Tensor, other: Tensor, text: str, tmp_path: Path
) -> None:
    captured = capture(model.eval(), (IDS, shown.to(dtype)))
    for each in in_every_form(captured, tmp_path):
        for ids, mask in ((IDS, shown), (IDS[:1], shown[:1])):
            torch.testing.assert_close(each(ids, mask.to(dtype)), model(ids, mask.to(dtype)))
        with pytest.raises(CaptureError, match=f"`mask` {text}"):
            each(IDS, other.to(dtype))
    compiled = torch.compile(captured, backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(compiled(IDS, shown.to(dtype)), model(IDS, shown.to(dtype)))
    with pytest.raises(CaptureError, match=f"`mask` {text}"), torch.no_grad():
        compiled(IDS, other.to(dtype))
    program = export(captured).module()
    torch.testing.assert_close(program(IDS, shown.to(dtype)), model(IDS, shown.to(dtype)))
    with pytest.raises(RuntimeError, match="the mask"):
        program(IDS, other.to(dtype))


def test_an_archive_says_of_a_mask_what_guards_can_check() -> None:
    rows: Any = write_guards(InputGuards([InputSpec("mask", "integer", (None,), ones=True)], []))
    read_guards(rows)(torch.ones(2, dtype=torch.int64))
    rows["specs"][0]["InputSpec"]["ones"] = "print()"
    with pytest.raises(MalformedError, match="as 'ones' of InputSpec, expected bool"):
        read_guards(rows)
    spec = InputSpec("x", "floating", (None,), layout=torch.preserve_format)  # of which no tensor can be asked
    with pytest.raises(MalformedError, match="is not a layout"):
        read_guards(write_guards(InputGuards([spec], [])))


def test_a_mask_that_the_model_does_not_take_says_nothing() -> None:
    captured: Any = capture(Demanding().eval(), (IDS, MASK))
    assert [spec.ones for spec in captured._guards_fn.specs] == [None, None]


def test_masks_are_not_compared_without_the_comparison() -> None:
    for model, compare in ((Choosing(), False), (Choosing().to("meta"), True)):
        captured: Any = capture(model.eval(), (IDS, MASK), compare=compare)
        assert [spec.ones for spec in captured._guards_fn.specs] == [None, None]


def test_masks_of_transformers_may_have_all_values() -> None:
    padded = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    model = text_model("LlamaModel")
    for mask in (ONES, padded):
        captured: Any = capture(model, (), {"input_ids": IDS, "attention_mask": mask})
        assert {spec.ones for spec in captured._guards_fn.specs} == {None}
        for other in (ONES, padded):
            inputs = {"input_ids": IDS, "attention_mask": other}
            with torch.no_grad():
                expected = model(**inputs).last_hidden_state
                torch.testing.assert_close(captured(**inputs).last_hidden_state, expected)


def test_a_text_model_that_drops_a_mask_of_ones_and_attends_both_ways() -> None:
    model = text_model("Aimv2TextModel", eos_token_id=2)
    inputs = {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0]])}
    captured: Any = capture(model, (), inputs)
    with torch.no_grad():
        torch.testing.assert_close(captured(**inputs).last_hidden_state, model(**inputs).last_hidden_state)
    with pytest.raises(CaptureError, match="`attention_mask` is a mask of ones"):
        captured(**{**inputs, "attention_mask": ONES})


class Strided(nn.Module):
    """Depends on the strides of an image or matrix: by asking, or by writing to what may be the input itself."""

    def __init__(self, layout: torch.memory_format | None = None) -> None:
        super().__init__()
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        if self.layout is not None:
            return x * (2 if x.is_contiguous(memory_format=self.layout) else 3)
        return x.contiguous().mul_(2) + x


@pytest.mark.parametrize(("shape", "layout"), [((3, 4), None), ((2, 3, 4, 5), torch.channels_last)])
def test_strides_that_a_model_depends_on_are_demanded(
    shape: tuple[int, ...], layout: torch.memory_format | None, tmp_path: Path
) -> None:
    shown = torch.randn(shape).contiguous(memory_format=layout or torch.contiguous_format)
    other = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    for each in in_every_form(capture(Strided(layout), shown), tmp_path):
        torch.testing.assert_close(each(shown.clone()), Strided(layout)(shown.clone()))
        with pytest.raises(CaptureError, match="`x` does not have the strides of torch"):
            each(other)
    nested = capture(Called(lambda xs: Strided(layout)(xs[0])), ([shown[:1]],))
    with pytest.raises(CaptureError, match=r"`.*\[0\]` does not have the strides of torch"):
        nested([other])
    with pytest.raises(CaptureError, match="which a program of torch"):
        export(nested, ([shown],))
    with pytest.raises(CaptureError, match=r"reads strides at .*, in forward, and `x` is not contiguous"):
        capture(Strided(torch.contiguous_format), other)
