"""The zoo has layers with settings that a pass which copies layers loses easily."""

from __future__ import annotations

import copy

import pytest
from torch import nn
from torch.fx import GraphModule

from fxopt_core import Transformation
from fxopt_testing import check_transformation
from fxopt_testing.models import model_case


class Copies(Transformation):
    """Replaces layers of a kind by copies with another value of one attribute."""

    preserves_computation = True

    def __init__(self, *, kind: type[nn.Module] = nn.Module, setting: str = "", value: object = None) -> None:
        self.kind, self.setting, self.value = kind, setting, value

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for name, layer in [*graph_module.named_modules()]:
            if type(layer) is self.kind:
                twin = copy.deepcopy(layer)
                setattr(twin, self.setting, self.value)
                graph_module.set_submodule(name, twin)
        return graph_module


@pytest.mark.parametrize(
    ("kind", "setting", "value", "case"),
    [
        (nn.Conv2d, "padding_mode", "zeros", "norm without affine"),
        (nn.Conv2d, "dilation", (1, 1), "norm without affine"),
        (nn.Conv2d, "stride", (2, 2), "norm without affine"),
        (nn.ConvTranspose2d, "output_padding", (0, 0), "convolution, transposed"),
        (nn.LayerNorm, "eps", 1e-5, "embedding"),
        (nn.Embedding, "max_norm", None, "embedding"),
        (nn.Embedding, "padding_idx", None, "tied"),
        (nn.Softmax, "dim", -1, "embedding"),
    ],
)
def test_a_copy_without_a_setting_is_found(kind: type[nn.Module], setting: str, value: object, case: str) -> None:
    copies, models = Copies(kind=kind, setting=setting, value=value), [model_case(f"{case}[modules]")]
    report = check_transformation(copies, models=models, properties=["same-outputs", "same-gradients"], raises=False)
    assert report.errors
