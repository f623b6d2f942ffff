"""Models, factories and passes for tests of the command, in this process and in others."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_core import Transformation, hookimpl


class Attention(nn.Module):
    """Three linear layers on one input; one of them can be kept from merging."""

    def __init__(self, *, hooked: bool = False) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        if hooked:
            self.v.register_forward_pre_hook(_nothing)

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(torch.softmax(self.q(x) @ self.k(x).transpose(1, 2), dim=-1), self.v(x))


def _nothing(module: nn.Module, args: object) -> None:
    """Change nothing."""


def seeded() -> nn.Module:
    """Return the same model in every process."""
    torch.manual_seed(0)
    return Attention().eval()


def attention() -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model with its input."""
    return seeded(), (torch.linspace(-1, 1, 80).reshape(2, 5, 8),)


def six_layers() -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model with two sites for `MergeLinears`."""
    _, inputs = attention()
    return nn.Sequential(seeded(), nn.Linear(4, 8), seeded()).eval(), inputs


def by_name() -> tuple[nn.Module, tuple[()], dict[str, Tensor]]:
    """Return a model with its input by name."""
    return seeded(), (), {"x": torch.ones(2, 5, 8)}


def talkative() -> tuple[nn.Module, tuple[Tensor]]:
    """Print something first."""
    print("hello from the factory")
    return attention()


def traced() -> tuple[nn.Module, tuple[Tensor]]:
    """Return a graph that does not know the shapes of its inputs."""
    model, inputs = attention()
    return torch.fx.symbolic_trace(model), inputs


def traced_with_hook() -> tuple[nn.Module, tuple[Tensor]]:
    """Return a graph that an archive cannot hold with its history."""
    model, inputs = traced()
    model.register_forward_hook(_changes_nothing)
    return model, inputs


def _changes_nothing(module: nn.Module, args: object, output: object) -> None:
    """Change nothing."""


def folding() -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model whose optimization cannot be undone."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval(), (torch.randn(2, 3, 8, 8),)


def lonely() -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model in which `MergeLinears` with three layers a group refuses a site."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_tensor(self.q(x) + self.k(x))

    return Two().eval(), (torch.ones(2, 8),)


def raises() -> nn.Module:
    """Raise in a function of its own."""
    return _broken("weights.bin")


def _broken(name: str) -> nn.Module:
    raise ValueError(f"no weights in {name}")


def leaves() -> nn.Module:
    """End the process."""
    raise SystemExit("the factory wants out")


def number() -> int:
    """Return no model."""
    return 3


def model_and_tensor() -> tuple[nn.Module, Tensor]:
    """Return an input that is no tuple."""
    return seeded(), torch.ones(2, 5, 8)


def branching() -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model that no graph can say."""

    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    return Branching(), (torch.ones(2, 2),)


def five_for_four() -> tuple[nn.Module, tuple[Tensor]]:
    """Return a layer and an input that is too wide for it."""
    return nn.Linear(4, 3).eval(), (torch.ones(2, 5),)


class ReadingValues(nn.Module):
    """Takes another way while it is exported."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if torch.compiler.is_compiling() else x + 2


def reading_values() -> tuple[nn.Module, tuple[Tensor]]:
    """Return a model whose graph computes something else."""
    return ReadingValues().eval(), (torch.ones(2, 3),)


def waits() -> nn.Module:
    """Say that it is there, and wait for the signal that ends it."""
    Path("waiting").touch()
    time.sleep(60)
    return seeded()


NOT_A_FACTORY = 3


def has_q(graph_module: GraphModule) -> bool:
    """Return whether a layer is still there: a check that fails where it was merged."""
    return "q.weight" in graph_module.state_dict()


class Fails(Transformation):
    """graph module -> an error, in the middle of its work."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.graph.output_node().meta["half"] = "done"
        raise RuntimeError("out of ideas")


class Doubles(Transformation):
    """``f(x)`` -> ``2 * f(x)``, which is wrong."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        output = graph_module.graph.output_node()
        value = output.all_input_nodes[0]
        with graph_module.graph.inserting_before(output):
            doubled = graph_module.graph.call_function(torch.mul, (value, 2))
        output.replace_input_with(value, doubled)
        return graph_module


class Plugin:
    """Offers the passes of this file."""

    @hookimpl
    def fxopt_transformations(self) -> Iterable[type[Transformation]]:
        """Return them."""
        return [Fails, Doubles]
