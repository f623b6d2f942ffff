"""A pass of which the kit saw nothing does not conform; it is tried on its author's model, or on its example's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_core import LintAndRecompile, Transformation
from fxopt_testing import ConformanceError, ModelCase, check_transformation, zoo
from fxopt_testing.conformance import check_property, subjects_of
from fxopt_testing.examples import example_case
from fxopt_testing.properties.run import finds_sites

SOME = ("same-outputs", "same-gradients")


class Sines(nn.Module):
    """A sine of what a layer computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(self.layer(x))


class SinToCos(Transformation):
    """sin(x) -> cos(x), which is wrong; and no model of the zoo has a sine."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.nodes:
            if node.target in (torch.sin, torch.ops.aten.sin.default):
                node.target = {torch.sin: torch.cos}.get(node.target, torch.ops.aten.cos.default)
                self.mark_as_transformed(node)
        return graph_module


class SinToCosByExample(SinToCos):
    """sin(x) -> cos(x).

    >>> SinToCosByExample()(torch.fx.symbolic_trace(Sines())).graph.find_nodes(op="call_function", target=torch.cos)
    [sin]
    """


class Commuted(Transformation):
    """sin(x) -> sin(x * 1), which is right."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in graph_module.graph.nodes:
            if node.target in (torch.sin, torch.ops.aten.sin.default) and not self.transformed(node):
                with graph_module.graph.inserting_before(node):
                    node.args = (graph_module.graph.call_function(torch.mul, (node.args[0], 1)),)
                self.mark_as_transformed(node)
        return graph_module


CASE = ModelCase("sines", Sines, torch.ones(3, 5))


def test_a_pass_without_sites_fails_and_is_told_so() -> None:
    with pytest.raises(ConformanceError, match="so that what it does was not seen") as caught:
        check_transformation(SinToCos(), models=zoo()[:3])
    assert "site_model=ModelCase(" in str(caught.value)
    assert {each.property for each in caught.value.report.errors} == {"finds-sites"}
    rows = {row.name: row.verdict for row in caught.value.report.rows}
    assert rows["same-outputs"] == "unseen"


def test_also_where_only_some_properties_are_asked_for() -> None:
    with pytest.raises(ConformanceError, match="finds-sites"):
        check_transformation(SinToCos(), models=zoo()[:3], properties=SOME)
    assert check_transformation(SinToCos(), models=zoo()[:3], properties=["runs"])


def test_it_is_tried_on_the_authors_model() -> None:
    report = check_transformation(SinToCos(), models=zoo()[:2], site_model=CASE, properties=SOME, raises=False)
    assert {each.property for each in report.errors} == set(SOME)
    assert report.primary is not None
    assert report.primary.case is not None and report.primary.case.startswith("sines[")
    assert any("export" in each for each in (report.primary.case, *report.primary.also))


def test_a_pass_that_is_right_passes_on_it() -> None:
    report = check_transformation(Commuted(), models=zoo()[:2], site_model=CASE, properties=[*SOME, "finds-sites"])
    assert report
    assert next(row.checked for row in report.rows if row.name == "same-outputs") == 4  # in eval mode


def test_a_model_without_sites_is_no_site_model() -> None:
    case = ModelCase("no sines", lambda: nn.Linear(5, 4), torch.ones(3, 5))
    with pytest.raises(ConformanceError, match="changed nothing of the site_model 'no sines'"):
        check_transformation(Commuted(), models=[CASE], site_model=case, properties=["finds-sites"])


def test_it_is_tried_on_the_graph_of_its_example() -> None:
    (subject,) = subjects_of([SinToCosByExample()])
    subject.cases = subject.cases[:2]
    assert not check_property(subject, finds_sites).findings
    assert [trial.case.id for trial in subject.changed] == ["the example of SinToCosByExample[graph]"]


def test_what_leaves_the_graph_as_it_is_needs_no_sites() -> None:
    report = check_transformation(LintAndRecompile(), models=zoo()[:2])
    assert next(row.verdict for row in report.rows if row.name == "finds-sites") == "n/a"


class TestExamples:
    def test_inputs_are_those_that_nodes_note(self) -> None:
        class Exported(SinToCos):
            """sin(x) -> cos(x).

            >>> graph_module = torch.export.export(Sines(), (torch.ones(2, 7, 5),)).module(check_guards=False)
            >>> _ = Exported()(graph_module)
            """

        globals()["Exported"] = Exported
        case = example_case(Exported)
        assert case is not None
        assert case.example().args[0].shape == (2, 7, 5)

    @pytest.mark.parametrize("text", ["", ">>> 1 / 0", ">>> SinToCos()(torch.fx.symbolic_trace(Sines()))"])
    def test_there_may_be_none(self, text: str) -> None:
        cls = type("Undocumented", (SinToCos,), {"__doc__": text, "__module__": __name__})
        assert example_case(cls) is None
