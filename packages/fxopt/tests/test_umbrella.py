"""One import for all of fxopt, lazily; `optimize`; input that is wrong."""

from __future__ import annotations

import ast
import copy
import importlib
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import default_pipeline, optimize
from fxopt_core import compose, history, undo
from fxopt_core.errors import (
    CaptureError,
    FxoptError,
    NotReversibleError,
    PreconditionError,
    UnknownPassError,
    VerificationError,
)
from fxopt_linear.merge_linears import MergeLinears
from fxopt_norm.convolutions import FuseBatchNorm2dInConv2d

HOMES = vars(fxopt)["_HOMES"]


class Model(nn.Module):
    """A convolution with batch norm, and two linear layers that share their input."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.q, self.k = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).mean((2, 3))
        return torch.cat([self.q(y), self.k(y)], -1)


@pytest.fixture
def model() -> Model:
    """A model in eval mode, with statistics that matter."""
    torch.manual_seed(0)
    made = Model()
    made(torch.randn(8, 3, 6, 6) + 1)
    return made.eval()


def test_type_checkers_see_the_same_homes_as_the_interpreter() -> None:
    stub = Path(fxopt.__file__).with_suffix(".pyi").read_text(encoding="utf-8")
    imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
    assert sorted(str(node.module) for node in imports) == sorted(HOMES)
    assert {alias.name for node in imports for alias in node.names} == {"*"}


def test_no_two_homes_offer_the_same_name() -> None:
    counts = Counter(name for home in HOMES for name in importlib.import_module(home).__all__)
    assert not [name for name, count in counts.items() if count > 1]


@pytest.mark.parametrize("home", HOMES)
def test_everything_public_is_offered(home: str) -> None:
    names = importlib.import_module(home).__all__
    assert names
    assert all(getattr(fxopt, name) is getattr(importlib.import_module(home), name) for name in names)
    assert set(names) <= set(dir(fxopt))


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Merge'"):
        fxopt.Merge  # type: ignore[attr-defined]  # noqa: B018  # that is the point


def test_importing_is_lazy() -> None:
    """And loads nothing of the command, nor inductor, which takes longer than torch."""
    script = (
        "import sys, fxopt; assert not any(m.startswith(('fxopt_', 'torch')) for m in sys.modules); "
        "fxopt.MergeLinears; assert 'fxopt_linear' in sys.modules; assert 'fxopt_norm' not in sys.modules; "
        "dir(fxopt); assert 'pytest' not in sys.modules; assert 'fxopt_testing' not in sys.modules; "
        "import fxopt.optimization, fxopt_compile; "
        "assert not {'typer', 'rich', 'fxopt.commands', 'torch._inductor.config'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


def test_what_the_extra_brings_is_told_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fxopt_testing", None)
    monkeypatch.delitem(vars(fxopt), "check_transformation", raising=False)
    homes: Any = vars(fxopt)["_home_of_names"]
    homes.cache_clear()
    try:
        assert "check_transformation" not in dir(fxopt)
        with pytest.raises(AttributeError) as caught:
            fxopt.check_transformation  # noqa: B018  # that is the point
    finally:
        homes.cache_clear()
    told = "if it is one of fxopt_testing, which is not installed: pip install 'fxopt[testing]'"
    assert str(caught.value).endswith(told)
    fxopt.MergeLinears  # noqa: B018  # all others are there


def test_optimize_captures_transforms_and_verifies(model: Model) -> None:
    x = torch.randn(3, 3, 6, 6)
    keys = list(model.state_dict())
    graph_module = optimize(model, (x,))
    kinds = [type(module) for module in graph_module.children() if list(module.parameters())]
    assert set(kinds) == {fxopt.PackedConv2d, nn.Linear if fxopt.isa() is None else fxopt.PanelLinear}
    torch.testing.assert_close(graph_module(x), model(x))
    torch.testing.assert_close(graph_module(x[:1]), model(x[:1]))
    assert list(model.state_dict()) == keys


def test_what_is_not_for_inference_on_a_cpu_gets_the_pipeline_for_everywhere(model: Model) -> None:
    assert default_pipeline(model) == "cpu-inference"
    elsewhere = copy.deepcopy(model).train(), copy.deepcopy(model).to("meta")
    assert [default_pipeline(each) for each in elsewhere] == ["inference"] * 2
    graph_module = optimize(torch.fx.symbolic_trace(copy.deepcopy(model).train()), (torch.randn(3, 3, 6, 6),))
    assert not any(isinstance(module, fxopt.PanelLinear) for module in graph_module.modules())


def test_optimize_keeps_the_sizes_of_images_dynamic_where_asked() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1)).eval()
    any_size = torch.export.Dim.AUTO
    shapes = ({0: any_size, 2: any_size, 3: any_size},)
    graph_module = fxopt.optimize(model, (torch.randn(2, 3, 16, 24),), dynamic_shapes=shapes)
    for size in ((24, 16), (33, 47)):
        images = torch.randn(3, 3, *size)
        torch.testing.assert_close(graph_module(images), model(images))
    with pytest.raises(fxopt.PreconditionError, match="give it to capture"):
        fxopt.optimize(graph_module, dynamic_shapes=shapes)


@pytest.mark.parametrize("pipeline", ["merge-linears", MergeLinears()])
def test_optimize_takes_text_names_and_passes(model: Model, pipeline: Any) -> None:
    graph_module = optimize(torch.fx.symbolic_trace(model), (torch.randn(3, 3, 6, 6),), pipeline=pipeline)
    assert history(graph_module)[0].pass_name == "merge-linears"
    assert len(history(graph_module)[0].rewrites) == 1


def test_optimize_leaves_a_graph_module_alone(model: Model) -> None:
    given = torch.fx.symbolic_trace(model)
    code = given.code
    result = optimize(given, (torch.randn(3, 3, 6, 6),))
    assert result is not given
    assert given.code == code
    assert not history(given)


def test_optimize_infers_the_shapes_of_a_trace_for_any_sizes() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(32, 32) for _ in range(4))

        def forward(self, x: Tensor) -> Any:
            parts = (layer(x).view(x.shape[0], -1, 2, 16).transpose(1, 2) for layer in (self.q, self.k, self.v))
            return self.out(nn.functional.scaled_dot_product_attention(*parts).transpose(1, 2).flatten(2))

    model = Attention().eval()
    optimized = optimize(torch.fx.symbolic_trace(model), (torch.randn(2, 5, 32),))
    assert not [refusal for record in history(optimized) for refusal in record.refusals]
    with torch.no_grad():
        for sizes in ((2, 5), (3, 7), (1, 1)):
            x = torch.randn(*sizes, 32)
            torch.testing.assert_close(optimized(x), model(x))


def test_optimize_refuses_wrong_numbers(model: Model) -> None:
    class Wrong(fxopt.Transformation):
        def transform(self, graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
            node = graph_module.graph.output_node()
            with graph_module.graph.inserting_before(node):
                value = node.all_input_nodes[0]
                wrong = graph_module.graph.call_function(torch.mul, (value, 1.5))
            value.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
            return graph_module

    x = torch.randn(3, 3, 6, 6)
    traced = torch.fx.symbolic_trace(model)
    with pytest.raises(VerificationError, match="output"):
        optimize(traced, (x,), pipeline=Wrong())
    optimize(traced, (x,), pipeline=Wrong(), verify=False)


WRONG: Any = MergeLinears
TENSOR: Any = torch.zeros(2, 3, 6, 6)


class Branching(nn.Module):
    """Its branch depends on data."""

    def forward(self, x: Tensor) -> Tensor:
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m: MergeLinears()(m), PreconditionError, "expected a torch.fx.GraphModule"),
        (lambda m: optimize(m, TENSOR), PreconditionError, r"optimize\(model, \(x,\)\)"),
        (lambda m: optimize(m, (torch.zeros(2, 3, 6, 6),), pipeline="merge-linear"), UnknownPassError, "merge-linears"),
        (lambda m: optimize(m, (torch.zeros(2, 3, 6, 6),), pipeline=WRONG), PreconditionError, "instance"),
        (lambda m: optimize(m, (torch.zeros(2, 3, 6, 6),), pipeline="merge-linears{size=2}"), FxoptError, "min-group"),
        (lambda m: optimize(Branching(), (torch.zeros(2, 2),)), CaptureError, r"test_umbrella\.py"),
        (lambda m: compose(WRONG), PreconditionError, r"MergeLinears\(\)"),
        (
            lambda m: FuseBatchNorm2dInConv2d()(torch.fx.symbolic_trace(m), reverse=True),  # type: ignore[arg-type]
            NotReversibleError,
            "not reversible",
        ),
        (lambda m: undo(m), PreconditionError, "expected a torch.fx.GraphModule"),
        (lambda m: fxopt.symbolic_trace(m, input_names=["y"]), CaptureError, "x"),
    ],
)
def test_wrong_input_is_a_typed_error_that_says_what_to_do(model: Model, call: Any, error: Any, words: str) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(error, match=words):
        call(model)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_the_default_pipeline_is_offered_by_name() -> None:
    assert fxopt.registry().pipelines()["inference"].startswith("fold-weights,fuse-products,fold-batch-norm")
    assert not fxopt.registry().failed


@pytest.mark.parametrize("pipeline", [None, "inference"])
def test_optimized_in_inference_mode_weights_are_plain(pipeline: str | None) -> None:
    """They load checkpoints and train outside of it."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)).eval()
    x = torch.randn(2, 3, 8, 8)
    with torch.inference_mode():
        fast = fxopt.optimize(model, (x,), pipeline=pipeline)
    assert not any(weight.is_inference() for weight in fast.parameters())
    fxopt.load_original_state_dict(fast, {name: value * 1.5 for name, value in model.state_dict().items()})
    fast(x).sum().backward()
    assert all(weight.grad is not None for weight in fast.parameters())
