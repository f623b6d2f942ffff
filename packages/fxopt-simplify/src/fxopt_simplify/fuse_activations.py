"""``0.5 * x * (1 + tanh(...))`` -> ``gelu(x, approximate="tanh")``: activations that models write out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import pi, sqrt
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_rewrite import Editor, GraphIndex, ReversibleSitePass, tensor_facts
from fxopt_simplify.formulas import Formula, formulas_of

_X = Formula.variable()
_GELU, _TANH = (_X * sqrt(0.5)).through("erf"), ((_X + _X**3 * 0.044715) * sqrt(2 / pi)).through("tanh")
_ACTIVATIONS: Mapping[str, tuple[Callable[..., Tensor], Mapping[str, Any]]] = {
    (_X * 0.5 * (_GELU + 1)).text: (F.gelu, {}),
    (_X * 0.5 * (_TANH + 1)).text: (F.gelu, {"approximate": "tanh"}),
    (_X * _X.through("sigmoid")).text: (F.silu, {}),
    (_X * _X.through("softplus").through("tanh")).text: (F.mish, {}),
    (_X * (_X + 3).through("relu6") * (1 / 6)).text: (F.hardswish, {}),
}
"""What an activation computes, to torch's function for it."""


@dataclass(frozen=True, eq=False)
class WrittenActivation:
    """An activation of several calls.

    Attributes:
        input: the value that it activates.
        nodes: its calls in order; the last one gives the result.
        function: torch's function for it.
        settings: the keyword arguments of that function.
    """

    input: Node
    nodes: tuple[Node, ...]
    function: Callable[..., Tensor]
    settings: Mapping[str, Any]

    @property
    def label(self) -> str:
        """The name of its last call."""
        return self.nodes[-1].name


class FuseActivations(ReversibleSitePass[WrittenActivation]):
    """``0.5 * x * (1 + tanh(0.79788 * (x + 0.044715 * x ** 3)))`` -> ``gelu(x, approximate="tanh")``.

    GELU with the error function and with tanh, SiLU, Mish and hardswish are found however their sums and products are
    ordered, as long as the constants agree to six digits. Results are the same except for rounding.

    Refused: values between that something else reads, values that are written in place between, and dtypes other than
    float32 and float64, where the fused function rounds less often.

    Source:
        Hendrycks and Gimpel, Gaussian Error Linear Units, https://arxiv.org/abs/1606.08415, section 2: both formulas
        of GELU, and SiLU.

    Cost:
        One call instead of two to eight, and as many values of the input's size fewer in memory. Each value that
        several calls read is followed through at most 16 of them.

    >>> from fxopt_rewrite import infer_shapes
    >>> graph = torch.fx.symbolic_trace(lambda x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5)))
    >>> print(FuseActivations()(infer_shapes(graph, torch.ones(2))).code.strip())
    def forward(self, x):
        gelu = torch._C._nn.gelu(x);  x = None
        return gelu
    """

    reasons: ClassVar[Mapping[str, str]] = {
        "unsupported-dtype": "The layer has a dtype that the operators do not take. Convert it: `model.float()`.",
    }

    def match(self, index: GraphIndex) -> Iterator[WrittenActivation]:
        """Yield the activations that several calls compute."""
        for value in index.nodes:
            if len(value.users) < 2:
                continue
            between: dict[Node, None] = {}
            for node, formula in formulas_of(index, value):
                between[node] = None
                if formula.text in _ACTIVATIONS:
                    yield WrittenActivation(value, _calls(node, value, between), *_ACTIVATIONS[formula.text])
                    break

    def check(self, site: WrittenActivation, index: GraphIndex) -> Refusal | None:
        """Refuse values between that others read, in-place writes, and dtypes that round otherwise."""
        *between, last = site.nodes
        for node in between:
            user = next((user for user in node.users if user not in site.nodes), None)
            if user is not None:
                message = f"`{node.name}` in the activation `{site.label}` is read by `{user.name}`, too"
                return index.refuse(site.label, "several-users", message, *site.nodes)
        facts = tensor_facts(site.input)
        if facts is None:
            message = f"the dtype of `{site.input.name}` is unknown; call infer_shapes first"
            return index.refuse(site.label, "shape-unknown", message, *site.nodes)
        if facts.dtype not in (torch.float32, torch.float64):
            message = f"`{site.input.name}` is {facts.dtype}; expected torch.float32, or float64"
            return index.refuse(site.label, "unsupported-dtype", message, *site.nodes)
        if index.effects.written_between(site.input, site.nodes[0], last):
            message = f"`{site.input.name}` is written in place, or a mode changes, before node `{site.label}`"
            return index.refuse(site.label, "mutated", message, *site.nodes)
        return None

    def rewrite(self, site: WrittenActivation, edit: Editor) -> None:
        """Insert torch's function, and take out the calls."""
        *between, last = site.nodes
        like = site.nodes[::-1]
        edit.replace(last, edit.call_function(site.function, site.input, before=last, like=like, **site.settings))
        for node in reversed(between):
            edit.erase(node)
            edit.drop_unused(node)
        edit.drop_unused(last)


def _calls(last: Node, value: Node, known: Mapping[Node, None]) -> tuple[Node, ...]:
    """Return the calls between a value and the last of them, in the order of the graph."""
    found, waiting = {last}, [last]
    while waiting:
        for node in waiting.pop().all_input_nodes:
            if node is not value and node in known and node not in found:
                found.add(node)
                waiting.append(node)
    return tuple(sorted(found))
