"""No shipped pass and no named pipeline raises on a graph that it did not make, whatever is known of its sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_core import iter_nodes, registry
from fxopt_rewrite import infer_shapes
from fxopt_testing import ModelCase, zoo
from fxopt_testing.forms import sizes_from_values


class Embedded(nn.Module):
    """Sums of embeddings before a norm."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.words, self.places, self.norm = nn.Embedding(9, 8), nn.Embedding(9, 8), norm
        self.out = nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Any:
        return self.out(self.norm(self.words(ids) + self.places(ids)))


class Attention(nn.Module):
    """Attention that is written out or called, of keys that come in several ways."""

    def __init__(self, keys: str) -> None:
        super().__init__()
        self.qkv, self.out, self.keys = nn.Linear(32, 96), nn.Linear(32, 32), keys

    def forward(self, x: Tensor) -> Any:
        parts: Any = self.qkv(x).chunk(3, -1)
        q, k, v = (parts[place].view(x.shape[0], -1, 2, 16) for place in range(3))
        q, v = q.transpose(1, 2), v.transpose(1, 2)
        if self.keys == "called":
            heads = F.scaled_dot_product_attention(q, k.transpose(1, 2), v)
        else:
            flipped = k.permute(0, 2, 3, 1) if self.keys == "permuted" else k.transpose(1, 2).transpose(-2, -1)
            heads = torch.softmax(q @ flipped / 4, -1) @ v
        return self.out(heads.transpose(1, 2).reshape(x.shape[0], -1, 32))


def _images() -> nn.Module:
    layers = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 1)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(128, 8))


IDS, ROWS = torch.randint(9, (2, 5)), torch.randn(2, 5, 32)
OWN: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "norm without weights": (lambda: Embedded(nn.LayerNorm(8, elementwise_affine=False)), IDS),
    "RMS norm without weights": (lambda: Embedded(nn.RMSNorm(8, elementwise_affine=False)), IDS),
    "norm": (lambda: Embedded(nn.LayerNorm(8)), IDS),
    **{f"{keys} keys": (lambda keys=keys: Attention(keys), ROWS) for keys in ("called", "permuted", "transposed")},  # type: ignore[misc]
    "images": (_images, torch.randn(2, 3, 8, 8)),
}
EXPORTED = ("permuted keys", "called keys", "images")  # in CI; the others each night
CASES = [
    *zoo()[::20],
    *(ModelCase(name, make, x) for name, (make, x) in OWN.items()),
    *(
        pytest.param(ModelCase(name, make, x, form="export"), marks=() if name in EXPORTED else pytest.mark.nightly)
        for name, (make, x) in OWN.items()
    ),
]
KNOWN: dict[str, Callable[[GraphModule], Any]] = {
    "shapes": lambda graph_module: None,
    "no shapes": lambda graph_module: [node.meta.pop("val", None) for node in iter_nodes(graph_module.graph)],
    "batches from values": sizes_from_values,
    "rows from values": lambda graph_module: sizes_from_values(graph_module, lambda dim: dim == 1),
    "images from values": lambda graph_module: sizes_from_values(graph_module, lambda dim: dim != 1),
}
OTHERS = ("cpu-inference-int8", "cpu-inference-bf16", "inference")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_nothing_is_raised(case: ModelCase) -> None:
    single = () if case in zoo() else registry().available()  # on the zoo, the conformance kit runs each pass so
    for known, what in KNOWN.items():
        more = {"shapes": OTHERS, "batches from values": (OTHERS[0], *single)}.get(known, ())
        for name in ("cpu-inference", *more):
            graph_module = case.capture().graph_module
            what(graph_module)
            registry().pipeline(name)(graph_module)


def _noted(graph_module: GraphModule) -> list[Any]:
    values = [torch.utils._pytree.tree_leaves(node.meta.get("val")) for node in iter_nodes(graph_module.graph)]
    return [[(v.shape, v.stride(), v.dtype) for v in found if isinstance(v, Tensor)] for found in values]


@pytest.mark.parametrize("name", OWN)
def test_each_pass_of_the_pipeline_leaves_shapes_and_strides(name: str) -> None:
    make, x = OWN[name]
    graph_module = ModelCase(name, make, x).capture().graph_module
    for each in registry().pipelines()["cpu-inference"].split(","):
        registry().pipeline(each)(graph_module)
        found = _noted(graph_module)
        assert found == _noted(infer_shapes(graph_module, x)), each
