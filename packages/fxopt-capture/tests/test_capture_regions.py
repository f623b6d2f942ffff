"""Regions under contexts that stay one call of the graph: right, with the model's keys, and said."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_capture import capture
from fxopt_core import iter_nodes


class Regions(nn.Module):
    """Runs layers under contexts."""

    def __init__(self, *, gradients: bool = True) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.gradients = gradients

    def forward(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(self.gradients):
            y = self.first(x)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not self.gradients):
            z = self.second(x)
        return torch.add(y + z, self.third(x))


@pytest.mark.parametrize("gradients", [True, False])
def test_regions_are_right_and_said(gradients: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Regions(gradients=gradients).eval()
    with caplog.at_level(logging.WARNING, "fxopt_capture"):
        captured = capture(model, torch.randn(2, 4))
    x = torch.randn(5, 4)
    assert torch.equal(captured(x), model(x))
    assert list(captured.state_dict()) == list(model.state_dict())
    assert (
        "Regions: passes see no layers in the regions that the model runs under torch.autocast, torch.no_grad or in "
        "branches: `linear_1` with second.weight, second.bias. Without"
    ) in caplog.text


class Constant(nn.Module):
    """Computes positions without gradients, into which none could flow."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            positions = torch.arange(x.size(0)).float()
        return torch.mul(self.layer(x), positions[:, None])


def test_regions_that_hide_nothing_are_not_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fxopt_capture"):
        captured = capture(Constant().eval(), torch.randn(2, 4))
    assert not [record for record in caplog.records if record.name == "fxopt_capture"]
    assert not has_regions(captured)


def layers_of(captured: GraphModule) -> list[str]:
    return [str(node.target) for node in iter_nodes(captured.graph) if node.op == "call_module"][1:]


def has_regions(captured: GraphModule) -> bool:
    return any("wrap_with" in str(node.target) for node in iter_nodes(captured.graph))


class Frozen(nn.Module):
    """Runs a backbone without gradients; returns one of its inputs from there, and an index."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Linear(8, 4))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        with torch.no_grad():
            features = self.backbone(x * y)
            kept, best = y, features.argmax(-1)
        return self.head(features) + features, kept * 2, best


@pytest.mark.parametrize("training", [True, False])
def test_layers_without_gradients_are_layers_of_the_graph(training: bool) -> None:
    model = Frozen().train(training)
    captured = capture(model, (torch.randn(2, 4), torch.randn(2, 4)))
    assert not has_regions(captured)
    norms = [] if training else ["backbone.1"]
    assert layers_of(captured) == ["backbone.0", *norms, "backbone.3", "head"]
    reference = copy.deepcopy(model)
    results = []
    for module in (captured, reference):
        x, y = (torch.arange(12.0).view(3, 4).cos().requires_grad_() for _ in range(2))
        outputs = module(x, y)
        outputs[0].sum().backward()
        outputs[1].sum().backward()
        gradients = {name: parameter.grad for name, parameter in module.named_parameters()}
        results.append((outputs, [output.requires_grad for output in outputs], x.grad, y.grad, gradients))
    (found, *traits), (expected, *others) = results
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(traits, others, rtol=0, atol=0)
    assert results[0][4]["head.weight"] is not None and results[0][4]["backbone.0.weight"] is None
    torch.testing.assert_close(dict(captured.named_buffers()), dict(reference.named_buffers()), rtol=0, atol=0)


class Writing(nn.Module):
    """Writes without gradients to what is outside: a parameter's view, a buffer, an input; or to its own."""

    average: Tensor

    def __init__(self, target: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("average", torch.zeros(4))
        self.target = target

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        with torch.no_grad():
            mean: Tensor = self.layer(x).mean(0)
            if self.target == "buffer":
                self.average.mul_(0.5).add_(mean)
            elif self.target == "intermediate":
                y[0].add_(mean)
            elif self.target == "list":
                torch._foreach_add_([y, y * 1], 1.0)
            else:
                mean[0].mul_(2.0)
        return y + mean + self.average


@pytest.mark.parametrize("target", ["buffer", "intermediate", "list", "own"])
def test_regions_that_write_to_tensors_from_outside_stay_regions(target: str) -> None:
    model = Writing(target).eval()
    reference = copy.deepcopy(model)
    captured = capture(model, torch.randn(2, 4))
    assert has_regions(captured) is (target != "own")
    for _ in range(2):
        x = torch.randn(3, 4)
        found, expected = captured(x), reference(x)
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        for output in (found, expected):
            output.sum().backward()
        gradients = [[parameter.grad for parameter in module.parameters()] for module in (captured, reference)]
        torch.testing.assert_close(*gradients)


class Viewing(nn.Module):
    """Takes views of an input without gradients."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            flat, first = x.flatten(), x[0]
        return flat, first.sum()


def test_views_of_tensors_from_outside_stay_in_their_region() -> None:
    captured = capture(Viewing(), torch.randn(2, 4))
    x = torch.randn(3, 4, requires_grad=True)
    found, expected = captured(x), Viewing()(x)
    assert has_regions(captured)
    assert [output.requires_grad for output in found] == [output.requires_grad for output in expected]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


class Nested(nn.Module):
    """Has gradients again within a region without."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.first(x)
            with torch.enable_grad():
                z = self.second(y)
            y = y * 2
            positions = torch.arange(x.size(0)).float() * 2
        return torch.add(y, z) + positions[:, None]


def test_regions_within_regions_are_right() -> None:
    model = Nested().eval()
    captured = capture(model, torch.randn(2, 4))
    x = torch.randn(3, 4)
    found, expected = captured(x), model(x)
    assert torch.equal(found, expected) and found.requires_grad and expected.requires_grad
