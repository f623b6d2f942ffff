"""Programs of torch.export with their state as attributes: the same as torch makes of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from fxopt_capture import capture
from fxopt_capture.unlifting import Unlifted, unlifted
from fxopt_core import iter_nodes


class Stateful(nn.Module):
    """A parameter under two names, buffers of both kinds, a constant, and a region without gradients."""

    kept: Tensor
    passing: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("kept", torch.tensor(2.0))
        self.register_buffer("passing", torch.tensor(3.0), persistent=False)

    def forward(self, x: Tensor) -> dict[str, Tensor | None]:
        with torch.no_grad():
            scale = self.kept * self.passing + torch.tensor(0.5)
        return {"y": self.second(self.first(x)) * scale, "nothing": None}


class Counting(nn.Module):
    """A buffer that each call changes in place."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.calls


class Trained(nn.Module):
    """A tensor that needs a gradient and is no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.constant = torch.ones(3, requires_grad=True)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.constant


def exported(model: nn.Module, x: Tensor) -> ExportedProgram:
    return torch.export.export(model, (), {"x": x}, strict=False)


def targets(graph_module: Unlifted | GraphModule) -> list[tuple[str, str]]:
    """Operations and targets, of nodes that something reads."""
    return [(node.op, str(node.target)) for node in iter_nodes(graph_module.graph) if node.users or node.op == "output"]


@pytest.mark.parametrize("model_class", [Stateful, Counting])
def test_the_graph_and_the_state_are_those_that_torch_makes(model_class: type[nn.Module]) -> None:
    model, x = model_class(), torch.randn(2, 4)
    theirs = exported(model, x).module(check_guards=False)
    ours = unlifted(exported(model, x))
    assert isinstance(theirs, GraphModule)
    assert targets(ours) == targets(theirs)
    for names in ("named_parameters", "named_buffers"):
        expected = dict(getattr(theirs, names)())
        found = dict(getattr(ours, names)())
        assert found.keys() == expected.keys()
        assert all(found[name] is tensor for name, tensor in expected.items())
    assert ours.state_dict().keys() == theirs.state_dict().keys()


def test_it_runs_as_the_model_does() -> None:
    model, x = Stateful(), torch.randn(2, 4)
    found, expected = unlifted(exported(model, x))(x=x), model(x)
    assert torch.equal(found["y"], expected["y"])
    assert found.keys() == expected.keys()
    assert found["nothing"] is None


def test_buffers_that_a_call_changes_are_the_models() -> None:
    model, x = Counting(), torch.zeros(2)
    graph_module = unlifted(exported(model, x))
    assert graph_module(x=x).tolist() == [1, 1]
    assert model(x).tolist() == [2, 2]


def test_inputs_by_position_and_tensors_with_gradients_are_left_to_torch() -> None:
    x = torch.randn(2, 4)
    positional = unlifted(torch.export.export(Stateful(), (x,), strict=False))
    assert positional(x)["y"].shape == x.shape
    with pytest.warns(UserWarning, match="requires gradient"):
        trained = unlifted(exported(Trained(), torch.ones(2, 3)))
    assert trained(x=torch.ones(2, 3)).tolist() == [[1.0] * 3] * 2


def test_a_capture_generates_code_for_the_whole_graph_twice_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a module that can be compared with the model, once for the result."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
    sizes: list[int] = []
    recompile = GraphModule.recompile

    def counted(self: GraphModule) -> object:
        sizes.append(len(self.graph.nodes))
        return recompile(self)

    export = torch.export.export

    def uncounted(*args: object, **kwargs: object) -> ExportedProgram:
        program = export(*args, **kwargs)  # type: ignore[arg-type]  # passed on as given
        sizes.clear()
        return program

    monkeypatch.setattr(GraphModule, "recompile", counted)
    monkeypatch.setattr(torch.export, "export", uncounted)
    capture(model, torch.randn(2, 4))
    assert sum(size > 5 for size in sizes) <= 2
