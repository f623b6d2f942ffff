"""Reason codes: each is provoked by a test, each remedy helps, and it is told where sites are demanded.

The tests of each pass provoke its refusals on all forms of graph; here is what the table of codes promises.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from reason_cases import CASES, Case, Layers, pair
from site_passes import Call, Retarget, negated
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from fxopt_core import PostconditionError, PreconditionError, Refusal, compose, history, registry
from fxopt_linear import MergeLinears
from fxopt_rewrite import REASONS, GraphIndex, infer_shapes
from fxopt_testing.forms import FunctionTracer

TESTS = sorted(Path(__file__).parent.parent.glob("packages/*/tests/test_*.py"))
SOURCES = sorted(Path(__file__).parent.parent.glob("packages/*/src/**/*.py"))
ALL_REASONS = {
    **REASONS,
    **{code: text for info in registry().available().values() for code, text in info.transformation.reasons.items()},
}
BY_CORE = {"overlapping", "instrument"}  # whichever pass it is: see the tests of rewrite
BY_MACHINE = {"not-on-cpu", "no-kernels"}  # what another machine is needed for, or played: see the families' tests
MEASURED = {"no-range"}  # what depends on the machine or on data: see tests beside the passes


class WholeTracer(torch.fx.Tracer):
    """Goes into no module."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def graph_of(model: Layers, form: str, x: Tensor | None) -> GraphModule:
    """Return a model as a graph; with shapes known unless the form is ``unshaped``, or it cannot be run."""
    if form == "export":
        assert x is not None
        exported: GraphModule = torch.export.export(model, (x,), strict=False).module()
        return exported
    tracers: dict[str, Callable[[], torch.fx.Tracer]] = {"functions": FunctionTracer, "whole": WholeTracer}
    graph_module = GraphModule(model, tracers.get(form, torch.fx.Tracer)().trace(model))
    return graph_module if form == "unshaped" or x is None else infer_shapes(graph_module, x)


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.code}-{case.by.name}")
def test_the_remedy_helps(case: Case) -> None:
    torch.manual_seed(0)
    model = case.make().eval()
    case.spoil(model)
    refused = graph_of(model, case.form, torch.randn(model.shape, dtype=case.dtype) if case.runs else None)
    case.by(refused)
    (record,) = history(refused)
    assert case.code in [refusal.reason for refusal in record.refusals]
    assert not record.rewrites
    case.mend(model)
    x = torch.randn(model.shape, dtype=next((each.dtype for each in model.parameters()), torch.float32))
    expected = tree_leaves(model(x.clone()))
    graph_module = graph_of(model, case.mended_form or case.form, x)
    (case.mended_by or case.by)(graph_module)
    (record,) = history(graph_module)
    assert record.rewrites
    assert case.code not in [refusal.reason for refusal in record.refusals]
    for found, wanted in zip(tree_leaves(graph_module(x.clone())), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


class TestTheTable:
    def test_every_code_is_used_and_provoked(self) -> None:
        sources, tests = ("".join(path.read_text("utf-8") for path in paths) for paths in (SOURCES, TESTS))
        provoked = {case.code for case in CASES} | BY_MACHINE
        assert [code for code in ALL_REASONS if sources.count(f'"{code}"') < 2] == []  # once where it is declared
        assert [code for code in ALL_REASONS.keys() - provoked if f'"{code}"' not in tests] == []

    def test_every_code_has_a_remedy_that_is_tested_or_says_that_nothing_helps(self) -> None:
        mended = {case.code for case in CASES} | BY_CORE | MEASURED | BY_MACHINE
        assert {code for code, text in ALL_REASONS.items() if "Nothing to do" not in text} == mended

    def test_families_do_not_mean_different_things_by_one_code(self) -> None:
        declared = {pair for info in registry().available().values() for pair in info.transformation.reasons.items()}
        assert len(declared) == len({code for code, _ in declared})


def hooked(layers: int) -> GraphModule:
    """Return pairs of layers, of which the second ones have hooks, and the last one is frozen."""
    pairs: Any = [pair().eval() for _ in range(layers + 1)]
    for each in pairs[:-1]:
        each.k.register_forward_hook(lambda *_: None)
    pairs[-1].k.requires_grad_(False)
    layered = nn.ModuleList(pairs)
    model = Layers((3, 4), lambda m, x: [each(x * place) for place, each in enumerate(m.layers)], layers=layered)
    return torch.fx.symbolic_trace(model)


class TestDemands:
    @pytest.mark.parametrize("demand", [{"strict": True}, {"expect": 5}])
    def test_a_long_list_of_refusals_is_cut(self, demand: dict[str, Any]) -> None:
        graph_module = hooked(40)
        with pytest.raises((PreconditionError, PostconditionError)) as caught:
            MergeLinears()(graph_module, **demand)
        lines = str(caught.value).splitlines()
        assert len(lines) <= 25
        assert "42" in lines[0]
        assert "nothing was changed" in lines[0]
        assert "  and 22 more" in lines
        for code in ("hooks", "mixed-requires-grad"):
            assert f"  What to do for {code}: {REASONS[code]}" in lines
        assert not history(graph_module)

    def test_what_a_pass_declares_is_told_as_the_remedy(self) -> None:
        class Declares(Retarget):
            reasons: ClassVar[Mapping[str, str]] = {"too-tall": "It is too tall. Make it smaller."}

            def match(self, index: GraphIndex) -> Iterator[Call | Refusal]:
                calls = (node for node in index.nodes if node.op == "call_function")
                return (index.refuse(node.name, "too-tall", f"`{node.name}` is too tall", node) for node in calls)

        class Inherits(Declares):
            reasons: ClassVar[Mapping[str, str]] = {"too-wide": "It is too wide. Make it smaller."}

        assert set(Inherits.reasons) == {*REASONS, "too-tall", "too-wide"}
        for by in (Declares(), compose(MergeLinears(), Inherits())):
            with pytest.raises(PreconditionError, match=r"What to do for too-tall: It is too tall\. Make it smaller"):
                by(negated(1), strict=True)
