"""The topic `efficiency`: the texts, how they are encoded, what is compared, and how the README shows it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.apart import Ready, Timed
from benchmarks.suite import Absent, Measured, Settings
from torch import Tensor, nn

from benchmarks import efficiency


def test_texts_are_encoded_in_their_order_whatever_the_batch() -> None:
    """Sorted by length inside; padding changes nothing, as it is masked."""

    def tokens(texts: Any) -> dict[str, Tensor]:
        longest = max(map(len, texts))
        ids = torch.tensor([[*map(ord, text), *[0] * (longest - len(text))] for text in texts])
        return {"input_ids": ids, "attention_mask": (ids > 0).long()}

    table = torch.randn(128, 5)
    texts = ["abc", "a longer text", "b", "another"]
    one, two = (efficiency.encode(lambda batch: table[batch["input_ids"]], tokens, texts, size) for size in (1, 3))
    torch.testing.assert_close(one, two)
    expected = nn.functional.normalize(table[torch.tensor([*map(ord, "abc")])].mean(0), dim=0)
    torch.testing.assert_close(one[0], expected)


def test_quality_is_that_of_a_search() -> None:
    vectors = nn.functional.normalize(torch.randn(40, 8), dim=1)
    assert efficiency.quality(vectors, vectors) == ("1.00000", "1.00000", "100.0%")
    mean, _, shared = efficiency.quality(vectors.flip(0), vectors)
    assert float(str(mean)) < 0.9
    assert shared != "100.0%"
    assert efficiency.quality(vectors[:9], vectors[:9])[2] == "-"


def embed_of(embed: efficiency.Embed, _: efficiency.Contenders) -> efficiency.Embed:
    return embed


def test_contenders_are_measured_beside_torch_and_missing_ones_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tokens(texts: Any) -> dict[str, Tensor]:
        ids = torch.tensor([[min(ord(letter), 127) for letter in text[:4].ljust(4)] for text in texts])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    table = torch.randn(128, 6)
    monkeypatch.setattr(efficiency.Subject, "tokenizer", lambda self: tokens)
    subject, settings = efficiency.Subject("a table", 4), Settings(quick=True, rounds=3, seconds=0.01)
    embeds: dict[str, efficiency.Embed] = {
        efficiency.EAGER: lambda batch: table[batch["input_ids"]],
        "rounded": lambda batch: table[batch["input_ids"]].bfloat16(),
    }
    found: dict[str, Timed | Absent] = {"peer": Absent("not installed")}
    for way, embed in embeds.items():
        ready = efficiency.prepared(subject, [39], settings, partial(embed_of, embed), tmp_path, way)
        case = ready["39"]
        assert isinstance(case, Ready)
        assert torch.equal(torch.load(case.note["vectors"]), case.task())  # type: ignore[arg-type]  # a tensor
        found[way] = Timed((0.01, 0.02, 0.03), case.note)
    rows = {row.label: row.cells for row in efficiency.table_of(39, found, subject, settings).rows}
    assert rows.keys() == found.keys()
    assert isinstance(rows["rounded"][1], Measured)
    assert float(str(rows["rounded"][2])) > 0.999
    assert rows["peer"] == (Absent("not installed"),) * 6
