"""The topic `efficiency`: how texts are encoded, and what their vectors are compared by."""

from __future__ import annotations

from typing import Any

import torch
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
