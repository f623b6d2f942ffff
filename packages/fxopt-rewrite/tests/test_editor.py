from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from site_passes import Computes, nodes_of
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from fxopt_core import Derived, Memo, PassError, Transformation, history, iter_nodes, tag_of, undo
from fxopt_rewrite import Editor, GraphIndex, Piece, edits_of, infer_shapes
from fxopt_rewrite.journal.edits import Ref
from fxopt_rewrite.journal.journal import Edits


class Edit(Transformation):
    """Runs any edits as a pass."""

    def __init__(self, edits: Callable[[Editor], object]) -> None:
        self.edits = edits

    @property
    def signature(self) -> str:
        return "edit"

    def transform(self, graph_module: GraphModule) -> GraphModule:
        edit = Editor(GraphIndex(graph_module), self)
        self.edits(edit)
        edit.finish()
        return graph_module


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(3, 3)
        self.k = nn.Linear(3, 3)
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Any:
        return self.q(x) * self.scale + self.k(x) + self.offset


def traced() -> GraphModule:
    torch.manual_seed(0)
    return symbolic_trace(Computes(lambda m, x: m.block(torch.relu(x)), block=Block()).eval())


def edited(edits: Callable[[Editor, dict[str, Node]], object]) -> GraphModule:
    graph_module = traced()
    return Edit(lambda edit: edits(edit, nodes_of(graph_module)))(graph_module)


def q_to_twice_k(edit: Editor, nodes: dict[str, Node]) -> None:
    """``q(x)`` -> ``doubled(x)``, a new module with q's values."""
    node = nodes["block_q"]
    old = edit.graph_module.get_submodule("block.q")
    module: Any = nn.Linear(3, 3).eval()
    module.load_state_dict(old.state_dict())
    with edit.site("block.q"):
        name = edit.add_module("block.q", "doubled", module)
        call = edit.call_module(name, nodes["relu"], before=node, like=[node])
        edit.replace(node, edit.call_function(operator.mul, call, 1, before=node, like=[node]))
        edit.drop_module("block.q", {"weight": Piece(f"{name}.weight"), "bias": Piece(f"{name}.bias")}, twin=name)


class TestNodes:
    def test_carry_the_meta_of_what_they_stand_for(self) -> None:
        def edits(edit: Editor, nodes: dict[str, Node]) -> None:
            nodes["block_q"].meta.update(stack_trace="line 1", note={"a": 1})
            q_to_twice_k(edit, nodes)

        nodes = nodes_of(edited(edits))
        for name in ("block_doubled", "mul_1"):
            meta = nodes[name].meta
            assert (meta["stack_trace"], meta["note"]) == ("line 1", {"a": 1})
            (source,) = meta["from_node"]
            assert (source.name, source.pass_name) == ("block_q", "edit")
            assert tag_of(nodes[name]).marks == ("edit",)
            assert tag_of(nodes[name]).origin == ("edit", ("block_q",))

    def test_may_be_replaced_any_number_of_times(self) -> None:
        """torch's own notes of origin copy the earlier ones deeply, until Python's stack ends."""

        def renew(edit: Editor, nodes: dict[str, Node]) -> None:
            for _ in range(250):
                node = edit.current(nodes["relu"])
                edit.replace(node, edit.call_function(torch.relu, nodes["x"], before=node, like=[node]))

        assert "relu" in edited(renew).code

    def test_values_are_described_anew_where_their_size_differs(self) -> None:
        def edits(edit: Editor) -> None:
            node = nodes_of(edit.graph_module)["block_q"]
            name = edit.add_module("block.q", "wide", nn.Linear(3, 7))
            edit.call_module(name, node.args[0], before=node, like=[node], last_dim=7)
            edit.call_function(F.pad, node.args[0], (0, 1), before=node, like=[node], value_of=node, last_dim=4)
            edit.call_method("clone", node.args[0], before=node, like=[node])

        graph_module = infer_shapes(traced(), torch.randn(2, 3))
        nodes = nodes_of(Edit(edits)(graph_module))
        shapes = [tuple(nodes[name].meta["val"].shape) for name in ("block_wide", "pad", "clone")]
        assert shapes == [(2, 7), (2, 4), (2, 3)]

    def test_values_are_plain_in_inference_mode_and_sizes_that_may_be_zero_count_as_one_in_strides(self) -> None:
        def widened(exported: Any) -> Tensor:
            def edits(edit: Editor) -> None:
                node = nodes_of(edit.graph_module)["linear"]
                edit.call_function(torch.relu, node, before=node.next, like=[node], last_dim=9)

            value: Tensor = nodes_of(Edit(edits)(exported.module()))["relu"].meta["val"]
            return value

        with torch.inference_mode():
            assert not widened(torch.export.export(nn.Linear(3, 3), (torch.randn(2, 3),))).is_inference()
        chosen = Computes(lambda m, x: m.linear(x[:, (x[0, :, 0] > 0).nonzero().squeeze(1)]), linear=nn.Linear(3, 3))
        exported = torch.export.export(chosen, (torch.randn(2, 4, 3),))
        assert str(widened(exported).stride()) == "(9*Max(1, u0), 9, 1)"

    def test_that_were_replaced_are_followed(self) -> None:
        def edits(edit: Editor, nodes: dict[str, Node]) -> None:
            old, call = nodes["relu"], nodes["block_k"]
            new = edit.call_function(torch.relu, nodes["x"], before=old, like=[old])
            newer = edit.call_function(torch.tanh, new, before=old, like=[old])
            edit.replace(old, newer)
            assert edit.current(old) is newer
            assert edit.current(call) is call
            assert edit.is_stale([call, old])
            assert not edit.is_stale([call, new])
            last = edit.call_function(torch.add, old, other=old, before=call, like=[call])
            assert last.all_input_nodes == [newer]

        graph_module = edited(edits)
        assert "tanh" in graph_module.code

    def test_that_are_gone_are_no_place(self) -> None:
        def edits(edit: Editor, nodes: dict[str, Node]) -> None:
            q_to_twice_k(edit, nodes)
            edit.call_function(torch.relu, nodes["x"], before=nodes["block_q"], like=[nodes["x"]])

        with pytest.raises(PassError, match="node `block_q` was already removed; insert before a node that is still"):
            edited(edits)

    def test_with_users_cannot_be_erased(self) -> None:
        with pytest.raises(PassError, match="block_q"):
            edited(lambda edit, nodes: edit.erase(nodes["block_q"]))


class TestModules:
    def test_names_are_fresh(self) -> None:
        def edits(edit: Editor, nodes: dict[str, Node]) -> None:
            names = [edit.add_module("block.q", label, nn.ReLU()) for label in ("k", "k", "scale", "new", "offset")]
            assert names == ["block.k_1", "block.k_2", "block.scale_1", "block.new", "block.offset_1"]
            assert edit.add_module("block", "graph", nn.ReLU()) == "graph_1"
            assert edit.add_module("x", "new", nn.ReLU()) == "new"

        graph_module: Any = edited(edits)
        assert [name for name, _ in graph_module.block.named_children()][:3] == ["q", "k", "k_1"]

    def test_that_are_called_cannot_be_dropped(self) -> None:
        with pytest.raises(
            PassError, match=r"`block.q` is still used by node `block_q`; replace or erase that node first"
        ):
            edited(lambda edit, nodes: edit.drop_module("block.q", {}))

    def test_that_were_called_anew_cannot_be_dropped(self) -> None:
        def edits(edit: Editor, nodes: dict[str, Node]) -> None:
            q_to_twice_k(edit, nodes)
            edit.call_module("block.doubled", nodes["x"], before=nodes["block_k"], like=[nodes["block_k"]])
            edit.drop_module("block.doubled", {})

        with pytest.raises(PassError, match=r"`block.doubled` is still used by node `block_doubled`"):
            edited(edits)

    def test_flag_of_a_module_without_twin(self) -> None:
        def edits(edit: Editor) -> None:
            node = nodes_of(edit.graph_module)["block_q"]
            edit.replace(node, edit.call_function(torch.relu, node.args[0], before=node, like=[node]))
            edit.drop_module("block.q", {})

        graph_module: Any = Edit(edits)(traced())
        take_back(graph_module)
        assert not graph_module.block.q.training
        assert graph_module.block.q.weight is None


class TestTensors:
    @pytest.mark.parametrize(("name", "persistent"), [("scale", True), ("offset", False)])
    def test_come_back_as_what_they_were(self, name: str, persistent: bool) -> None:
        def edits(edit: Editor) -> None:
            nodes = nodes_of(edit.graph_module)
            new = nn.Module()
            new.register_buffer("running_mean", getattr(edit.graph_module.block, name).detach().clone())
            target = edit.add_module("block.q", "holder", new)
            node = next(user for user in nodes[f"block_{name}"].users)
            other = node.args[0] if node.args[1] is nodes[f"block_{name}"] else node.args[1]
            edit.replace(node, edit.call_function(operator.pos, other, before=node, like=[node]))
            edit.drop_tensor(f"block.{name}", Piece(f"{target}.running_mean"))

        graph_module: Any = traced()
        if not persistent:
            graph_module.block._non_persistent_buffers_set.add(name)
        keys = list(graph_module.state_dict())
        Edit(edits)(graph_module)
        assert f"block.{name}" not in graph_module.state_dict()
        assert f"block_{name}" not in nodes_of(graph_module)
        take_back(graph_module)
        assert list(graph_module.state_dict()) == keys
        assert isinstance(getattr(graph_module.block, name), nn.Parameter) is persistent

    def test_that_are_read_cannot_be_dropped(self) -> None:
        with pytest.raises(PassError, match=r"`block.scale` is still used by node `block_scale`"):
            edited(lambda edit, nodes: edit.drop_tensor("block.scale", None))


class TestRecord:
    def test_of_a_site(self) -> None:
        (record,) = history(edited(q_to_twice_k))
        (rewrite,) = record.rewrites
        assert rewrite.site == "block.q"
        assert (rewrite.before, rewrite.after) == (("block_q",), ("block_doubled", "mul_1"))
        assert (rewrite.modules_before, rewrite.modules_after) == (("block.q",), ("block.doubled",))
        assert record.changed

    def test_of_what_was_computed(self) -> None:
        derived = Derived("m:f", (("weight", "a"),), (), ("b",))
        (record,) = history(edited(lambda edit, nodes: edit.derived(derived)))
        assert (record.derived, record.journal, record.changed) == ((derived,), Edits(), False)

    def test_numbers_of_nodes_are_unique_through_several_editors(self) -> None:
        def edits(edit: Editor) -> None:
            nodes = nodes_of(edit.graph_module)
            other = Editor(GraphIndex(edit.graph_module), Edit(print))
            for each in (edit, other, edit):
                each.call_function(torch.relu, nodes["x"], before=nodes["relu"], like=[nodes["relu"]])
            Edit(lambda inner: q_to_twice_k(inner, nodes))(edit.graph_module)
            other.call_function(torch.relu, nodes["x"], before=nodes["relu"], like=[nodes["relu"]])

        graph_module = Edit(edits)(traced())
        numbers = [tag_of(node).id for node in iter_nodes(graph_module.graph)]
        known = [number for number in numbers if number is not None]
        assert len(known) == len(set(known)) > 5

    def test_outside_of_a_run_edits_work_and_nothing_is_recorded(self) -> None:
        graph_module = traced()
        Edit(lambda edit: q_to_twice_k(edit, nodes_of(graph_module))).transform(graph_module)
        assert history(graph_module) == ()
        assert "block_doubled" in nodes_of(graph_module)

    def test_refers_to_nodes_by_number_in_any_nesting(self) -> None:
        graph = Graph()
        x = graph.placeholder("x")
        nested: Any = (x, (slice(None), slice(0, x, 1), [x, {"a": (x, 1.5)}]))
        item = graph.call_function(operator.getitem, nested)
        graph.output({"y": item})
        graph_module = GraphModule(nn.Module(), graph)

        def edits(edit: Editor) -> None:
            new = edit.call_function(operator.getitem, *item.args, before=item, like=[item])
            edit.replace(item, new)

        Edit(edits)(graph_module)
        (record,) = history(graph_module)
        refs = [ref for each in edits_of(record) for ref in walk(each) if isinstance(ref, Ref)]
        assert len(refs) == 8
        take_back(graph_module)
        restored = nodes_of(graph_module)["getitem"]
        assert str(restored.args) == str(nested)
        assert list(x.users) == [restored]


def take_back(graph_module: GraphModule) -> None:
    """Take the first journal back, and nothing else."""
    record = history(graph_module)[0]
    assert record.journal is not None
    memo: Memo = {}
    record.journal.take_back(graph_module, record.pass_name, memo)
    for finish in memo.values():
        finish()


def walk(item: Any) -> Iterator[object]:
    yield item
    if isinstance(item, list | tuple):
        for part in item:
            yield from walk(part)
    elif isinstance(item, dict):
        yield from walk(list(item.values()))
    elif isinstance(item, slice):
        yield from walk((item.start, item.stop, item.step))
    elif hasattr(item, "__dataclass_fields__"):
        for name in item.__dataclass_fields__:
            yield from walk(getattr(item, name))


class TestCost:
    def test_hubs_are_edited_in_linear_time(self, steps_of: Callable[[Callable[[], object]], int]) -> None:
        """One value with many users, each replaced."""

        class Hub(nn.Module):
            def __init__(self, count: int) -> None:
                super().__init__()
                self.layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(count))

            def forward(self, x: Tensor) -> Tensor:
                total = x
                for layer in self.layers:
                    total = total + layer(x)
                return total

        def edits(edit: Editor) -> None:
            for node in edit.index.nodes:
                if node.op == "call_module":
                    name = edit.add_module(str(node.target), "new", nn.ReLU())
                    edit.replace(node, edit.call_module(name, node.args[0], before=node, like=[node]))
                    edit.drop_module(str(node.target), {})

        def steps(count: int) -> int:
            graph_module = symbolic_trace(Hub(count))
            found = steps_of(lambda: Edit(edits)(graph_module))
            with pytest.raises(PassError):
                undo(graph_module)
            return found

        steps(10)  # what is found out once is found out here
        assert steps(400) < 4.2 * steps(100)
