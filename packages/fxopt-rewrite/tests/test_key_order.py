from __future__ import annotations

import random

from hypothesis import given, strategies as st

from fxopt_rewrite.journal.order import KeyOrder


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_what_was_removed_goes_back_to_its_place(size: int, source: random.Random) -> None:
    """Take entries out and put new ones in, in any order; undo all that backwards: the dictionary is the old one."""
    mapping = {f"k{place}": place for place in range(size)}
    before = list(mapping.items())
    forwards = KeyOrder(mapping)
    removed: list[tuple[str, str | None, int]] = []
    added: list[str] = []
    for place in range(source.randrange(size + 1)):
        key = source.choice(sorted(k for k in mapping if k.startswith("k")))
        value = mapping[key]
        removed.append((key, forwards.remove(key), value))
        if source.random() < 0.5:
            forwards.append(f"new{place}", -1)
            added.append(f"new{place}")
    backwards = KeyOrder(mapping)
    for key in added:
        backwards.remove(key)
    for key, previous, value in reversed(removed):
        backwards.insert_after(previous, key, value)
    backwards.apply()
    assert list(mapping.items()) == before
