"""Modules that are made of rows of data."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxopt_capture.archive.module_rows import activations, layer_classes, new_module, read_modules
from fxopt_rewrite import MalformedError


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("forward", getattr), ("forward", 3), ("_compiled_call_impl", 3), ("extra_repr", 3), ("_parameters", {}),
        ("training", 3), ("eps", getattr), ("eps", [getattr]), ("eps", {"a": getattr}), ("eps", nn.Linear),
        ("__class__", nn.Linear), ("a b", 3), (3, 3), ("activation", torch.load), ("\uff46orward", 3),
    ],
)  # fmt: skip
def test_attributes_are_data_and_no_methods(key: Any, value: object) -> None:
    with pytest.raises(MalformedError):
        new_module(nn.LayerNorm, [(key, value)])


@pytest.mark.parametrize(
    ("cls", "key", "value"),
    [
        (nn.ZeroPad2d, "padding", (0, 10**5, 0, 10**5)), (nn.Conv2d, "padding", (10**5, 0)),
        (nn.AdaptiveAvgPool2d, "output_size", 10**5), (nn.AdaptiveAvgPool3d, "output_size", 2000),
        (nn.Upsample, "size", (10**5, 10**5)), (nn.Upsample, "scale_factor", 1e6),
        (nn.ConvTranspose1d, "stride", (10**10,)),
    ],
)  # fmt: skip
def test_no_number_makes_results_that_the_file_does_not_hold(cls: type[nn.Module], key: str, value: object) -> None:
    with pytest.raises(MalformedError, match="makes huge results"):
        new_module(cls, [(key, value)])
    assert vars(new_module(cls, [(key, 512)]))[key] == 512


def test_an_attribute_may_be_an_activation() -> None:
    assert all(callable(each) for each in activations())
    module: Any = new_module(nn.TransformerEncoderLayer, [("activation", nn.functional.gelu), ("norm_first", True)])
    assert module.activation is nn.functional.gelu


def test_layers_are_those_that_compute() -> None:
    assert not [name for name in layer_classes() if "DataParallel" in name or "Lazy" in name]


@pytest.mark.parametrize("name", ["forward", 'a"', "a.b", "", "\uff46orward", "__x__"])
def test_names_of_tensors_and_modules(name: str) -> None:
    row = {"name": "", "training": True, "parameters": [[name, None]], "buffers": []}
    with pytest.raises(MalformedError):
        read_modules([row], lambda row: nn.Module(), lambda form: form)
