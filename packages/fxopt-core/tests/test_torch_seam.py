"""The seam to torch.fx refuses a torch that lacks what it names, in one clear error."""

from __future__ import annotations

import pytest
import torch

from fxopt_core import _torch, require_torch


def test_missing_fields_are_named_with_the_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_torch, "STRUCTURE", (*_torch.STRUCTURE, "_gone"))
    found = r"torch \S+ has no Graph\._gone, which .*install"
    with pytest.raises(ImportError, match=found):
        _torch._check()


def test_other_distributions_say_what_they_miss() -> None:
    require_torch("mine", [(torch.nn, ("_reduction",))])
    with pytest.raises(
        ImportError, match=r"has no torch\.nn\._gone, torch\._C\._no, which mine reads: .* newer mine, or"
    ):
        require_torch("mine", [(torch.nn, ("_reduction", "_gone")), (torch._C, ("_no",))])
