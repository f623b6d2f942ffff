"""``f(x) + g(f(x))`` -> ``y = f(x); y + g(y)``: equal calls are made once.

Calls are equal if they call the same function, method or module with equal arguments, where nodes that were found equal
count as one. The walk over the graph numbers values (Aho, Lam, Sethi, Ullman: Compilers, 8.5.1).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass

from torch.fx import Node

from fxopt_core import Refusal
from fxopt_rewrite import Editor, GraphIndex, ReversibleSitePass, call_key, replacement_refusal
from fxopt_simplify.purity import CallSite, Purity


@dataclass(frozen=True, eq=False)
class Duplicate(CallSite):
    """A call that computes what an earlier one, `first`, has computed."""

    first: Node


class EliminateCommonSubexpressions(ReversibleSitePass[Duplicate]):
    """``f(x) + g(f(x))`` -> ``y = f(x); y + g(y)``: equal calls are made once.

    Calls of functions, methods, and torch's own modules count, if they do nothing but compute: no random numbers, no
    in-place writes, no checks. Literals are equal if type and bits are, so that ``1``, ``1.0`` and ``True`` differ.
    Refused where a value is returned to the caller or written in place later: two tensors would become one.

    Source:
        Value numbering, as inductor's ``fx_graph_cse`` does it for aten graphs; here with in-place writes, modules, and
        the other forms of graph.

    Cost:
        One call fewer for each site. Results are kept for longer, until their last reader.

    >>> import torch
    >>> graph_module = torch.fx.symbolic_trace(lambda x: torch.relu(x) * torch.relu(x).abs())
    >>> print(EliminateCommonSubexpressions()(graph_module).code.strip())
    def forward(self, x):
        relu = torch.relu(x);  x = None
        abs_1 = relu.abs()
        mul = relu * abs_1;  relu = abs_1 = None
        return mul
    """

    def match(self, index: GraphIndex) -> Iterator[Duplicate | Refusal]:
        """Yield the calls that an earlier one equals, and refusals of those where it would be noticed."""
        purity = Purity(index)
        firsts: dict[Node, Node] = {}
        made: dict[Hashable, Node] = {}
        for node in index.nodes:
            key = call_key(node, firsts)
            if key is None or not node.users or not (node.op == "get_attr" or purity.is_pure(node)):
                continue
            first = made.setdefault(key, node)
            if first is node:
                continue
            if any(index.effects.written_between(value, first, node) for value in (first, *first.all_input_nodes)):
                made[key] = node  # the same expression with another value
                continue
            refusals = (replacement_refusal(node.name, each, index) for each in (node, first))
            refusal = next(filter(None, refusals), None)
            # Reading an attribute twice gives one tensor already: leaving both nodes costs nothing.
            if refusal is not None and node.op != "get_attr":
                yield refusal
            elif refusal is None:
                firsts[node] = first
                yield Duplicate(node, first)

    def rewrite(self, site: Duplicate, edit: Editor) -> None:
        """Let users read the first value."""
        edit.replace(site.node, edit.current(site.first))
