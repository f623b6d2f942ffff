"""For each reason code that has a remedy: a model on which a shipped pass refuses for it, and what then helps."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils import parametrizations, parametrize, prune

from fxopt_arith import ChangeTrueDivToMulByInverse
from fxopt_core import Transformation
from fxopt_cpu import FuseConvolutions, FuseLinears
from fxopt_linear import MergeLinears
from fxopt_norm import FuseBatchNorm1dInLinear, FuseBatchNorm2dInConv2d, FuseBatchNormInConvTranspose
from fxopt_simplify import EliminateDeadCode, FuseScaledDotProductAttention

Change = Callable[[Any], object]
Forward = Callable[[Any, Tensor], Any]

# -- models -----------------------------------------------------------------------------------------------------------


class Layers(nn.Module):
    """Layers, and what is computed with them; as long as it is `wrong`, in the way that a pass refuses."""

    def __init__(self, shape: tuple[int, ...], forward: Forward, **layers: nn.Module) -> None:
        super().__init__()
        self.shape, self.computes, self.wrong = shape, forward, True
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.computes(self, x)


class WithAdapter(nn.Module):
    """A linear layer with an adapter, its parts named as PEFT names them."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base_layer = base
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, 2, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(2, base.out_features, bias=False)})

    def forward(self, x: Tensor) -> Any:
        return self.base_layer(x) + self.lora_B["default"](self.lora_A["default"](x))


def pair(forward: Forward = lambda m, x: (m.q(x) * 2.0, m.k(x) * 2.0), **others: nn.Module) -> Layers:
    """Two linear layers that share their input."""
    return Layers((3, 4), forward, **{"q": nn.Linear(4, 4), "k": nn.Linear(4, 2), **others})


def normed(forward: Forward = lambda m, x: m.norm(m.conv(x)), **others: nn.Module) -> Layers:
    """Batch norm after a convolution."""
    norm = nn.BatchNorm2d(4)
    with torch.no_grad():
        for _ in range(3):
            norm(torch.randn(8, 4, 3, 3) + 1)
    return Layers((2, 3, 5, 5), forward, **{"conv": nn.Conv2d(3, 4, 3), "norm": norm, **others})


def dense(forward: Forward = lambda m, x: m.norm(m.dense(x))) -> Layers:
    """Batch norm after a linear layer."""
    return Layers((3, 4), forward, dense=nn.Linear(4, 6), norm=nn.BatchNorm1d(6))


def pair_inside() -> Layers:
    """Both layers are in a module of their own."""
    return Layers((3, 4), lambda m, x: m.inner(x), inner=pair())


def called_twice() -> Layers:
    """One of the layers has two names, and is called by both."""
    made: Any = pair(lambda m, x: (m.q(x) * 2.0, m.k(x) * 2.0, m.again(x + 1)))
    made.again = made.k
    return made  # type: ignore[no-any-return]  # it is one


def writes_between(m: Any, x: Tensor) -> Any:
    y = m.q(x) * 2.0
    z = x.mul_(2.0) if m.wrong else x * 2.0
    return y, m.k(x) * 2.0, z


def reads_between(m: Any, x: Tensor) -> Any:
    y = m.conv(x)
    return (m.norm(y), y + 1) if m.wrong else m.norm(y)


def drops_between(m: Any, x: Tensor) -> Any:
    return m.norm(m.drop(m.conv(x)) if m.wrong else m.conv(x))


def told_its_size(m: Any, x: Tensor) -> Any:
    return m.norm(m.conv(x, [7, 7]) if m.wrong else m.conv(x))


def decomposed(m: Any, x: Tensor) -> Any:
    """Batch norm as `run_decompositions` leaves it."""
    norm = m.norm
    if not m.wrong:
        return norm(m.conv(x))
    normalise = torch.ops.aten._native_batch_norm_legit_no_training.default
    return normalise(m.conv(x), norm.weight, norm.bias, norm.running_mean, norm.running_var, 0.1, norm.eps)[0]


def stored_transposed() -> Layers:
    """The weight is stored as (in, out)."""
    made: Any = dense(lambda m, x: m.norm(x @ m.weight if m.wrong else m.dense(x)))
    made.weight = nn.Parameter(made.dense.weight.detach().t().clone())
    return made  # type: ignore[no-any-return]  # it is one


def unread() -> Layers:
    """Nothing reads what a layer computes."""
    return Layers((3, 4), lambda m, x: (m.fc(x), x.relu())[1], fc=nn.Linear(4, 4))


def divided(m: Any, x: Tensor) -> Any:
    """By a number whose inverse is no normal number in half precision."""
    return x / 70000.0


def attends(m: Any, x: Tensor) -> Any:
    """Attention that is written out, and hides what follows a row."""
    hidden = -float("inf") if m.wrong else torch.finfo(torch.float32).min
    scores = (x @ x.transpose(-2, -1)).masked_fill(x[..., :1] > 0, hidden)
    return (torch.softmax(scores, -1) @ x) * 2.0


# -- what passes refuse models for, and what helps --------------------------------------------------------------------


def set_to(attribute: str, value: object) -> Change:
    """Return what sets an attribute, by dotted name."""

    def change(model: Any) -> None:
        owner, _, name = attribute.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    return change


def without(attribute: str) -> Change:
    """Return what deletes an attribute of the second layer."""
    return lambda model: delattr(model.k, attribute)


def tie(model: Any) -> None:
    model.k.weight = model.q.weight


def untie(model: Any) -> None:
    model.k.weight = nn.Parameter(model.q.weight.detach().clone())


def weight_as_buffer(model: Any) -> None:
    weight = model.k.weight.detach()
    del model.k.weight
    model.k.register_buffer("weight", weight)


def weight_as_parameter(model: Any) -> None:
    weight = model.k.weight
    del model.k.weight
    model.k.weight = nn.Parameter(weight)


def hook(model: Any) -> None:
    model.handle = model.k.register_forward_hook(lambda *_: None)


def pruned(model: Any) -> None:
    """Prune a weight; torch does so by a hook."""
    prune.l1_unstructured(model.k, "weight", amount=2)  # type: ignore[no-untyped-call]  # so in torch


def pruned_for_good(model: Any) -> None:
    prune.remove(model.k, "weight")  # type: ignore[no-untyped-call]  # so in torch


def parametrized(model: Any) -> None:
    parametrize.register_parametrization(model.k, "weight", nn.Identity())


def weight_normed(model: Any) -> None:
    parametrizations.weight_norm(model.k)


def not_parametrized(model: Any) -> None:
    parametrize.remove_parametrizations(model.k, "weight")


def freeze(model: Any) -> None:
    model.requires_grad_(False)


def of_right_size(model: Any) -> None:
    model.norm = nn.BatchNorm2d(4).eval()


def nearly_no_variance(model: Any) -> None:
    """Make the scale of a batch norm exceed half precision."""
    model.norm.running_var.fill_(0.0)
    model.norm.eps = 1e-12
    model.half()


def merge_adapter(model: Any) -> None:
    """Add an adapter to its base, and take it off."""
    adapted, layer = model.k, model.k.base_layer
    with torch.no_grad():
        layer.weight += adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight
    model.k = layer


def without_weight(model: Any) -> None:
    """Give a layer the weight that rounding leaves as it is."""
    nn.init.zeros_(model.dense.weight)


# -- cases ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model, what is wrong with it, and what helps.

    Attributes:
        code: the reason for which a site is refused.
        by: the pass.
        make: makes the model.
        spoil: does to the model in eval mode what the pass refuses for.
        mend: does to the spoilt model what the documents advise.
        form: the form of graph, of ``forms`` in the tests.
        mended_form: the form to capture the mended model in, if another one helps.
        mended_by: the pass with other options, if that helps.
        dtype: dtype of the input.
        runs: whether the spoilt model can be run at all.
    """

    code: str
    by: Transformation
    make: Callable[[], Layers]
    spoil: Change = lambda model: None
    mend: Change = lambda model: setattr(model, "wrong", False)
    form: str = "modules"
    mended_form: str | None = None
    mended_by: Transformation | None = None
    dtype: torch.dtype = torch.float32
    runs: bool = True


MERGE, FOLD, FOLD_DENSE = MergeLinears(), FuseBatchNorm2dInConv2d(), FuseBatchNorm1dInLinear()
FOLD_TRANSPOSED, FUSE_ATTENTION = FuseBatchNormInConvTranspose(), FuseScaledDotProductAttention()
INT8, INT8_LARGE = FuseLinears(weights="int8", min_weights=1), FuseLinears(weights="int8")
INT8_BUT_LAST = FuseLinears(weights="int8", min_weights=1, keep_last=1)
DIVIDE, PACK = ChangeTrueDivToMulByInverse(), FuseConvolutions()
CASES = [
    Case("subclass", MERGE, lambda: pair(k=NonDynamicallyQuantizableLinear(4, 2)), mended_form="export"),
    Case("hooks", MERGE, pair, hook, lambda m: m.handle.remove()),
    Case("hooks", MERGE, pair, pruned, pruned_for_good),
    Case("parametrized", MERGE, pair, parametrized, not_parametrized),
    Case("patched-forward", MERGE, pair, set_to("k.forward", torch.zeros_like), without("forward")),
    Case("extra-state", MERGE, pair, set_to("k.adapter", nn.Identity()), without("adapter")),
    Case("adapter", MERGE, lambda: pair(k=WithAdapter(nn.Linear(4, 2))), mend=merge_adapter),
    Case("lazy", MERGE, lambda: pair(k=nn.LazyLinear(2)), mend=lambda m: m(torch.zeros(m.shape)), runs=False),
    Case("opaque-call", MERGE, pair_inside, form="whole", mended_form="export"),
    Case("shared-module", MERGE, called_twice, mend=lambda m: setattr(m, "again", copy.deepcopy(m.again))),
    Case("mixed-mode", MERGE, pair, lambda m: m.k.train(), nn.Module.eval),
    Case("filtered", MergeLinears(where="q"), pair, mended_by=MERGE),
    Case("group-too-small", MergeLinears(min_group=3), pair, mended_by=MERGE),
    Case("training", FOLD, normed, nn.Module.train, nn.Module.eval),
    Case("not-a-parameter", MERGE, pair, weight_as_buffer, weight_as_parameter),
    Case("tied-parameter", MERGE, lambda: pair(k=nn.Linear(4, 4)), tie, untie),
    Case("computed-weight", MERGE, pair, weight_normed, not_parametrized, form="export"),
    Case("transposed-weight", FOLD_DENSE, stored_transposed),
    Case("mixed-requires-grad", FOLD, normed, lambda m: m.conv.requires_grad_(False), freeze),
    Case("dtype-mismatch", MERGE, pair, lambda m: m.k.double(), nn.Module.float, runs=False),
    Case("out-of-range", FOLD, normed, nearly_no_variance, nn.Module.float, dtype=torch.float16),
    Case("size-mismatch", FOLD, lambda: normed(norm=nn.BatchNorm2d(5)), mend=of_right_size, runs=False),
    Case("mutated", MERGE, lambda: pair(writes_between)),
    Case("several-users", FOLD, lambda: normed(reads_between)),
    Case("not-adjacent", FOLD, lambda: normed(drops_between, drop=nn.Dropout())),
    Case("decomposed", FOLD, lambda: normed(decomposed)),
    Case("shape-unknown", FOLD_DENSE, dense, form="unshaped", mended_form="modules"),
    Case("unsupported-call", FOLD_TRANSPOSED, lambda: normed(told_its_size, conv=nn.ConvTranspose2d(3, 4, 3))),
    Case("unsafe-constant", DIVIDE, lambda: Layers((3, 4), divided), dtype=torch.float16),
    Case("unsupported-dtype", PACK, normed, nn.Module.double, nn.Module.float, dtype=torch.float64),
    Case("kept", INT8_BUT_LAST, dense, mend=without_weight, mended_by=INT8),
    Case("too-small", INT8_LARGE, dense, mend=without_weight, mended_by=INT8),
    Case("holds-weights", EliminateDeadCode(), unread, mend=set_to("fc", nn.Identity())),
    Case("masked-rows", FUSE_ATTENTION, lambda: Layers((2, 3, 4), attends)),
]
