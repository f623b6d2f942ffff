"""What an operator is, apart from its kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Operator(NamedTuple):
    """An operator of the namespace `fxopt`.

    Attributes:
        schema: Name, arguments and results, as `torch.library.define` takes them.
        fake: Returns empty tensors of the results' shapes; under fake tensors and on the device `meta`.
        reference: Computes the results by torch's operators: what the kernel has to compute, and what runs on a CPU
            where there is no kernel.
    """

    schema: str
    fake: Callable[..., Any]
    reference: Callable[..., Any]

    @property
    def name(self) -> str:
        """The name without the namespace."""
        return self.schema.partition("(")[0]
