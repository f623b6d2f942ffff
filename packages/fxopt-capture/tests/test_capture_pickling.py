"""Captures survive pickle, torch.save and copies with all that they accept and refuse, in another process too."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pickled_models import AddToSub, Varied, halves
from torch import nn
from torch.fx import GraphModule

from fxopt_capture import CapturedModule, capture
from fxopt_core.errors import CaptureError


def saved(module: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any], Any]] = {
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "save": saved,
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "copied pickles": lambda module: copy.deepcopy(pickle.loads(pickle.dumps(module))),
}


@pytest.fixture(scope="module")
def model() -> Varied:
    torch.manual_seed(0)
    return Varied().eval()


@pytest.fixture(scope="module")
def captured(model: Varied) -> GraphModule:
    return capture(model, (halves(2),))


@pytest.fixture(scope="module")
def changed(model: Varied) -> GraphModule:
    return AddToSub()(capture(model, (halves(2),)))


def check_same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    assert torch.equal(found.left, expected.left)
    assert torch.equal(found.right, expected.right)


def check_behaviour(twin: Any, original: GraphModule) -> None:
    assert isinstance(twin, CapturedModule)
    assert type(twin).__name__ == "Varied"
    names = [node.name for node in original.graph.nodes]
    assert [node.name for node in twin.graph.nodes] == names
    assert list(twin.state_dict()) == list(original.state_dict())
    assert twin.get_submodule("tied").weight is twin.get_submodule("first").weight
    for batch in (1, 2, 5):
        check_same(twin(halves(batch)), original(halves(batch)))
    check_same(twin(mask=None, halves=halves(3)), original(halves(3)))
    with pytest.raises(CaptureError, match="captured without `mask`"):
        twin(halves(3), torch.ones(1))
    with pytest.raises(CaptureError, match="size 5 in dimension 1"):
        twin(halves(3, 5))
    assert twin.eval() is twin
    with pytest.raises(CaptureError, match="training mode"):
        twin.train()
    with pytest.raises(CaptureError, match="training mode"):
        nn.Sequential(twin).train()


@pytest.mark.parametrize("way", WAYS)
def test_untouched_captures(captured: GraphModule, way: str) -> None:
    check_behaviour(WAYS[way](captured), captured)


@pytest.mark.parametrize("way", WAYS)
def test_captures_that_a_pass_has_changed(changed: GraphModule, model: Varied, way: str) -> None:
    twin = WAYS[way](changed)
    check_behaviour(twin, changed)
    if way == "copy":
        return  # it shares the graph
    with torch.no_grad():
        assert not torch.equal(twin(halves(3)).right, model(halves(3)).right)
        AddToSub()(twin, reverse=True)
        check_same(twin(halves(3)), model(halves(3)))


def test_a_shallow_copy_shares_what_torchs_does(captured: GraphModule) -> None:
    twin = copy.copy(captured)
    assert twin.graph is captured.graph
    assert twin.get_submodule("norm") is captured.get_submodule("norm")
    twin.register_forward_pre_hook(lambda module, args: None)
    twin.extra = nn.ReLU()
    assert not captured._forward_pre_hooks
    assert not hasattr(captured, "extra")


IN_ANOTHER_PROCESS = """
twin, expected = torch.load(sys.argv[1], weights_only=False)
from pickled_models import AddToSub, Halves, halves
from fxopt_core.errors import CaptureError

def refused(function, *args):
    try:
        function(*args)
    except CaptureError:
        return True

with torch.no_grad():
    for batch, (changed, plain) in expected.items():
        found = twin(halves(batch))
        assert type(found) is Halves
        assert torch.equal(found.right, changed)
    assert refused(twin.train)
    assert refused(twin, halves(2), torch.ones(1))
    assert refused(twin, halves(2, 5))
    AddToSub()(twin, reverse=True)
    for batch, (changed, plain) in expected.items():
        assert torch.equal(twin(halves(batch)).right, plain)
"""


def test_another_process(changed: GraphModule, model: Varied, tmp_path: Path) -> None:
    with torch.no_grad():
        expected = {batch: (changed(halves(batch)).right, model(halves(batch)).right) for batch in (1, 5)}
    torch.save((changed, expected), tmp_path / "capture.pt")
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import torch\n{IN_ANOTHER_PROCESS}"
    command = [sys.executable, "-W", "error", "-W", "ignore:Failed to initialize NumPy:UserWarning", "-c", code]
    done = subprocess.run([*command, tmp_path / "capture.pt"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
