"""`export`: programs that torch runs alone, with the sizes and guards of the graph module."""

from __future__ import annotations

import copy
import subprocess
import sys
import textwrap
from io import BytesIO
from pathlib import Path

import pytest
import torch
from archive_models import Varied
from padded_linears import PadOutputs
from torch import nn
from torch.export import Dim
from torch.fx import GraphModule, symbolic_trace

from fxopt_capture import capture, export, load, save
from fxopt_core.errors import CaptureError

AUTO = {0: Dim.AUTO, 1: Dim.AUTO}
IDS, MASK = torch.randint(0, 10, (3, 5)), torch.rand(3, 5)


def varied() -> Varied:
    torch.manual_seed(0)
    return Varied().eval()


def test_torch_runs_it_without_fxopt(tmp_path: Path) -> None:
    transformed = PadOutputs()(capture(varied(), (IDS, MASK), dynamic_shapes=(AUTO, AUTO)))
    file = BytesIO()
    save(transformed, file)
    torch.export.save(export(load(BytesIO(file.getvalue()))), tmp_path / "model.pt2")
    calls = []
    for rows, length in ((3, 5), (1, 2), (4, 1), (2, 9)):
        inputs = torch.randint(0, 10, (rows, length)), torch.rand(rows, length)
        calls.append((*inputs, transformed(*inputs)["logits"]))
    torch.save({"calls": calls, "keys": list(transformed.state_dict())}, tmp_path / "calls.pt")
    script = """
        import sys, torch
        for name in ("fxopt", "fxopt_core", "fxopt_capture"):
            sys.modules[name] = None
        program, told = torch.export.load("model.pt2"), torch.load("calls.pt")
        module = program.module()
        assert set(module.state_dict()) == set(told["keys"]) == set(program.state_dict)
        for ids, mask, logits in told["calls"]:
            assert torch.equal(module(ids, mask=mask)["logits"], logits)
        try:
            module(torch.zeros(3, 5, dtype=torch.int64), mask=torch.ones(3, 4))
        except AssertionError as error:
            assert "Guard failed" in str(error)
        else:
            raise SystemExit("another length was taken")
    """
    command = [sys.executable, "-W", "error", "-W", "ignore:Failed to initialize NumPy", "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_dynamic_shapes_may_be_said() -> None:
    traced = symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    with pytest.raises(CaptureError, match=r"nothing is known of the shapes of the inputs.*give example inputs"):
        export(traced)
    program = export(traced, torch.randn(2, 3, 4), dynamic_shapes={"input": {1: Dim.AUTO}})
    assert program.module()(torch.randn(2, 7, 4)).shape == (2, 7, 4)


def test_args_say_how_the_program_is_called() -> None:
    captured = capture(varied(), (IDS, MASK))
    expected = captured(IDS, MASK)["logits"]
    assert torch.equal(export(captured, (IDS, MASK)).module()(IDS, MASK)["logits"], expected)
    assert torch.equal(
        export(captured, kwargs={"ids": IDS, "mask": MASK}).module()(ids=IDS, mask=MASK)["logits"], expected
    )
    with pytest.raises(CaptureError, match="its dimension 0 is dynamic: give a size of 2 or more"):
        export(captured, (IDS[:1], MASK[:1]))


def test_inputs_that_it_does_not_take(perceptron: GraphModule) -> None:
    with pytest.raises(CaptureError, match="takes 1 positional arguments, and 2 were given"):
        export(perceptron, (torch.randn(2, 4), torch.randn(2, 4)))
    with pytest.raises(CaptureError, match=r"has size 3 in dimension 1") as caught:
        export(perceptron, torch.randn(2, 3))
    assert "While executing" not in str(caught.value)


def test_a_graph_that_fixes_what_varies(perceptron: GraphModule) -> None:
    captured = copy.deepcopy(perceptron)
    output = next(iter(captured.graph.find_nodes(op="output")))
    with captured.graph.inserting_before(output):
        product = output.all_input_nodes[0]
        call = captured.graph.call_function(torch.ops.aten.expand.default, (product, [2, 5]))
        output.replace_input_with(product, call)
    captured.recompile()
    with pytest.raises(CaptureError, match=r"dimension 0 of input \['x'\] is dynamic in this graph module, but"):
        export(captured)
