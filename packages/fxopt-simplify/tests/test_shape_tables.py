"""`ShapeTables` and the passes that put it in: computed once per size, never stale, and never shared too far."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from simplify_models import TOKENS, WEIGHED, Adapted, Masked, Rotary, Standardised, X
from site_passes import Called, Computes
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from fxopt_capture import capture, load, save
from fxopt_core import FxoptError, history, iter_nodes, registry, undo
from fxopt_rewrite import infer_shapes
from fxopt_simplify import CacheShapeTables, FoldConstants, RemoveNoOps, ShapeTables
from fxopt_testing import assert_rewrites
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of, refused

FORMS: tuple[Form, ...] = ("modules", "functions", "export-dynamic")


@pytest.fixture
def rotary() -> GraphModule:
    return CacheShapeTables()(graph_of(Rotary(), "functions", X), expect=1)


def tables_of(graph_module: GraphModule) -> ShapeTables:
    found, *_ = [module for module in graph_module.modules() if isinstance(module, ShapeTables)]
    return found


# -- the passes


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [Masked, Rotary, lambda: Masked(causal=True)], ids=["mask", "rotary", "causal"])
def test_tables_are_computed_by_one_module_in_each_form(make: Callable[[], nn.Module], form: Form) -> None:
    given = X if make is Rotary else TOKENS
    others = [(given[:1],), (torch.cat([given, given]),)]
    places = 1 if make is Rotary or form == "export-dynamic" else 2  # a trace reads some sizes late
    found = assert_rewrites(CacheShapeTables(), make().eval(), given, count=places, form=form, others=others)
    assert [type(module) for module in found.modules()].count(ShapeTables) == places


def test_a_table_is_computed_once_for_each_size(rotary: GraphModule) -> None:
    tables = tables_of(rotary)
    first = tables(rotary.inverse, 3) if tables.roles[0] == "buffer" else tables(3, rotary.inverse)
    again = tables(rotary.inverse, 3) if tables.roles[0] == "buffer" else tables(3, rotary.inverse)
    assert all(one is other for one, other in zip(first, again, strict=True))


def test_what_no_size_decides_is_a_constant() -> None:
    graph = Graph()
    x, ones = graph.placeholder("x"), graph.call_function(torch.ones, (4, 4))
    graph.output(graph.call_function(torch.matmul, (x, graph.call_method("tril", (ones,)))))
    graph_module = infer_shapes(GraphModule(nn.Module(), graph), X)
    expected, code = graph_module(X), graph_module.code
    FoldConstants()(graph_module, expect=1)
    assert tables_of(graph_module)() is tables_of(graph_module)()
    assert torch.equal(graph_module(X), expected)
    assert undo(graph_module).code == code


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * _written(torch.arange(x.shape[0]) + 1)[:, None],
        lambda x: x + torch.rand((x.shape[0], 1)),
        lambda x: x + torch.zeros((x.shape[0], 1)),
        lambda x: x[torch.arange(x.argmax(), 12) % 3],
    ],
    ids=["written", "random", "one operation", "sizes of data"],
)
def test_what_is_no_table_stays(function: Callable[[Tensor], Any]) -> None:
    graph_module = torch.fx.symbolic_trace(Called(function))
    CacheShapeTables()(graph_module, expect=0)


def _written(x: Tensor) -> Tensor:
    return x.add_(1)


def test_a_returned_table_is_refused() -> None:
    graph_module = CacheShapeTables()(torch.fx.symbolic_trace(lambda x: torch.arange(x.shape[0]).unsqueeze(0)))
    assert [code for _, code in refused(graph_module)] == ["returned"]


def test_what_a_parameter_makes_element_by_element_is_no_table() -> None:
    """Norms read ``1 + weight``; what sizes decide is kept all the same."""
    learned = nn.Parameter(torch.randn(8, 4))
    model = Computes(lambda m, x: x + (m.places[: x.shape[0]] * 2).sin(), places=learned)
    assert_rewrites(CacheShapeTables(), model, X, count=0, form="export-dynamic")

    def scaled(x: Tensor, places: Tensor) -> Tensor:
        return x + torch.arange(x.shape[0]).unsqueeze(1).sin() * places

    def traced(places: Tensor) -> GraphModule:
        graph = torch.fx.Tracer().trace(scaled)
        (node,) = [each for each in graph.nodes if each.target == "places"]
        with graph.inserting_before(node):
            node.replace_all_uses_with(graph.get_attr("table"))
        graph.erase_node(node)
        return infer_shapes(GraphModule({"table": places}, graph), X)

    for places in (torch.randn(1, 4), nn.Parameter(torch.randn(1, 4))):
        assert isinstance(tables_of(CacheShapeTables()(traced(places), expect=1)), ShapeTables)


def _counted(m: Any, x: Tensor) -> Any:
    """Scores with a learned number for each distance, counted in place, as T5 and MPNet have them."""
    places = torch.arange(x.shape[0])
    distance = places[None, :] - places[:, None]
    buckets = (distance < 0).long() * 4
    buckets.add_(torch.min(distance.abs(), torch.full_like(distance, 3)))
    return x @ x.mT + m.bias(buckets).permute(2, 0, 1)


def counted(padding: int | None = None) -> Any:
    return Computes(_counted, bias=nn.Embedding(8, 2, padding))


def test_positions_that_are_counted_in_place_are_kept_with_what_they_look_up() -> None:
    model, others = counted(), [(X[:2],), (torch.cat([X, X]),)]
    dynamic = ({0: torch.export.Dim.DYNAMIC},)
    for found in (
        assert_rewrites(CacheShapeTables(), model, X, count=2, form="export-dynamic", others=others),  # one for a check
        CacheShapeTables()(capture(model, (X,), dynamic_shapes=dynamic)),
    ):
        targets = [str(node.target) for node in iter_nodes(found.graph)]
        assert not [target for target in targets if "add_" in target or "embedding" in target or target == "bias"]
        weight = found.get_parameter("bias.weight")
        with torch.no_grad():
            model.bias.weight.copy_(weight.fill_(float(weight.mean()) + 2))
        torch.testing.assert_close(found(X), model(X))


def _beside_another(x: Tensor, _: Tensor) -> Tensor:
    places, most = torch.arange(x.shape[0]), x.argmax(1)
    return x + (places * most)[:, None] + (torch.arange(x.shape[0]) * 2).sin()[:, None] + places.add_(most)[:, None]


@pytest.mark.parametrize(
    "function",
    [
        _beside_another,
        lambda x, places: x + places.add_(1)[:, None] + places[:, None],
        lambda x, places: x + places.add_(1)[:, None] + places.view(1, -1).sum(),
        lambda x, places: (x + places.add_(1)[:, None], places),
        lambda x, places: x + places.view(-1, 1) * places.add_(1)[:, None],
        lambda x, places: x + places[:, None] * places.add_(x.argmax(1))[:, None] + torch.arange(4).sin(),
        lambda x, places: x * places.sin()[:, None] + places.add_(1).mul_(x.argmax(1))[:, None],
        lambda x, places: (x + places[:, None]) * places.add_(1).cos()[:, None],
    ],
    ids=[
        "beside another", "read again", "viewed later", "returned", "viewed before", "by data", "by data in the end",
        "read before",
    ],
)  # fmt: skip
def test_what_is_written_in_place_and_seen_by_others_is_no_table(function: Callable[[Tensor, Tensor], Any]) -> None:
    graph_module = graph_of(Called(lambda x: function(x, torch.arange(x.shape[0]) * 2)), "export-dynamic", X)
    expected = graph_module(X)
    CacheShapeTables()(graph_module)
    for _ in range(3):
        torch.testing.assert_close(graph_module(X), expected)


def test_the_padding_of_a_looked_up_table_gets_no_gradient() -> None:
    model = counted(0)
    twin = copy.deepcopy(model)
    found = CacheShapeTables()(capture(model, (X,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},)), expect=1)
    for each in (twin, found):
        each(X).sum().backward()
    gradient, expected = model.bias.weight.grad, twin.bias.weight.grad  # the graph shares the model's weight
    assert gradient is not None and not gradient[0].any()
    torch.testing.assert_close(gradient, expected)


def test_a_long_chain_of_writes_is_walked_once(steps_of: Callable[[Callable[[], object]], int]) -> None:
    def chained(length: int) -> GraphModule:
        graph = Graph()
        x = graph.placeholder("x")
        size = graph.call_function(torch.ops.aten.sym_size.int, (x, 0))
        value = graph.call_function(torch.ops.aten.arange.default, (size,))
        for _ in range(length):
            value = graph.call_function(torch.ops.aten.add_.Tensor, (value, 1))
        graph.output(graph.call_function(torch.ops.aten.add.Tensor, (x, value)))
        return infer_shapes(GraphModule(nn.Module(), graph), torch.arange(4))

    one, four = (steps_of(partial(CacheShapeTables(), chained(length))) for length in (100, 400))
    assert four < 6 * one


def distances_in_buckets(x: Tensor) -> Tensor:
    """Scores with logarithms of distances, as DeBERTa has them: constants are made in the forward."""
    places = torch.arange(x.shape[0])
    distances = places[:, None] - places[None, :]
    near = torch.where(distances.abs() < 2, torch.tensor(1).type_as(distances), distances.abs())
    buckets = (near / 2).log() / torch.log(torch.tensor(7 / 2)) * distances.sign()
    return x @ x.mT / torch.sqrt(torch.tensor(4) * 3) + buckets.type_as(x)


def test_constants_that_a_forward_makes_are_part_of_one_table() -> None:
    """torch.export writes ``torch.tensor(...)`` as a copy of a buffer, and detaches the copy in place."""
    model = Called(distances_in_buckets)
    found = CacheShapeTables()(RemoveNoOps()(graph_of(model, "export-dynamic", X)), expect=1)
    assert not any(each in found.code for each in ("detach", "lift_", "log", "sqrt"))
    for x in (X, X[:2], torch.cat([X, X])):
        torch.testing.assert_close(found(x), model(x))
    four = next(each for each in vars(found).values() if isinstance(each, Tensor) and each.ndim == 0 and each == 4)
    four.fill_(16)  # as loading would
    torch.testing.assert_close(found(X), model(X) + X @ X.mT * (48**-0.5 - 12**-0.5))
    torch.testing.assert_close(undo(found)(X), found(X))


def test_positions_that_are_added_to_inputs_stay_with_their_layer() -> None:
    model = Computes(lambda m, x: x + m.places(torch.arange(x.shape[0]) + 2), places=nn.Embedding(8, 4))
    found = CacheShapeTables()(graph_of(model, "export-dynamic", X))
    assert [str(node.target) for node in iter_nodes(found.graph) if "embedding" in str(node.target)]


# -- live buffers


def test_a_buffer_that_changes_is_noticed(rotary: GraphModule) -> None:
    """By an in-place write, by load_state_dict, by assignment, and by a conversion of the module."""
    plain = copy.deepcopy(rotary)
    undo(plain)
    assert torch.equal(rotary(X), plain(X))

    def change(graph_module: GraphModule, how: str) -> None:
        if how == "write":
            graph_module.get_buffer("inverse").mul_(2)
        elif how == "assign":
            graph_module.inverse = torch.tensor([0.5, 0.25])
        elif how == "data":
            graph_module.inverse.data = torch.tensor([0.75, 0.125])
        else:
            graph_module.to(torch.float64)

    for how in ("write", "assign", "data", "convert"):
        for graph_module in (rotary, plain):
            change(graph_module, how)
        given = X.double() if how == "convert" else X
        assert torch.equal(rotary(given), plain(given)), how
        assert torch.equal(rotary(given), plain(given)), how


# -- weights of weights


def _relative(m: Any, x: Tensor) -> Any:
    """Attention to places, as in DeBERTa: layers that read weights, one of which is called with the input, too."""
    keys = m.layer(m.norm(m.places.weight)).repeat(x.shape[0], 1, 1)
    return (m.layer(x) @ keys.transpose(1, 2)).softmax(-1)


def relative() -> Any:
    return Computes(_relative, places=nn.Embedding(6, 8), norm=nn.LayerNorm(8), layer=nn.Linear(8, 8))


def biased() -> nn.Module:
    """Attention with a learned number for each distance, looked up by a buffer, as Swin, BEiT and LeViT have it."""
    places, table = torch.arange(4), nn.Parameter(torch.randn(2, 7))
    distances = (places[:, None] - places[None, :]).abs()
    return Computes(lambda m, x: (x @ x.mT)[:, None] + m.table[:, m.distances], table=table, distances=distances)


@pytest.fixture(params=[*WEIGHED, "layers", "lookups"])
def weighed(request: pytest.FixtureRequest) -> tuple[nn.Module, GraphModule, Tensor]:
    """A model, its graph after the pass, and an input."""
    torch.manual_seed(0)
    model = {**WEIGHED, "layers": relative, "lookups": biased}[request.param]().eval()
    x = torch.randn(2, 4, 8)
    sites = 2 if request.param == "layers" else 1  # the keys, and what the batch repeats of them
    return model, CacheShapeTables()(capture(model, (x,)), expect=sites), x


def test_a_weight_of_weights_is_computed_once(weighed: tuple[nn.Module, GraphModule, Tensor]) -> None:
    """Again where a weight changes, where gradients flow, and after them; undone node for node."""
    model, graph_module, x = weighed
    with torch.no_grad():
        assert torch.equal(graph_module(x), model(x))
        ((kept, _),) = tables_of(graph_module)._kept.values()
        assert torch.equal(graph_module(x), model(x))
        assert kept is next(iter(tables_of(graph_module)._kept.values()))[0]
        assert list(graph_module.state_dict()) == list(model.state_dict())
        for weight in (*model.parameters(), *graph_module.parameters()):
            weight.mul_(1.5)
        assert torch.equal(graph_module(x), model(x))
        changed = {key: value + 0.25 for key, value in model.state_dict().items()}
        for module in (model, graph_module):
            module.load_state_dict(changed)
        assert torch.equal(graph_module(x), model(x))
    for module in (model, graph_module):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        module(x).square().sum().backward()
        optimizer.step()
    assert not tables_of(graph_module)._kept  # whether or not the optimizer shows what it wrote
    for own, other in zip(model.parameters(), graph_module.parameters(), strict=True):
        assert own.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(other.grad, own.grad)
    with torch.inference_mode():
        torch.testing.assert_close(graph_module(x), model(x))
        assert graph_module(x).equal(graph_module(x))
    undo(graph_module)
    assert graph_module.code == capture(model, (x,)).code
    torch.testing.assert_close(graph_module(x), model(x))


@pytest.mark.parametrize("form", FORMS)
def test_a_layers_result_that_is_written_is_no_table(form: Form) -> None:
    def written(m: Any, x: Tensor) -> Any:
        return x @ m.layer(m.norm(m.places.weight).mul_(2)).t()

    model, x = relative().eval(), torch.randn(2, 4, 8)
    model.computes = written
    graph_module = CacheShapeTables()(graph_of(model, form, x))
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(graph_module(x), model(x))


def test_a_large_weight_is_kept_up_to_the_size_of_its_parameters() -> None:
    class Product(nn.Bilinear):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # of one input
            return F.linear(x, self.weight[:, 0] @ self.weight[:, 1].t())

    for model, kept in ((weight_norm(nn.Linear(2200, 2200, bias=False)), 1), (Product(2, 2, 2200), 0)):
        graph_module = CacheShapeTables()(capture(model.eval(), (torch.randn(1, 2200),)), expect=1)
        with torch.no_grad():
            graph_module(torch.randn(1, 2200))
        assert len(tables_of(graph_module)._kept) == kept


def test_weights_and_masks_are_kept_apart() -> None:
    """Another size does not compute the weight again."""

    def both(m: Any, x: Tensor) -> Any:
        y = m.layer(x) * (m.places[: x.shape[0]] @ m.places.t()).sum()
        return y + torch.arange(x.shape[0]).unsqueeze(1).sin()

    model = Computes(both, layer=weight_norm(nn.Linear(4, 4)), places=nn.Parameter(torch.randn(8, 4))).eval()
    graph_module = CacheShapeTables()(graph_of(model, "export-dynamic", X), expect=3)
    roles = [module.roles for module in graph_module.modules() if isinstance(module, ShapeTables)]
    assert sorted(map(sorted, roles)) == [["buffer", "buffer"], ["buffer", "size"], ["size"]]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("make", [Adapted, lambda: Standardised(4, 6, 3)], ids=["low rank", "standardised"])
def test_a_weight_of_weights_is_found_in_each_form(make: Callable[[], nn.Module], form: Form) -> None:
    assert_rewrites(CacheShapeTables(), make().eval(), torch.randn(2, 4, 8), count=1, form=form)


# -- bounds, threads, modes


def test_few_sizes_are_kept_and_large_tables_are_not(rotary: GraphModule) -> None:
    for rows in range(2, 30):
        rotary(torch.randn(rows, 4))
    assert len(tables_of(rotary)._kept) == 8
    graph = Graph()
    graph.output(graph.call_function(torch.zeros, (graph.placeholder("n"),)))
    large = ShapeTables.of(graph, ["size"])
    assert large(2**23) is not large(2**23)
    assert not large._kept


def test_many_threads_get_what_one_gets(rotary: GraphModule) -> None:
    expected = {rows: rotary(X[:1].expand(rows, 4)) for rows in range(2, 13)}

    def wrong(_: int) -> list[int]:
        return [rows for rows, y in expected.items() if not torch.equal(rotary(X[:1].expand(rows, 4)), y)]

    with ThreadPoolExecutor(4) as pool:
        assert not any(pool.map(wrong, range(40)))


def test_a_table_of_inference_mode_serves_training_later(rotary: GraphModule) -> None:
    with torch.inference_mode():
        rotary(X)
    x = X.clone().requires_grad_()
    rotary(x).square().sum().backward()
    assert x.grad is not None


def test_numbers_of_other_types_do_not_meet() -> None:
    """1, 1.0 and True are equal as keys, and make other tensors."""
    tables = ShapeTables.of(_arange_graph(), ["size"])
    assert [tables(2).dtype, tables(2.0).dtype, tables(2).dtype] == [torch.int64, torch.float32, torch.int64]
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        assert tables(2.0).dtype == torch.float64
    finally:
        torch.set_default_dtype(default)


def test_autocast_and_function_transforms_compute(rotary: GraphModule) -> None:
    plain = undo(copy.deepcopy(rotary))
    rotary(X)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(rotary(X), plain(X))
    batch = torch.stack([X, X * 2])
    assert torch.equal(torch.vmap(rotary)(batch), torch.stack([plain(X), plain(X * 2)]))
    graphs = (make_fx(each)(X).graph for each in (rotary, plain))
    called, expected = (
        sorted(str(node.target) for node in graph.nodes if node.op == "call_function") for graph in graphs
    )
    assert called == expected


# -- travel


def test_an_archive_carries_the_module_and_a_program_without_it(tmp_path: Any) -> None:
    model = Masked(causal=True).eval()
    graph_module = registry().pipeline("simplify")(capture(model, (TOKENS,)))
    expected = graph_module(TOKENS)
    path = str(tmp_path / "model.fxopt")
    save(graph_module, path)
    loaded = load(path)
    tables_of(loaded)
    assert torch.equal(loaded(TOKENS), expected)
    assert torch.equal(loaded(TOKENS), expected)
    assert len(history(loaded)) == len(history(graph_module))


def _arange_graph() -> Graph:
    graph = Graph()
    graph.output(graph.call_function(torch.arange, (graph.placeholder("n"),)))
    return graph


def test_export_and_compile_see_plain_operations() -> None:
    rotary = CacheShapeTables()(graph_of(Rotary(), "functions", X), expect=1)
    rows = torch.export.Dim("rows", min=2)
    program = torch.export.export(rotary, (X,), dynamic_shapes=({0: rows},), strict=False)
    given = torch.randn(7, 4)
    assert torch.equal(program.module()(given), rotary(given))
    compiled = torch.compile(rotary, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(compiled(given), rotary(given))
    assert torch.equal(compiled(X), rotary(X))


@pytest.mark.parametrize(
    "change",
    [
        {"target": {"name": "os:system"}},
        {"op": "call_function", "target": {"name": "builtins:max"}, "kwargs": {"key": 1}},
        {"op": "call_module", "target": "to_folder"},
        {"op": "get_attr", "target": "__class__"},
        {"op": "call_method", "target": "register_hook"},
        {"name": "ﬁ"},
    ],
)
def test_a_computation_from_a_stranger_is_operators_and_data(change: dict[str, Any]) -> None:
    """A file can hold the module: its text is checked as graphs of archives are, before torch makes code of it."""
    tables = ShapeTables.of(_arange_graph(), ["size"])
    hostile = json.loads(tables.graph)
    hostile["rows"][1] |= change
    with pytest.raises(FxoptError):
        ShapeTables(json.dumps(hostile), tables.roles)
    writing = Graph()
    writing.output(writing.call_method("add_", (writing.placeholder("weight"), 1)))
    with pytest.raises(FxoptError, match="`add_` of a table writes"):
        ShapeTables.of(writing, ["buffer"])


def test_a_table_that_is_written_is_no_input_of_another() -> None:
    aten, graph = torch.ops.aten, Graph()
    x = graph.placeholder("x")
    table = graph.call_module("table", (graph.call_function(aten.sym_size.int, (x, 0)),))
    doubled = graph.call_function(aten.mul.Tensor, (graph.call_function(aten.repeat.default, (table, [2])), 2))
    graph.call_function(aten.add_.Tensor, (table, 1))
    graph.output(graph.call_function(aten.add.Tensor, (doubled, graph.call_function(aten.sum.default, (x,)))))
    tables = ShapeTables.of(_arange_graph(), ["size"])
    CacheShapeTables()(infer_shapes(GraphModule({"table": tables}, graph), X), expect=0)


def test_constants_of_live_models_are_part_of_their_table() -> None:
    """Dynamo keeps the call of ``torch.tensor``."""
    graph = Graph()
    root = graph.call_function(torch.sqrt, (graph.call_function(torch.tensor, (4.0,)),))
    graph.output(graph.call_function(torch.div, (graph.placeholder("x"), root)))
    assert torch.equal(CacheShapeTables()(infer_shapes(GraphModule({}, graph), X), expect=1)(X), X / 2)


@pytest.mark.parametrize("unused", [False, True])
def test_tables_come_before_whatever_still_reads_a_weight(unused: bool) -> None:
    def repeats(m: Any, x: Tensor) -> Any:
        weight = m.a @ m.b
        if unused:
            _ = weight[:2]
            return x @ weight
        repeated = weight.expand(x.shape[0], 4, 4)
        return x @ repeated @ weight + repeated @ m.c

    model = Computes(repeats, **{name: nn.Parameter(torch.randn(4, 4)) for name in "abc"}).eval()
    x = torch.randn(2, 4, 4)
    graph_module = CacheShapeTables()(torch.fx.symbolic_trace(model))
    with torch.no_grad():
        torch.testing.assert_close(graph_module(x), model(x))


@pytest.mark.parametrize("name", ["relu", "sin"])
def test_a_table_cuts_no_layers_apart_and_stays_behind_checks_and_modes(name: str) -> None:
    model = Computes(
        lambda m, x: x.relu().sin() + m.table.index_select(0, m.places),
        table=nn.Parameter(torch.randn(9, 4)),
        places=torch.tensor([1, 2, 0]),
    )
    graph_module = infer_shapes(torch.fx.symbolic_trace(model), X)
    if name == "sin":
        (node,) = [each for each in iter_nodes(graph_module.graph) if each.name == name]
        with graph_module.graph.inserting_before(node):
            graph_module.graph.call_function(torch._C._set_grad_enabled, (False,))
    names = [node.name for node in iter_nodes(CacheShapeTables()(graph_module, expect=1).graph)]
    assert names[names.index("shape_tables") + 1] == name
