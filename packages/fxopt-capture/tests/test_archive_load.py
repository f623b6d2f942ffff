"""`load` of trusted archives that torch.export has written: what `capture` makes of the model, without the model."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from archive_models import Layers, Perceptron, Square, Varied, layout, modules
from torch import nn
from torch.export import Dim
from torch.fx import GraphModule

from fxopt_capture import CapturedModule, capture
from fxopt_capture.archive.files import load
from fxopt_core import iter_nodes
from fxopt_core.errors import CaptureError
from fxopt_rewrite.shapes.facts import tensor_facts


def exported(model: nn.Module, path: Path, *args: Any, shapes: Any = None, **kwargs: Any) -> GraphModule:
    """Return what `load` makes of a model that torch has exported and saved."""
    file = path / "model.pt2"
    torch.export.save(torch.export.export(model, args, kwargs, dynamic_shapes=shapes), file)
    return load(file, trusted=True)


def varied() -> Varied:
    torch.manual_seed(0)
    return Varied().eval()


def test_it_needs_trust(tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(Perceptron(), (torch.randn(2, 4),)), file)
    with pytest.raises(CaptureError, match=r"which may run code .*load\(path, trusted=True\)"):
        load(file)
    content = file.read_bytes()
    with pytest.raises(CaptureError, match=r"torch\.export\.load cannot read"):
        load(BytesIO(content.replace(b"schema_version", b"schema_versioX")), trusted=True)


AUTO = {0: Dim.AUTO, 1: Dim.AUTO}
IDS, MASK = torch.randint(0, 10, (3, 5)), torch.ones(3, 5)


def test_it_is_what_capture_makes_of_the_model(tmp_path: Path) -> None:
    model = varied()
    loaded = exported(model, tmp_path, IDS, MASK, shapes=(AUTO, AUTO))
    captured = capture(model, (IDS, MASK), dynamic_shapes=(AUTO, AUTO))
    calls = [[node.target for node in iter_nodes(one.graph) if node.op == "call_module"] for one in (loaded, captured)]
    assert calls[0] == calls[1]
    assert "embedding" in calls[0]
    assert [(row[0], row[2]) for row in layout(loaded)] == [(row[0], row[2]) for row in layout(captured)]
    assert isinstance(loaded, CapturedModule)
    for rows, length in ((3, 5), (1, 2), (4, 1), (2, 9)):
        inputs = torch.randint(0, 10, (rows, length)), torch.rand(rows, length)
        torch.testing.assert_close(loaded(*inputs), model(*inputs), rtol=0, atol=0)


def test_keys_ties_flags_and_buffers(tmp_path: Path) -> None:
    model = varied()
    loaded: Any = exported(model, tmp_path, IDS, MASK, shapes=(AUTO, AUTO))
    assert set(loaded.state_dict()) == set(model.state_dict())
    assert loaded.head.weight is loaded.embedding.weight
    assert not loaded.frozen.weight.requires_grad
    assert loaded.scale.requires_grad
    assert isinstance(loaded.unused.weight, nn.Parameter)
    assert "hidden" in dict(loaded.named_buffers())
    assert "hidden" not in loaded.state_dict()
    assert not any(module.training for module in loaded.modules() if not isinstance(module, GraphModule))
    assert not loaded.training
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())


def test_every_kind_of_layer_is_raised_as_it_was(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Layers().eval()
    inputs = torch.randint(0, 5, (2, 7)), torch.randn(2, 1, 9, 8)
    loaded = exported(model, tmp_path, *inputs)
    called = {str(node.target) for node in iter_nodes(loaded.graph) if node.op == "call_module"} - {"_guards_fn"}
    assert called == dict(model.named_children()).keys()
    assert {name: text for name, text in modules(loaded).items() if name != "_guards_fn"} == modules(model)
    torch.testing.assert_close(loaded(*inputs), model(*inputs), rtol=0, atol=0)


def test_training_mode_is_kept(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.0)).train()
    loaded: Any = exported(model, tmp_path, torch.randn(3, 4))
    assert loaded.get_submodule("1").training
    x = torch.randn(3, 4)
    assert torch.equal(loaded(x), model(x))
    assert loaded.get_submodule("1").num_batches_tracked.item() == 1
    with pytest.raises(CaptureError, match="captured in training mode"):
        loaded.eval()


def test_wrong_sizes_are_refused(tmp_path: Path) -> None:
    loaded = exported(varied(), tmp_path, IDS, MASK, shapes=(AUTO, AUTO))
    with pytest.raises(CaptureError, match=r"mask.size\(\)\[1\] == ids.size\(\)\[1\]"):
        loaded(IDS, torch.ones(3, 4))
    static = exported(Perceptron(), tmp_path, torch.randn(2, 4))
    with pytest.raises(CaptureError, match="input `x` has size 3 in dimension 0"):
        static(torch.randn(3, 4))


def test_bounds_are_refused(tmp_path: Path) -> None:
    shapes = {"x": {0: Dim("batch", min=3, max=8)}}
    loaded = exported(Perceptron(), tmp_path, torch.randn(4, 4), shapes=shapes)
    assert loaded(torch.randn(3, 4)).shape == (3, 5)
    for rows in (2, 9):
        with pytest.raises(CaptureError, match="valid for inputs with x"):
            loaded(torch.randn(rows, 4))


def test_containers_and_constants(tmp_path: Path) -> None:
    model = Square()
    dynamic = {"pair": {"left": {0: Dim.AUTO}, "right": None}, "rest": [{0: Dim.AUTO}, None], "negate": None}
    pair, rest = {"left": torch.randn(4, 3), "right": torch.randn(3, 3)}, [torch.randn(4, 3), torch.randn(2)]
    loaded = exported(model, tmp_path, pair, rest, negate=True, shapes=dynamic)
    for call in (loaded(pair, rest, negate=True), loaded(pair, rest), loaded(rest=rest, pair=pair)):
        torch.testing.assert_close(call, model(pair, rest, negate=True), rtol=0, atol=0)
    with pytest.raises(CaptureError, match="has negate=True baked in"):
        loaded(pair, rest, negate=False)
    with pytest.raises(CaptureError, match=r"argument `rest` .* is a list of 1"):
        loaded(pair, rest[:1])
    with pytest.raises(CaptureError, match=r"valid for inputs with pair\['left'\].size\(\)\[0\] <= 16"):
        loaded({"left": torch.randn(17, 3), "right": pair["right"]}, [torch.randn(17, 3), rest[1]])


def test_an_argument_that_was_none(tmp_path: Path) -> None:
    model = varied()
    loaded = exported(model, tmp_path, IDS, None, shapes=(AUTO, None))
    torch.testing.assert_close(loaded(IDS), model(IDS), rtol=0, atol=0)
    torch.testing.assert_close(loaded(IDS, None), model(IDS), rtol=0, atol=0)
    with pytest.raises(CaptureError, match="has mask=None baked in"):
        loaded(IDS, MASK)


def test_variable_arguments(tmp_path: Path) -> None:
    class Sum(nn.Module):
        def forward(self, *parts: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
            return torch.stack(parts).sum(0) * scale

    parts = (torch.randn(3), torch.randn(3))
    loaded = exported(Sum(), tmp_path, *parts, scale=torch.tensor(2.0))
    assert torch.equal(loaded(*parts, scale=torch.tensor(2.0)), (parts[0] + parts[1]) * 2)


def test_bfloat16(tmp_path: Path) -> None:
    model = Perceptron().bfloat16()
    loaded = exported(model, tmp_path, torch.randn(2, 4, dtype=torch.bfloat16), shapes={"x": {0: Dim.AUTO}})
    x = torch.randn(5, 4, dtype=torch.bfloat16)
    assert torch.equal(loaded(x), model(x))


def test_shapes_are_known(tmp_path: Path) -> None:
    loaded = exported(varied(), tmp_path, IDS, MASK, shapes=(AUTO, AUTO))
    for node in iter_nodes(loaded.graph):
        if node.op == "call_module" and node.target != "_guards_fn":
            facts = tensor_facts(node)
            assert facts is not None
            assert facts.rank == 3


def test_a_number_that_varies_is_refused(tmp_path: Path) -> None:
    class Repeat(nn.Module):
        def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
            return x.repeat(times)

    with pytest.raises(CaptureError, match="input `times` of the program is a number that varies"):
        exported(Repeat(), tmp_path, torch.randn(3), 4, shapes=(None, Dim.DYNAMIC))


def test_it_needs_no_source(tmp_path: Path) -> None:
    """In another process neither the model's module nor anything that it imports is there."""
    model = varied()
    torch.manual_seed(1)
    expected = model(IDS, MASK)["logits"]
    torch.export.save(torch.export.export(model, (IDS, MASK), dynamic_shapes=(AUTO, AUTO)), tmp_path / "model.pt2")
    torch.save({"ids": IDS, "mask": MASK, "expected": expected}, tmp_path / "call.pt")
    script = """
        import sys, torch
        from fxopt_capture.archive.files import load
        loaded, call = load("model.pt2", trusted=True), torch.load("call.pt")
        assert torch.equal(loaded(call["ids"], mask=call["mask"])["logits"], call["expected"])
        assert type(loaded.frozen) is torch.nn.Linear and type(loaded.norm) is torch.nn.BatchNorm1d
        assert "archive_models" not in sys.modules
    """
    command = [sys.executable, "-W", "error", "-W", "ignore:Failed to initialize NumPy", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
