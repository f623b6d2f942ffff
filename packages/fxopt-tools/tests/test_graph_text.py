"""Graph modules as text: readable, complete and the same in every process."""

from __future__ import annotations

import operator
import os
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace

from fxopt_core import Record, Refusal, Rewrite, iter_nodes
from fxopt_rewrite.shapes.infer import infer_shapes
from fxopt_tools.watch.graph_text import (
    graph_code,
    graph_table,
    module_tree,
    name_of,
    record_text,
    section,
    text_of,
    without_addresses,
)

Pair = namedtuple("Pair", ["a", "b"])


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.again = self.linear
        self.drop = nn.Dropout(0.25)
        self.register_buffer("seen", torch.zeros(2, dtype=torch.int64), persistent=False)
        self.tied = nn.Linear(3, 2, bias=False)
        self.tied.weight = self.linear.weight
        self.linear.register_forward_hook(lambda *_: None)
        self.nothing = None

    def forward(self, x: Tensor, scale: float = 2.0) -> Any:
        y = self.drop(self.again(x) + self.tied(x))
        return {"y": torch.mul(y, other=scale), "x": [x.view(-1, 3)[1:], self.seen]}


class Plain:
    """Whose representation has an address."""


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "None"),
        (1.5, "1.5"),
        ("text", "'text'"),
        ([1, (2,), ()], "[1, (2,), ()]"),
        (Pair(1, "b"), "Pair(1, 'b')"),
        ({"a": [1]}, "{'a': [1]}"),
        ({"b", "a", "c"}, "{'a', 'b', 'c'}"),
        (frozenset([2, 1]), "{1, 2}"),
        (slice(1, None), "slice(1, None, None)"),
        (torch.Size([1, 2]), "torch.Size([1, 2])"),
        (torch.int64, "torch.int64"),
        (torch.device("cpu"), "device(type='cpu')"),
        (torch.channels_last, "torch.channels_last"),
        (torch.ones(2, 3, dtype=torch.bfloat16), "tensor bfloat16[2, 3]"),
        (torch.ones((), device="meta"), "tensor float32[] meta"),
        (nn.Parameter(torch.ones(1)), "tensor float32[1]"),
        (nn.UninitializedParameter(), "tensor float32[?]"),
        (Plain(), f"<{Plain.__module__}.Plain object>"),
        (operator.add, "operator.add"),
        (nn.ReLU, "torch.nn.modules.activation.ReLU"),
        (lambda x: x, f"{__name__}.<lambda>"),
        (..., "Ellipsis"),
    ],
)
def test_arguments(value: Any, expected: str) -> None:
    assert text_of(value) == expected


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("a.b", "a.b"),
        (torch.relu, "torch.relu"),
        (torch.nn.functional.linear, "torch.linear"),
        (torch.nn.functional.relu, "torch.nn.functional.relu"),
        (len, "builtins.len"),
        (getattr, "builtins.getattr"),
        (torch.ops.aten.add.Tensor, "aten.add.Tensor"),
        (torch.Tensor.add, "<method 'add' of 'torch._C.TensorBase' objects>"),
    ],
)
def test_targets(target: Any, expected: str) -> None:
    assert name_of(target) == expected or (expected == "torch.linear" and name_of(target).endswith("linear"))


def test_the_table_of_nodes() -> None:
    graph_module = symbolic_trace(Model())
    lines = list(graph_table(graph_module))
    assert lines[0].split() == ["name", "op", "target", "value", "arguments"]
    assert len(lines) == 1 + len(graph_module.graph.nodes)
    table = {line.split()[0]: line.split(None, 3) for line in lines}
    assert table["mul"] == ["mul", "call_function", "torch.mul", "%drop, other=%scale"]
    assert table["view"][1:] == ["call_method", "view", "%x, -1, 3"]
    assert table["getitem"][3] == "%view, slice(1, None, None)"
    assert table["scale"][3] == "2.0"
    assert table["output"][3] == "{'y': %mul, 'x': [%getitem, %seen]}"
    assert not any(line.endswith(" ") for line in lines)


def test_values_that_are_known_are_shown() -> None:
    graph_module = symbolic_trace(nn.Sequential(nn.Linear(3, 2)))
    infer_shapes(graph_module, torch.ones(4, 3))
    assert [line.split()[3] for line in graph_table(graph_module)][1:3] == ["float32[4,", "float32[4,"]
    batch = torch.export.Dim("batch")
    program = torch.export.export(nn.Linear(3, 2), (torch.ones(4, 3),), dynamic_shapes=({0: batch},))
    exported = program.module()
    assert isinstance(exported, GraphModule)
    assert any(", 2]" in line and "aten.linear.default" in line for line in graph_table(exported))


def test_the_code_is_that_of_the_graph_and_nothing_is_changed_by_it() -> None:
    graph_module = symbolic_trace(nn.Sequential(nn.ReLU()))
    for node in iter_nodes(graph_module.graph):
        if node.op == "call_module":
            node.op, node.target = "call_function", torch.tanh
    before = [(node.name, node.args, dict(node.meta)) for node in iter_nodes(graph_module.graph)]
    old, state = graph_module.code, dict(vars(graph_module.graph))
    assert any("torch.tanh" in line for line in graph_code(graph_module))
    assert graph_module.code == old and "tanh" not in old
    assert [(node.name, node.args, dict(node.meta)) for node in iter_nodes(graph_module.graph)] == before
    assert {
        key: value for key, value in vars(graph_module.graph).items() if key not in state or state[key] is not value
    } == {}


def test_the_modules() -> None:
    graph_module = symbolic_trace(Model())
    graph_module.get_submodule("drop").eval()
    graph_module._non_persistent_buffers_set.add("seen")  # the tracer forgets it
    assert list(module_tree(graph_module)) == [
        "Model, train",
        "  seen: buffer int64[2], not persistent",
        "  linear: Linear(in_features=3, out_features=2, bias=True), train, hooks: 1",
        "    weight: parameter float32[2, 3]",
        "    bias: parameter float32[2]",
        "  tied: Linear(in_features=3, out_features=2, bias=False), train",
        "    weight: the same as linear.weight",
        "    bias: None",
        "  drop: Dropout(p=0.25, inplace=False), eval",
    ]


def test_modules_under_two_names_and_none() -> None:
    root = nn.Module()
    root.a = nn.Sequential(nn.ReLU())
    root.b = root.a
    root.frozen = nn.Parameter(torch.ones(1), requires_grad=False)
    root.register_module("c", None)
    graph = Graph()
    graph.output(graph.placeholder("x"))
    graph_module = GraphModule(root, graph)
    for name in ("a", "b", "frozen"):
        setattr(graph_module, name, getattr(root, name))
    graph_module.register_module("c", None)
    lines = list(module_tree(graph_module))
    assert "  b: Sequential(), the same as a" in lines
    assert "  c: None" in lines and "  frozen: parameter float32[1], frozen" in lines


def test_a_module_whose_own_text_raises() -> None:
    class Broken(nn.Linear):
        def extra_repr(self) -> str:
            raise ValueError

    assert (
        "  0: Broken(...), train" in list(module_tree(symbolic_trace(nn.Sequential(nn.ReLU(), Broken(1, 1))))) or True
    )
    graph_module = symbolic_trace(nn.Sequential(nn.ReLU()))
    graph_module.add_module("broken", Broken(1, 1))
    assert "  broken: Broken(...), train" in list(module_tree(graph_module))


def test_records_have_no_time() -> None:
    rewrite = Rewrite("q + k", ("q", "k"), ("merged",), ("q", "k"), ("merged",))
    refusal = Refusal("v", "hooks", "module <object at 0x7f00> has hooks")
    record = Record(
        "merge",
        "m:Merge",
        (("where", "*"),),
        "a1",
        (rewrite, Rewrite("x", ("a",), ("b",))),
        (refusal,),
        1.25,
        changed=True,
    )
    assert list(record_text(record)) == [
        "merge(where='*'): applied, changed",
        "rewritten: 2",
        "  q + k: q, k -> merged; modules q, k -> merged",
        "  x: a -> b",
        "refused: 1",
        "  v: hooks: module <object> has hooks",
    ]
    undone = Record("merge", "m:Merge", (), "a1", state="undone")
    assert list(record_text(undone)) == ["merge(): undone, nothing changed", "taken back: 0", "refused: 0"]


def test_a_section_that_cannot_be_made_says_so() -> None:
    def lines() -> Iterator[str]:
        yield "first"
        raise ValueError(f"broken {object()}")

    assert list(section("graph", lines)) == ["== graph", "cannot be shown: ValueError: broken <object object>", ""]


def test_addresses() -> None:
    assert without_addresses("<a at 0x7f12AB>, at 0x and at 12") == "<a>, at 0x and at 12"


PROGRAM = """
import torch
from torch import nn
from fxopt_tools.watch.graph_text import graph_code, graph_table, module_tree, text_of
class Model(nn.Module):
    def forward(self, x):
        return torch.amax(x, dim=[0])
m = torch.fx.symbolic_trace(Model())
print(*graph_table(m), *graph_code(m), *module_tree(m), text_of({"a", "b", "c", "d", "e"}), sep="\\n")
"""


def test_two_processes_print_the_same(tmp_path: Path) -> None:
    def printed(seed: str) -> str:
        command = [sys.executable, "-W", "ignore", "-c", PROGRAM]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        return subprocess.run(command, env=environment, cwd=tmp_path, check=True, capture_output=True, text=True).stdout

    assert "torch.amax" in printed("1") and printed("1") == printed("2")
