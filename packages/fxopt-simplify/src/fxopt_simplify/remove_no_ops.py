"""``x.expand(x.shape)`` -> ``x``, ``x * 1`` -> ``x``, ``x & ones`` -> ``x``: calls that change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fxopt_core import Refusal
from fxopt_rewrite import Editor, GraphIndex, ReversibleSitePass
from fxopt_simplify.no_ops import NoOp, NoOpReader


class RemoveNoOps(ReversibleSitePass[NoOp]):
    """``x.expand(x.shape)`` -> ``x``, ``x * 1`` -> ``x``, ``x & ones`` -> ``x``: calls that change nothing.

    - Views that give the same shape (``view``, ``reshape``, ``expand``, ``flatten``, ``slice``, ``x[:]``), for every
      input: as ``torch.export`` proves it, or by their arguments alone.
    - Conversions (``to``, ``float()``) to the dtype and device that a value has for every input, as comparisons,
      ``arange`` and earlier conversions do. Inputs and weights may come in another dtype, so their conversions stay.
    - ``clone`` where it makes no difference, and ``detach_`` of the copies that ``torch.tensor(...)`` makes.
    - ``nn.Identity``, and dropout that does not train: afterwards the graph is for inference, and ``train()`` turns no
      dropout on. Dropout that trains is refused.
    - ``x * 1``, ``x / 1`` and ``x ** 1``, where ``x`` is floating-point for every input, as in captured graphs, which
      refuse other inputs.
    - ``where``, ``masked_fill``, ``&`` and ``|`` with a mask that is known to be all ones or all zeros, for instance
      ``arange(n) >= 0``; and such a mask of ``scaled_dot_product_attention``, or one that adds zeros.

    Results are the same bit for bit, except those of attention without a mask, which may run in another kernel.

    Source:
        IEEE 754-2019, 6.3: ``x * 1`` is ``x`` for all ``x``. ``x + 0`` is not: ``-0.0 + 0`` is ``0.0``.

    Cost:
        One call fewer for each site.

    >>> import torch
    >>> graph_module = torch.fx.symbolic_trace(lambda x: torch.relu(x)[:].expand(-1, -1).abs())
    >>> print(RemoveNoOps()(graph_module).code.strip())
    def forward(self, x):
        relu = torch.relu(x);  x = None
        abs_1 = relu.abs();  relu = None
        return abs_1
    """

    repeats = True  # a mask may be dropped once nothing else reads it

    def match(self, index: GraphIndex) -> Iterator[NoOp | Refusal]:
        """Yield the calls that change nothing."""
        reader = NoOpReader(index)
        for node in index.nodes:
            found = reader.read(node) if node.users else None
            if found is not None:
                yield found

    def rewrite(self, site: NoOp, edit: Editor) -> None:
        """Let users read the value itself, or the call without its mask."""
        node = site.node
        if site.kwargs is None:
            edit.replace(node, edit.current(site.value))
            edit.drop_unused(node)
        else:
            target: Any = node.target
            edit.replace(node, edit.call_function(target, *site.args, before=node, like=[node], **site.kwargs))
