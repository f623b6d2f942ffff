"""A pass that computes new weights, and ones whose way back is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from site_passes import LinearSite
from torch import Tensor, nn

from fxopt_core import Derived, Refusal
from fxopt_rewrite import (
    Editor,
    GraphIndex,
    LinearCall,
    SitePass,
    read_linear,
    sharing_refusal,
    tensors_refusal,
)

Shapes = Mapping[str, tuple[int, ...] | None]


def doubled(weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Return twice a layer's tensors."""
    return weight * 2, None if bias is None else bias * 2


def halved(weight: Tensor, bias: Tensor | None, *, shapes: Shapes) -> dict[str, Tensor]:
    """Go back."""
    return {"weight": weight / 2} if bias is None else {"weight": weight / 2, "bias": bias / 2}


def without_bias(weight: Tensor, bias: Tensor | None, *, shapes: Shapes) -> dict[str, Tensor]:
    """Go back, and forget the bias."""
    return {"weight": weight / 2}


def renamed(weight: Tensor, bias: Tensor | None, *, shapes: Shapes) -> dict[str, Tensor]:
    """Go back, to a name that is no input."""
    return {"weights" if name == "weight" else name: each for name, each in halved(weight, bias, shapes=shapes).items()}


def not_halved(weight: Tensor, bias: Tensor | None, *, shapes: Shapes) -> dict[str, Tensor]:
    """Go back, but for the bias, which stays what it is now."""
    found = halved(weight, bias, shapes=shapes)
    return found if bias is None else {**found, "bias": bias}


class Doubling(SitePass[LinearSite]):
    """``linear(x)`` -> ``doubled(x) * 0.5``, rightly."""

    arithmetic = (doubled, halved, without_bias, renamed, not_halved)
    back = "halved"

    def match(self, index: GraphIndex) -> Iterator[LinearSite]:
        """Yield layers that are not doubled."""
        for node in index.nodes:
            call = read_linear(index, node)
            if isinstance(call, LinearCall) and not self.transformed(node):
                yield LinearSite(call)

    def check(self, site: LinearSite, index: GraphIndex) -> Refusal | None:
        """Refuse what is shared."""
        return tensors_refusal(site.call, index) or sharing_refusal(site.call, site.nodes, index)

    def rewrite(self, site: LinearSite, edit: Editor) -> None:
        """Put the doubled layer in."""
        call = site.call
        refs = {"weight": call.weight, "bias": call.bias}
        made = doubled(call.weight.tensor.detach(), None if call.bias is None else call.bias.tensor.detach())
        module = nn.Linear(call.in_features, call.out_features, bias=call.bias is not None, device="meta")
        for (key, ref), tensor in zip(refs.items(), made, strict=True):
            if ref is not None and tensor is not None:
                module.register_parameter(key, nn.Parameter(tensor, requires_grad=ref.tensor.requires_grad))
        name = edit.add_module(call.label, "doubled", module.train(call.training))
        product = edit.call_module(name, call.input, before=call.node, like=[call.node])
        result = edit.call_method("mul", product, 0.5, before=call.node, like=[call.node])
        edit.replace(call.node, result)
        edit.derived(
            Derived(
                function=f"{__name__}:doubled",
                inputs=tuple((key, None if ref is None else ref.name) for key, ref in refs.items()),
                settings=(),
                outputs=(f"{name}.weight", None if call.bias is None else f"{name}.bias"),
                restore=f"{__name__}:{self.back}",
            )
        )
        edit.drop(call, {}, twin=name)


class DropsABias(Doubling):
    """Says a way back that drops the bias."""

    back = "without_bias"


class NamesNoInput(Doubling):
    """Says a way back to a name that is none of its inputs."""

    back = "renamed"


class GoesBackWrongly(Doubling):
    """Says a way back to another bias."""

    back = "not_halved"
