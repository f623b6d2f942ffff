"""A pickled graph module comes back with its graph; `test_fresh_process` reads it in another one."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import GraphModule
from torch.fx.traceback import NodeSource
from traced_blocks import SAMPLES, Functional, functional, hook, node_rows, same, subclass, tensor_rows, traced

from fxopt_core import faithful_copy, install_pickling, iter_nodes
from fxopt_core.errors import FxoptError


def is_installed(graph_module: Any) -> bool:
    """Whether a graph module pickles its graph."""
    return getattr(type(graph_module).__reduce_ex__, "__module__", "") == install_pickling.__module__


def touched(make: Callable[[], Any]) -> Any:
    """A sample with a renamed, an unused and a reordered node, marks, and a history of erased names."""
    graph_module = make()
    output = graph_module.graph.output_node()
    placeholder = graph_module.graph.find_nodes(op="placeholder")[0]
    with graph_module.graph.inserting_before(output):
        unused = graph_module.graph.call_function(torch.sigmoid, (placeholder,))
        erased = graph_module.graph.call_function(torch.tanh, (placeholder,))
    graph_module.graph.erase_node(erased)
    unused._rename("a_name_of_its_own")
    for number, node in enumerate(iter_nodes(graph_module.graph)):
        node.meta["fxopt"] = ("mark", number)
    placeholder.users = dict(reversed(list(placeholder.users.items())))
    graph_module.meta["fxopt"] = ("ledger",)
    graph_module.recompile()
    install_pickling(graph_module)
    return graph_module


def structure(graph_module: Any) -> Any:
    """Everything that a pickle promises to keep, by value."""
    graphs = [
        (
            type(module).__name__,
            module.code,
            node_rows(module.graph),
            [node.meta.get("fxopt") for node in iter_nodes(module.graph)],
            module.graph._graph_namespace._used_names | {node.name for node in iter_nodes(module.graph)},
            module.graph._graph_namespace._base_count,
            module.meta.get("fxopt"),
        )
        for module in graph_module.modules()
        if isinstance(module, GraphModule)
    ]
    modules = [
        (name, type(module).__qualname__, module.training, list(vars(module)), module._non_persistent_buffers_set)
        for name, module in graph_module.named_modules(remove_duplicate=False)
    ]
    return graphs, modules, tensor_rows(graph_module), list(graph_module.state_dict())


def through_pickle(graph_module: Any) -> Any:
    return pickle.loads(pickle.dumps(graph_module))


def through_torch(graph_module: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(graph_module, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("through", [through_pickle, through_torch])
@pytest.mark.parametrize("make", SAMPLES)
def test_a_touched_module_comes_back_whole(make: Callable[[], Any], through: Callable[[Any], Any]) -> None:
    original = touched(make)
    before = structure(original)
    once = through(original)
    assert structure(original) == before
    twice = through(faithful_copy(once))
    x = torch.ones(2, 3)
    for loaded in (once, twice):
        assert structure(loaded) == before
        loaded.graph.lint()
        assert loaded.graph.owning_module is loaded
        assert is_installed(loaded)
        assert same(loaded(x), original(x))
        assert not any({"val", "tensor_meta"} & set(node.meta) for node in iter_nodes(loaded.graph))


def test_ties_and_hooks_stay() -> None:
    loaded = through_pickle(touched(traced))
    assert loaded.linear.weight is loaded.tied.weight
    assert list(loaded.linear._forward_hooks.values()) == [hook]


def test_kept_and_dropped_meta() -> None:
    class Local(nn.Module):
        pass

    original = touched(functional)
    first, second, *_ = iter_nodes(original.graph)
    source, stack = [NodeSource(None, "a-pass")], {"a": ("a", "torch.nn.modules.linear.Linear")}
    first.meta.update(from_node=source, stack_trace="here", nn_module_stack=stack, mine=1)
    second.meta.update(nn_module_stack={"a": ("a", Local)}, val=torch.ones(1))
    loaded = [node.meta for node in iter_nodes(through_pickle(original).graph)]
    kept = {"stack_trace": "here", "nn_module_stack": stack, "from_node": source}
    assert loaded[:2] == [
        {"fxopt": ("mark", 0), **kept},
        {"fxopt": ("mark", 1), "nn_module_stack": {"a": ("a", f"{__name__}.{Local.__qualname__}")}},
    ]


def test_copies_pickle_their_graph_too() -> None:
    original = touched(functional)
    names = [node.name for node in iter_nodes(original.graph)]
    for make_copy in (copy.deepcopy, faithful_copy):
        twin = make_copy(original)
        assert is_installed(twin)
        assert [node.name for node in iter_nodes(through_pickle(twin).graph)] == names
        install_pickling(twin)
        assert twin._deepcopy_hooks == [install_pickling]


def test_an_untouched_module_pickles_as_torch_has_it() -> None:
    original = torch.fx.symbolic_trace(nn.Linear(2, 2))
    reduced: Any = original.__reduce_ex__(2)
    assert reduced[0] is torch.fx.graph_module.reduce_graph_module
    assert not is_installed(through_pickle(original))


def test_pickled_in_many_protocols() -> None:
    original = touched(functional)
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        assert structure(pickle.loads(pickle.dumps(original, protocol))) == structure(original)


def test_references_to_itself_and_to_its_methods() -> None:
    original = touched(subclass)
    original.me = [original]
    original.renamed = original.note
    loaded = through_pickle(original)
    assert loaded.me[0] is loaded
    assert loaded.renamed.__self__ is loaded
    loaded(torch.ones(1, 3))
    assert loaded.noted


def test_code_generators() -> None:
    original = touched(functional)
    original.graph.on_generate_code(_transform)
    original.recompile()
    loaded = through_pickle(original)
    assert loaded.code == original.code
    assert "# generated" in loaded.code
    original.graph.set_codegen(torch.fx.graph._BoxedCodeGen())
    assert type(through_pickle(original).graph._codegen) is torch.fx.graph._BoxedCodeGen


def _transform(_: object) -> Callable[[list[str]], list[str]]:
    return _body


def _body(body: list[str]) -> list[str]:
    return ["# generated\n", *body]


# what cannot be pickled


@pytest.mark.parametrize("check_guards", [True, False])
def test_a_graph_of_torch_export_is_refused(check_guards: bool) -> None:
    program = torch.export.export(Functional(), (torch.ones(2, 3),), strict=False)
    original: Any = program.module(check_guards=check_guards)
    install_pickling(original)
    with pytest.raises(FxoptError, match=r"fxopt_capture\.capture.*torch\.export\.save"):
        pickle.dumps(original)


def _insert(graph_module: Any, function: Any, *arguments: Any) -> None:
    with graph_module.graph.inserting_before(graph_module.graph.output_node()):
        graph_module.graph.call_function(function, (next(iter_nodes(graph_module.graph)), *arguments), name="new")


def test_symbolic_values_are_refused() -> None:
    graph_module = touched(functional)
    size = torch.fx.experimental.symbolic_shapes.ShapeEnv().create_unbacked_symint()
    with pytest.warns(UserWarning, match="Raw SymInt"):
        _insert(graph_module, torch.add, size)
    with pytest.raises(FxoptError, match=r"the symbolic value u0 cannot be pickled.*sym_size"):
        pickle.dumps(graph_module)


def test_unusual_targets_and_arguments() -> None:
    graph_module = touched(functional)
    for function in (
        torch.Tensor.add,
        math.sqrt,
        torch.special.erf,
        F.gelu,
        torch.ops.aten.add,
        torch.ops.higher_order.cond,
        hook,
        nn.ReLU,
    ):
        _insert(graph_module, function)
    for argument in (
        torch.ops.aten.add.Tensor,
        torch.ones(2),
        [{"k": slice(None)}],
        torch.strided,
        torch.device("cpu"),
        range(2),
        ...,
    ):
        _insert(graph_module, hook, argument)
    table = [
        [(n.target, n.args[1:]) for n in iter_nodes(gm.graph)] for gm in (graph_module, through_pickle(graph_module))
    ]
    assert [row[0] for row in table[0]] == [row[0] for row in table[1]]
    assert str(table[0]) == str(table[1])


def test_an_operator_that_is_not_registered_is_named() -> None:
    with torch.library._scoped_library("fxopt_pickling_test", "DEF") as library:
        library.define("twice(Tensor x) -> Tensor")
        graph_module = touched(functional)
        _insert(graph_module, torch.ops.fxopt_pickling_test.twice.default)
        data = pickle.dumps(graph_module)
        assert "twice" in str(pickle.loads(data).graph)
    with pytest.raises(FxoptError, match=r"torch\.ops\.fxopt_pickling_gone\.twice\.default, which is not registered"):
        pickle.loads(data.replace(b"fxopt_pickling_test", b"fxopt_pickling_gone"))


def test_a_newer_format_is_refused() -> None:
    create, (_, *rest), *more = touched(functional).__reduce_ex__(4)

    class Newer:
        def __reduce__(self) -> Any:
            return create, (99, *rest), *more

    with pytest.raises(FxoptError, match="pickled in format 99, and this fxopt-core reads formats up to 6; upgrade"):
        pickle.loads(pickle.dumps(Newer()))
