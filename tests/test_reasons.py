"""Each reason code is provoked by a pass that fxopt ships: nothing changes, the message names names, the remedy helps.

The codes covered are those that exist, and those that the sources use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from reason_cases import CASES, Case
from reason_models import MODELS, pair
from site_passes import Neighbours
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from fxopt_core import (
    PostconditionError,
    PreconditionError,
    Refusal,
    Transformation,
    compose,
    history,
    iter_nodes,
    registry,
)
from fxopt_linear import MergeLinears
from fxopt_rewrite import REASONS, Editor, GraphIndex, SitePass, infer_shapes
from fxopt_testing.forms import FunctionTracer

SOURCES = sorted(Path(__file__).parent.parent.glob("packages/*/src/**/*.py"))
ALL_REASONS = {
    **REASONS,
    **{code: text for info in registry().available().values() for code, text in info.transformation.reasons.items()},
}
NOTHING_HELPS = "Nothing to do"
BY_CORE = {
    "overlapping",
    "instrument",
}  # whichever pass it is: see the tests after the cases, and those of rewrite
BY_MACHINE = {"not-on-cpu", "no-kernels"}  # what another machine is needed for, or played: see the families' tests
HOPELESS_BY_MACHINE = {"no-operators"}
MEASURED = {"no-range"}  # what depends on the machine or on data: see tests beside the passes


class WholeTracer(torch.fx.Tracer):
    """Goes into no module."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def example(model: Any, dtype: torch.dtype) -> Tensor:
    """Return an input of a model."""
    return torch.randn(model.shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def graph_of(model: nn.Module, form: str, x: Tensor | None) -> GraphModule:
    """Return a model as a graph; with shapes known unless the form is ``unshaped``, or it cannot be run."""
    if form == "export":
        assert x is not None
        exported: GraphModule = torch.export.export(model, (x,), strict=False).module()
        return exported
    tracers: dict[str, Callable[[], torch.fx.Tracer]] = {"functions": FunctionTracer, "whole": WholeTracer}
    tracer = tracers.get(form, torch.fx.Tracer)()
    graph_module = GraphModule(model, tracer.trace(model))
    return graph_module if form == "unshaped" or x is None else infer_shapes(graph_module, x)


def spoilt(case: Case) -> nn.Module:
    """Return the model of a case, in eval mode and with what is wrong with it."""
    torch.manual_seed(0)
    model: nn.Module = MODELS[case.model]().eval()
    case.spoil(model)
    return model


def structure(graph_module: GraphModule) -> list[object]:
    """Return what refusing must leave as it is: nodes, code, modules, tensors."""
    rows: list[object] = [graph_module.code]
    for node in iter_nodes(graph_module.graph):
        rows.append((node, node.name, node.op, node.target, str(node.args), str(node.kwargs), list(node.users)))
    rows += [(name, id(module), module.training) for name, module in graph_module.named_modules(remove_duplicate=False)]
    rows += [(key, id(tensor)) for key, tensor in graph_module.state_dict(keep_vars=True).items()]
    return rows


def refusals(case: Case, graph_module: GraphModule) -> list[Refusal]:
    """Run the pass of a case; return its refusals for the reason of the case."""
    case.by(graph_module)
    return [refusal for refusal in history(graph_module)[-1].refusals if refusal.reason == case.code]


def captured(case: Case) -> GraphModule:
    """Return the graph of the spoilt model."""
    model = spoilt(case)
    return graph_of(model, case.form, example(model, case.dtype) if case.runs else None)


def division(graph_module: GraphModule) -> str:
    """Return the name of the division of a graph."""
    return next((node.name for node in iter_nodes(graph_module.graph) if "div" in node.name), "")


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
class TestEachCase:
    @pytest.mark.parametrize("case", CASES, ids=str)
    def test_is_refused_and_changes_nothing(self, case: Case) -> None:
        graph_module = captured(case)
        before, div = structure(graph_module), division(graph_module)
        with pytest.raises(PreconditionError, match=case.code) as caught:
            case.by(graph_module, strict=True)
        assert caught.value.pass_name == case.by.name
        assert not history(graph_module)
        found = refusals(case, graph_module)
        assert found, history(graph_module)[-1]
        assert not history(graph_module)[-1].rewrites
        assert structure(graph_module) == before
        nodes = {node.name for node in iter_nodes(graph_module.graph)}
        for refusal in found:
            assert refusal.nodes
            assert nodes.issuperset(refusal.nodes)
        names = [div if name == "DIV" else name for name in case.names]
        message = " ".join(refusal.message for refusal in found)
        assert [name for name in names if f"`{name}`" not in message] == [], message

    @pytest.mark.parametrize("case", [case for case in CASES if case.mend is not None], ids=str)
    def test_the_remedy_helps(self, case: Case) -> None:
        model = spoilt(case)
        assert case.mend is not None
        case.mend(model)
        floating = next((parameter.dtype for parameter in model.parameters()), torch.float32)
        x = example(model, floating)
        expected = tree_leaves(model(x.clone()))
        graph_module = graph_of(model, case.mended_form or case.form, x)
        (case.mended_by or case.by)(graph_module)
        (record,) = history(graph_module)
        assert record.rewrites
        assert case.code not in [refusal.reason for refusal in record.refusals]
        for found, wanted in zip(tree_leaves(graph_module(x.clone())), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


class DropDoubleRelus(SitePass[Neighbours]):
    """relu(relu(x)) -> relu(x): of three in a row, two sites share the one between."""

    def match(self, index: GraphIndex) -> Iterator[Neighbours]:
        """Yield neighbours."""
        for node in index.nodes:
            first = node.args[0] if node.target == "relu" else None
            if isinstance(first, Node) and first.target == "relu":
                yield Neighbours(first, node)

    def rewrite(self, site: Neighbours, edit: Editor) -> None:
        """Use the first one."""
        edit.replace(site.second, site.first)


class ThreeRelus(nn.Module):
    """Three in a row."""

    def forward(self, x: Tensor) -> Tensor:
        return x.relu().relu().relu()


def test_overlapping_sites_are_refused_and_found_by_another_run() -> None:
    graph_module, x = torch.fx.symbolic_trace(ThreeRelus()), torch.randn(3, 4)
    DropDoubleRelus()(graph_module, expect=1)
    (refusal,) = history(graph_module)[-1].refusals
    assert (refusal.reason, refusal.nodes) == ("overlapping", ("relu_1", "relu_2"))
    assert "`relu_1 + relu_2`" in refusal.message
    assert "which removed node `relu_1`" in refusal.message
    DropDoubleRelus()(graph_module, expect=1, strict=True)
    assert torch.equal(graph_module(x), x.relu())


class TestTheTable:
    def test_every_code_is_provoked(self) -> None:
        assert {case.code for case in CASES} | BY_CORE | MEASURED | BY_MACHINE | HOPELESS_BY_MACHINE == set(ALL_REASONS)

    def test_every_code_has_a_remedy_that_is_tested_or_says_that_nothing_helps(self) -> None:
        mended = {case.code for case in CASES if case.mend is not None} | BY_CORE | MEASURED | BY_MACHINE
        assert {code for code, text in ALL_REASONS.items() if NOTHING_HELPS not in text} == mended

    def test_every_code_is_in_the_sources(self) -> None:
        text = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
        assert [code for code in ALL_REASONS if text.count(f'"{code}"') < 2] == []  # once where it is declared

    def test_what_a_pass_gives_is_among_its_reasons(self) -> None:
        assert not [str(case) for case in CASES if case.code not in case.by.reasons]

    def test_families_do_not_mean_different_things_by_one_code(self) -> None:
        declared = {pair for info in registry().available().values() for pair in info.transformation.reasons.items()}
        assert len(declared) == len({code for code, _ in declared})


def hooked(layers: int) -> GraphModule:
    """Return pairs of layers, of which the second ones have hooks, and the last one is frozen."""
    model: Any = nn.ModuleList(pair() for _ in range(layers)).eval()
    for each in model:
        each.k.register_forward_hook(lambda *_: None)
    model.append(pair().eval())
    model[-1].k.requires_grad_(False)

    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Any:
            return [layer(x * place) for place, layer in enumerate(self.layers)]

    return torch.fx.symbolic_trace(Pairs())


class TestDemands:
    @pytest.mark.parametrize("demand", [{"strict": True}, {"expect": 5}])
    def test_many_refusals_are_cut_with_one_of_each_reason(self, demand: dict[str, Any]) -> None:
        graph_module = hooked(40)
        with pytest.raises((PreconditionError, PostconditionError)) as caught:
            MergeLinears()(graph_module, **demand)
        lines = str(caught.value).splitlines()
        assert len(lines) <= 25
        assert "42" in lines[0]
        assert "nothing was changed" in lines[0]
        assert any(line.startswith("  layers.40.q: mixed-requires-grad: ") for line in lines)
        assert "  and 22 more" in lines
        for code in ("hooks", "mixed-requires-grad"):
            assert f"  What to do for {code}: {REASONS[code]}" in lines
        assert not history(graph_module)

    def test_what_a_pass_declares_is_told_as_the_remedy(self) -> None:
        class Declares(DropDoubleRelus):
            reasons: ClassVar[Mapping[str, str]] = {"too-tall": "It is too tall. Make it smaller."}

            def check(self, site: Neighbours, index: GraphIndex) -> Refusal | None:
                return index.refuse(site.label, "too-tall", f"`{site.label}` is too tall", *site.nodes)

        class Inherits(Declares):
            reasons: ClassVar[Mapping[str, str]] = {"too-wide": "It is too wide. Make it smaller."}

        assert set(Inherits.reasons) == {*REASONS, "too-tall", "too-wide"}
        for by in (Declares(), compose(MergeLinears(), Inherits())):
            with pytest.raises(PreconditionError, match=r"What to do for too-tall: It is too tall\. Make it smaller"):
                by(torch.fx.symbolic_trace(ThreeRelus()), strict=True)

    def test_a_code_that_nothing_declares_has_no_remedy(self) -> None:
        class Refuses(DropDoubleRelus):
            def check(self, site: Neighbours, index: GraphIndex) -> Refusal | None:
                return index.refuse(site.label, "too-tall", f"`{site.label}` is too tall", *site.nodes)

        with pytest.raises(PreconditionError, match=r"too-tall: `relu \+ relu_1` is too tall") as caught:
            Refuses()(torch.fx.symbolic_trace(ThreeRelus()), strict=True)
        assert "What to do" not in str(caught.value)

    def test_without_refusals_nothing_is_listed(self) -> None:
        nothing: Transformation = MergeLinears()
        with pytest.raises(PostconditionError) as caught:
            nothing(torch.fx.symbolic_trace(ThreeRelus()), expect=1)
        assert len(str(caught.value).splitlines()) == 1
