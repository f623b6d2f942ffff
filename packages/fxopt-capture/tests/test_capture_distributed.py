"""Models that cannot be captured because of where their tensors are: refused before anything of them runs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from fxopt_capture import capture, symbolic_trace
from fxopt_core.errors import CaptureError

X = torch.randn(2, 4)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4))).eval()


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[Any]:
    """A device mesh of this process alone."""
    if not distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    from torch.distributed.device_mesh import init_device_mesh

    store = distributed.FileStore(  # type: ignore[attr-defined]  # as the documentation has it
        str(tmp_path / "store"), 1
    )
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


def sharded(model: Any, mesh: Any, *, parts: bool = True, root: bool = True) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for layer in (model[0], model[2]) if parts else ():
        fully_shard(layer, mesh=mesh)
    result: nn.Module = fully_shard(model, mesh=mesh) if root else model
    return result


def in_parallel(model: nn.Module, mesh: Any) -> nn.Module:
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    return parallelize_module(model, mesh, {"0": ColwiseParallel()})


def replicated(model: nn.Module, mesh: Any) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


CAPTURES: dict[str, Callable[[nn.Module], object]] = {
    "capture": lambda model: capture(model, X),
    "trace": symbolic_trace,
    "trace with inputs": lambda model: symbolic_trace(model, example_inputs=X),
}


@pytest.mark.parametrize("called", [False, True], ids=["not called", "called"])
@pytest.mark.parametrize(
    ("shard", "message"),
    [
        (sharded, "FSDPSequential is a FSDPModule, which cannot be captured; capture the model before it is sharded"),
        (partial(sharded, parts=False), "FSDPSequential is a FSDPModule"),
        (partial(sharded, root=False), "`0` of Sequential is a FSDPModule"),
        (replicated, "DistributedDataParallel is a DistributedDataParallel, which cannot be captured"),
    ],
    ids=["layers and root", "root", "layers", "replicated"],
)
def test_what_torch_distributed_manages_is_refused_and_goes_on_working(
    mesh: Any, shard: Callable[[nn.Module, Any], nn.Module], message: str, called: bool
) -> None:
    model = network()
    expected = model(X)
    model = shard(model, mesh)
    if called:
        model(X)
    for act in CAPTURES.values():
        with pytest.raises(CaptureError, match=message):
            act(model)
    torch.testing.assert_close(model(X), expected)
    model(X).sum().backward()


@pytest.mark.parametrize("act", ["capture", "trace with inputs"])
def test_sharded_tensors_are_refused(mesh: Any, act: str) -> None:
    model = in_parallel(network(), mesh)
    with pytest.raises(CaptureError, match=r"`0\.weight` of Sequential is a DTensor, which cannot be captured; "):
        CAPTURES[act](model)


@pytest.mark.parametrize("act", ["capture", "trace with inputs"])
def test_tensors_of_inference_mode_are_refused_with_what_to_do(act: str) -> None:
    with torch.inference_mode():
        model = network()
    with pytest.raises(CaptureError, match=r"`0\.weight` of Sequential was made under torch\.inference_mode\(\).*copy"):
        CAPTURES[act](model)
    captured: Any = CAPTURES[act](copy.deepcopy(model))
    with torch.no_grad():
        assert torch.equal(captured(X), model(X))
        assert torch.equal(symbolic_trace(model)(X), model(X))
