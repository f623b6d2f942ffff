"""Whatever call of a pass fails, nothing of the attempt stays: every shipped pass, compositions, undoing.

A plain run takes a sample of the calls. With the profile "nightly" of Hypothesis, a thousand calls fail in each test,
spread over all places in the code, of which a pass has about as many.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from fault_injection import (
    Action,
    Choice,
    InjectedInterrupt,
    Moment,
    inject_faults,
    some,
)
from nightly import NIGHTLY
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_arith import ChangeTrueDivToMulByInverse
from fxopt_capture import capture
from fxopt_core import (
    DeepCopy,
    LintAndRecompile,
    PassError,
    ReversibleTransformation,
    Transformation,
    compose,
    instrumented,
    iter_nodes,
    registry,
    undo,
)
from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_norm import (
    FuseBatchNorm1dInConv1d,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBatchNorm3dInConv3d,
    FuseBatchNormInConvTranspose,
)
from fxopt_rewrite import infer_shapes
from fxopt_tools import Verify

# torch warns about itself when the pytree of an export graph is copied.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning")
CALLS: Choice = some(1_000 if NIGHTLY else 3)
LARGE = 256  # a square weight of this size is what a pass releases, so that a rollback has to rebuild it


class Attention(nn.Module):
    """Linear layers with and without bias on one input, one of them tied and called twice, and divisions."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"q": nn.Linear(size, size), "k": nn.Linear(size, 2, bias=False)})
        self.heads["v"], self.out = nn.Linear(size, size), nn.Linear(size, 3)
        self.heads["v"].register_buffer("scale", torch.ones(1), persistent=False)
        self.out.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        q, v = self.heads["q"](x), self.heads["v"](x)
        mixed = torch.relu(q / 8.0 + v) + self.heads["k"](x).sum() / 2.0
        return self.out(mixed), v


class Rows(nn.Module):
    """Attention without weights of its own between layers, a sum and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Any:
        mixed = nn.functional.scaled_dot_product_attention(self.q(x), self.k(x), self.v(x))
        return self.norm(mixed + x)


def normed(layer: nn.Module, norm: nn.Module, dimensions: int) -> tuple[Callable[[], nn.Module], tuple[int, ...]]:
    """Return a function that makes a model of a layer and a batch norm, and the shape of its input."""

    def model() -> nn.Module:
        made = nn.Sequential(nn.Sequential(layer, norm), nn.ReLU(), nn.Dropout(0.1))
        for tensor in (*made.parameters(), *made.buffers()):
            if tensor.is_floating_point():
                nn.init.uniform_(tensor, 0.5, 1.5)
        return made

    return model, (2, 4, *[5] * dimensions)


Made = tuple[Callable[[], nn.Module], tuple[int, ...]]
ATTENTION: Made = (partial(Attention, 4), (2, 4))
CPU = registry().pipeline("cpu-inference")
PASSES: list[tuple[Transformation, Made]] = [
    (MergeLinears(), ATTENTION),
    (MergeLinears(share_storage=True), ATTENTION),
    (FuseBiasInLinear(), ATTENTION),
    (ChangeTrueDivToMulByInverse(), ATTENTION),
    (FuseBatchNorm1dInLinear(), normed(nn.Linear(4, 4), nn.BatchNorm1d(4), 0)),
    (FuseBatchNorm1dInConv1d(), normed(nn.Conv1d(4, 4, 3, bias=False), nn.BatchNorm1d(4), 1)),
    (FuseBatchNorm2dInConv2d(), normed(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), 2)),
    (FuseBatchNorm3dInConv3d(), normed(nn.Conv3d(4, 4, 3), nn.BatchNorm3d(4), 3)),
    (FuseBatchNormInConvTranspose(), normed(nn.ConvTranspose2d(4, 4, 3, groups=2), nn.BatchNorm2d(4), 2)),
    (CPU, (Rows, (2, 2, 5, 8))),
    (CPU, normed(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), 2)),
    (DeepCopy(), ATTENTION),
    (LintAndRecompile(), ATTENTION),
]
THREE = (MergeLinears(), FuseBiasInLinear(), ChangeTrueDivToMulByInverse())
COMPOSITIONS = [
    compose(*THREE),
    compose(compose(THREE[0], DeepCopy(), THREE[1]), compose(THREE[2])),
    compose(*THREE, inplace=False),
    compose(THREE[0], compose(*THREE[1:], inplace=False)),
]
REVERSIBLE = [each for each in PASSES if isinstance(each[0], ReversibleTransformation)]
REVERSIBLE += [(each, ATTENTION) for each in COMPOSITIONS]


def inputs_of(made: Made) -> tuple[Tensor]:
    """Return the input of a model, always the same one."""
    return (torch.linspace(-1.0, 1.0, torch.Size(made[1]).numel()).reshape(made[1]),)


def traced(made: Made) -> Sequence[nn.Module]:
    """Return a traced model with shapes, and the model, which has to stay as it is, too."""
    torch.manual_seed(0)
    model = made[0]().eval()
    graph_module = infer_shapes(torch.fx.symbolic_trace(model), *inputs_of(made))
    graph_module.meta["notes"] = {"list": [1, {"set": {2}}]}
    graph_module.register_forward_hook(_hook)
    return graph_module, model


def _hook(*_: object) -> None:
    pass


@cache
def _exported(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> GraphModule:
    torch.manual_seed(0)
    return torch.export.export(make().eval(), inputs_of((make, shape)), strict=False).module()


@cache
def _captured(make: Callable[[], nn.Module], shape: tuple[int, ...]) -> GraphModule:
    torch.manual_seed(0)
    return capture(make().eval(), inputs_of((make, shape)))


def exported(made: Made) -> Sequence[nn.Module]:
    """Return a copy of an exported model."""
    return (DeepCopy()(_exported(*made)),)


def captured(made: Made) -> Sequence[nn.Module]:
    """Return a copy of a captured model."""
    return (DeepCopy()(_captured(*made)),)


def transformed(
    form: Callable[[Made], Sequence[nn.Module]], made: Made, transformation: Transformation
) -> Sequence[nn.Module]:
    """Return a model that a pass has been applied to, and what else there was."""
    graph_module, *others = form(made)
    assert isinstance(graph_module, GraphModule)
    return (transformation(graph_module), *others)


def named(value: Any) -> str:
    """Return the name of a parameter in the name of a test."""
    if value is CPU:
        return "cpu-inference"
    return repr(value) if isinstance(value, Transformation) else getattr(value, "__name__", "")


def holds(make: Callable[[], Sequence[nn.Module]], action: Action, inputs: tuple[Any, ...], **how: Any) -> None:
    """Check that no fault leaves a trace."""
    report = inject_faults(make, action, inputs, **how)
    print(report)
    assert report.injected > 0 or report.calls == 0
    assert not report.traces, "\n".join([str(report), *report.traces[:30]])


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize(("transformation", "made"), PASSES, ids=named)
def test_passes_on_traced_models(transformation: Transformation, made: Made, moment: Moment) -> None:
    holds(partial(traced, made), transformation, inputs_of(made), choose=CALLS, moment=moment)


@pytest.mark.parametrize("form", [exported, *([captured] if NIGHTLY else [])], ids=named)
@pytest.mark.parametrize(("transformation", "made"), PASSES, ids=named)
def test_passes_on_exported_and_captured_models(
    transformation: Transformation, made: Made, form: Callable[[Made], Sequence[nn.Module]]
) -> None:
    holds(partial(form, made), transformation, inputs_of(made), choose=CALLS)


@pytest.mark.parametrize("form", [traced, exported, *([captured] if NIGHTLY else [])], ids=named)
@pytest.mark.parametrize(("transformation", "made"), REVERSIBLE, ids=named)
def test_reversing(transformation: Transformation, made: Made, form: Callable[[Made], Sequence[nn.Module]]) -> None:
    assert isinstance(transformation, ReversibleTransformation)
    make = partial(transformed, form, made, transformation)
    holds(make, partial(transformation, reverse=True), inputs_of(made), choose=CALLS)


@pytest.mark.parametrize("form", [traced, exported], ids=named)
@pytest.mark.parametrize("composition", COMPOSITIONS, ids=named)
def test_compositions(composition: Transformation, form: Callable[[Made], Sequence[nn.Module]]) -> None:
    holds(partial(form, ATTENTION), composition, inputs_of(ATTENTION), choose=CALLS)


@pytest.mark.parametrize("on_failure", ["veto", *(["raise"] if NIGHTLY else [])])
def test_compositions_under_verification(on_failure: Any) -> None:
    inputs = inputs_of(ATTENTION)

    def action(graph_module: GraphModule) -> GraphModule:
        with instrumented(Verify(inputs, on_failure=on_failure)):
            return compose(*THREE)(graph_module)

    holds(partial(traced, ATTENTION), action, inputs, choose=CALLS)


class MulToAdd(Transformation):
    """Edits the graph with torch's own methods, as passes of other authors do, and the modules beside it."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph, notes = graph_module.graph, graph_module.meta["notes"]
        notes["list"][1]["set"].add(3)
        for node in list(iter_nodes(graph)):
            if node.op == "call_module" and node.target == "heads.q":
                node.meta.setdefault("mine", []).append(node.name)
                with graph.inserting_after(node):
                    twice = graph.call_function(torch.mul, (node, 2))
                    node.replace_all_uses_with(twice, delete_user_cb=lambda user: user is not twice)  # noqa: B023
                    notes["list"].append(twice.name)
                twice._rename("twice")
        graph_module.add_submodule("heads.more", nn.LayerNorm(4).to(torch.float64).train())
        out = graph_module.get_submodule("out")
        out.register_forward_pre_hook(_hook)
        out.register_buffer("extra", torch.zeros(2), persistent=False)
        out.requires_grad_(True)
        out.load_state_dict(out.state_dict(), assign=True)
        graph_module.double().float()
        graph_module.delete_submodule("heads.more")
        graph.eliminate_dead_code()
        graph_module.recompile()
        return graph_module


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_pass_of_another_author(moment: Moment) -> None:
    holds(partial(traced, ATTENTION), MulToAdd(), inputs_of(ATTENTION), choose=CALLS, moment=moment)


@pytest.mark.parametrize("transformation", [MergeLinears(), MergeLinears(share_storage=True), MulToAdd()], ids=named)
def test_interrupts_go_on_as_they_are(transformation: Transformation) -> None:
    def action(graph_module: GraphModule) -> GraphModule:
        try:
            return transformation(graph_module)
        except PassError as error:
            raise AssertionError("an interrupt became an error of the pass") from error

    holds(partial(traced, ATTENTION), action, inputs_of(ATTENTION), choose=CALLS, error=InjectedInterrupt)


@pytest.mark.parametrize(
    "how", [{"protect_values": True}, {"lint_and_recompile": False}, {"strict": False, "expect": 1}]
)
def test_other_ways_to_run_a_pass(how: dict[str, Any]) -> None:
    holds(partial(traced, ATTENTION), partial(MergeLinears(), **how), inputs_of(ATTENTION), choose=CALLS)


def test_infer_shapes() -> None:
    def make() -> Sequence[nn.Module]:
        torch.manual_seed(0)
        model = Attention(4).eval()
        return torch.fx.symbolic_trace(model), model

    inputs = inputs_of(ATTENTION)
    holds(make, lambda graph_module: infer_shapes(graph_module, *inputs), inputs, choose=CALLS)


# large tensors, which a pass releases

BIG: Made = (partial(Attention, LARGE), (2, LARGE))


def freed(form: Callable[[], Sequence[nn.Module]]) -> Sequence[nn.Module]:
    """Return only the graph module, the model being gone."""
    made = form()[:1]
    gc.collect()
    return made


@pytest.mark.parametrize("how", ["model-gone", "model-kept", "undone"])
@pytest.mark.parametrize(
    "transformation", [MergeLinears(), MergeLinears(share_storage=True), FuseBiasInLinear()], ids=named
)
def test_large_tensors(transformation: Transformation, how: str) -> None:
    make = partial(transformed, traced, BIG, transformation) if how == "undone" else partial(traced, BIG)
    make = make if how == "model-kept" else partial(freed, make)
    action = undo if how == "undone" else transformation
    holds(make, action, inputs_of(BIG), choose=CALLS, identities=False)
