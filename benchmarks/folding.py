"""What folding batch norms gains: a model as it is, folded by hand, and folded by the pass.

`PYTHONPATH=benchmarks python benchmarks/folding.py 15` measures every model in fifteen shuffled rounds. "By hand" is
``torch.nn.utils.fusion`` layer by layer, with the batch norms taken out of the graph.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median, quantiles
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval

from fxopt_core import infer_shapes
from fxopt_norm import FuseBatchNorm1dInLinear, FuseBatchNorm2dInConv2d

Task = Callable[[], object]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="?", type=int, default=15, help="rounds, each of several calls")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args(arguments)
    print("| model | as it is, ms | by hand over as it is | the pass over as it is | the pass over by hand |")
    print("|---|---|---|---|---|")
    for row in rows(options.runs, options.threads):
        shown = [f"{row['milliseconds']:.2f}"]
        for key in ("by_hand", "folded", "folded_over_by_hand"):
            low, high = row[f"{key}_quartiles"]
            shown.append(f"{row[key]:.2f} ({low:.2f} to {high:.2f})")
        print(f"| {row['model']} | {' | '.join(shown)} |")


def rows(runs: int = 15, threads: int = 2) -> list[dict[str, Any]]:
    """Speed of each model by hand and by the pass, over that of the model as it is: medians of the rounds' ratios."""
    torch.set_num_threads(threads)
    with torch.inference_mode():
        return [_row(name, *make(), runs) for name, make in MODELS.items()]


def perceptron() -> tuple[nn.Module, Tensor]:
    """Four layers of 256 with batch norm, one row."""
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()]
    return _trained(nn.Sequential(*layers)), torch.randn(1, 256)


def bottlenecks() -> tuple[nn.Module, Tensor]:
    """The convolutions of ResNet-50's third stage, one image."""
    layers: list[nn.Module] = []
    for _ in range(6):
        for inputs, outputs, kernel in ((1024, 256, 1), (256, 256, 3), (256, 1024, 1)):
            convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
            layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    return _trained(nn.Sequential(*layers)), torch.randn(1, 1024, 14, 14)


def separable() -> tuple[nn.Module, Tensor]:
    """Inverted bottlenecks as in MobileNetV2, one image."""
    layers: list[nn.Module] = []
    for _ in range(6):
        for inputs, outputs, groups in ((32, 192, 1), (192, 192, 192), (192, 32, 1)):
            kernel = 3 if groups > 1 else 1
            convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
            layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU6()]
    return _trained(nn.Sequential(*layers)), torch.randn(1, 32, 28, 28)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "perceptron, 4 layers of 256, batch 1": perceptron,
    "bottlenecks of ResNet-50, batch 1": bottlenecks,
    "inverted bottlenecks of MobileNetV2, batch 1": separable,
}


def _trained(model: nn.Module) -> nn.Module:
    """Statistics and parameters as after some training, in eval mode."""
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d)):
            for values in (module.running_mean, module.running_var, module.weight, module.bias):
                assert values is not None
                values.data.uniform_(0.5, 1.5)
    return model.eval()


def by_hand(model: nn.Module) -> GraphModule:
    """The model with its batch norms folded by torch's own functions, as a graph like the others."""
    layers = list(copy.deepcopy(model).children())
    folded: list[nn.Module] = []
    for layer, norm in pairwise([*layers, nn.Identity()]):
        if isinstance(layer, nn.Conv2d) and isinstance(norm, nn.BatchNorm2d):
            folded.append(fuse_conv_bn_eval(layer, norm))
        elif isinstance(layer, nn.Linear) and isinstance(norm, nn.BatchNorm1d):
            folded.append(fuse_linear_bn_eval(layer, norm))
        elif not isinstance(layer, (nn.BatchNorm1d, nn.BatchNorm2d)):
            folded.append(layer)
    return symbolic_trace(nn.Sequential(*folded))


def by_the_pass(model: nn.Module, x: Tensor) -> GraphModule:
    """The model with its batch norms folded by the pass."""
    graph_module = infer_shapes(symbolic_trace(model), x)
    return FuseBatchNorm1dInLinear()(FuseBatchNorm2dInConv2d()(graph_module))


def _row(name: str, model: nn.Module, x: Tensor, runs: int) -> dict[str, Any]:
    models = (symbolic_trace(model), by_hand(model), by_the_pass(model, x))
    torch.testing.assert_close(models[2](x), models[0](x), rtol=1e-3, atol=1e-3)
    seconds = _measured([lambda each=each: each(x) for each in models], runs)  # type: ignore[misc]  # bound at once
    row: dict[str, Any] = {"model": name, "milliseconds": median(seconds[0]) * 1e3}
    for key, slower, faster in (("by_hand", 0, 1), ("folded", 0, 2), ("folded_over_by_hand", 1, 2)):
        ratios = [one / other for one, other in zip(seconds[slower], seconds[faster], strict=True)]
        row[key], row[f"{key}_quartiles"] = median(ratios), tuple(quantiles(ratios, n=4)[::2])
    return row


def _measured(tasks: Sequence[Task], runs: int) -> list[list[float]]:
    """Seconds of one call of each task in every round, in which their order is another; the least of a few calls."""
    for task in tasks:
        task()
    calls = max(3, round(0.05 / max(_seconds(tasks[0]), 1e-6)))
    seconds: list[list[float]] = [[] for _ in tasks]
    for _ in range(runs):
        best = [float("inf")] * len(tasks)
        for _ in range(calls):
            for index in random.sample(range(len(tasks)), len(tasks)):
                best[index] = min(best[index], _seconds(tasks[index]))
        for index, value in enumerate(best):
            seconds[index].append(value)
    return seconds


def _seconds(task: Task) -> float:
    started = perf_counter()
    task()
    return perf_counter() - started


if __name__ == "__main__":
    main()
