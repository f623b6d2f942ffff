"""Modules of one function each, and their verification."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fxopt_tools import VerificationReport, verify

X = torch.linspace(-2, 2, 12).reshape(3, 4)


class Calls(nn.Module):
    """A module of one function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def compare(original: Callable[..., Any], transformed: Callable[..., Any], *args: Any) -> VerificationReport:
    """Verify one function against another."""
    return verify(Calls(original), Calls(transformed), args)
