"""One import for all of fxopt, lazily; `optimize`; input that is wrong."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import (
    CaptureError,
    FuseBatchNorm2dInConv2d,
    FxoptError,
    MergeLinears,
    NotReversibleError,
    PreconditionError,
    UnknownPassError,
    VerificationError,
    compose,
    history,
    optimize,
    undo,
)


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


def typed_names() -> dict[str, list[str]]:
    """Return what the TYPE_CHECKING block imports, by package."""
    tree = ast.parse(Path(fxopt.__file__).read_text(encoding="utf-8"))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    found: dict[str, list[str]] = {}
    for statement in block.body:
        if isinstance(statement, ast.ImportFrom) and statement.module:
            found.setdefault(statement.module, []).extend(alias.name for alias in statement.names)
    return found


def test_all_names_resolve() -> None:
    for name in fxopt.__all__:
        assert getattr(fxopt, name) is not None
        assert name in dir(fxopt)


def test_type_checkers_see_the_same_names_as_the_interpreter() -> None:
    typed = {home: sorted(names) for home, names in typed_names().items()}
    assert typed == {home: sorted(names) for home, names in fxopt._HOMES.items()}


@pytest.mark.parametrize(
    "home", ["fxopt_core", "fxopt_linear", "fxopt_norm", "fxopt_arith", "fxopt_onednn", "fxopt_capture", "fxopt_tools"]
)
def test_everything_public_is_offered(home: str) -> None:
    assert set(importlib.import_module(home).__all__) <= set(fxopt.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Merge'"):
        fxopt.Merge  # noqa: B018


def test_importing_is_lazy() -> None:
    script = (
        "import sys, fxopt; assert not any(m.startswith(('fxopt_', 'torch')) for m in sys.modules); "
        "fxopt.MergeLinears; assert 'fxopt_linear' in sys.modules; assert 'fxopt_norm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


def test_optimize_captures_transforms_and_verifies(model: Model) -> None:
    x = torch.randn(3, 3, 6, 6)
    keys = list(model.state_dict())
    graph_module = optimize(model, (x,))
    assert [type(module) for module in graph_module.children() if list(module.parameters())] == [nn.Conv2d, nn.Linear]
    torch.testing.assert_close(graph_module(x), model(x))
    torch.testing.assert_close(graph_module(x[:1]), model(x[:1]))
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("pipeline", ["merge-linears", "merge-linears,fold-batch-norm", MergeLinears()])
def test_optimize_takes_text_names_and_passes(model: Model, pipeline: Any) -> None:
    graph_module = optimize(model, (torch.randn(3, 3, 6, 6),), pipeline=pipeline)
    assert history(graph_module)[0].pass_name == "merge-linears"
    assert len(history(graph_module)[0].rewrites) == 1


def test_optimize_leaves_a_graph_module_alone(model: Model) -> None:
    given = torch.fx.symbolic_trace(model)
    code = given.code
    result = optimize(given, (torch.randn(3, 3, 6, 6),))
    assert result is not given
    assert given.code == code
    assert not history(given)


def test_optimize_takes_keyword_inputs(model: Model) -> None:
    x = torch.randn(3, 3, 6, 6)
    torch.testing.assert_close(optimize(model, kwargs={"x": x})(x=x), model(x))


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
    with pytest.raises(VerificationError, match="output"):
        optimize(model, (x,), pipeline=Wrong())
    optimize(model, (x,), pipeline=Wrong(), verify=False)


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
            lambda m: FuseBatchNorm2dInConv2d()(torch.fx.symbolic_trace(m), reverse=True),
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
    assert fxopt.registry().pipelines()["inference"].startswith("fold-batch-norm")
    assert not fxopt.registry().failed
