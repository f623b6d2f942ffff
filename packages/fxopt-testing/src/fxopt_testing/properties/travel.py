"""Properties of results that are undone, copied and pickled."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator

from torch.fx import GraphModule

from fxopt_core import FxoptError, ReversibleTransformation, history, iter_nodes, undo
from fxopt_testing.findings import Flaw, if_reversible, on_model
from fxopt_testing.pictures import changes, picture
from fxopt_testing.trial import Subject, Trial, equal_pass


@on_model(
    "reversing brings back nodes, names, modules, flags, ties and values, bit for bit, and no marks stay",
    "Derive from ReversibleSitePass and edit through its Editor, which records how to go back; or let `reverse` "
    "restore names and order, too, and compute no value that was replaced: keep it.",
    applies=if_reversible,
)
def exact_undo(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    transformation = subject.reversible
    assert transformation is not None
    ways: dict[str, Callable[[GraphModule], GraphModule]] = {
        "pass(graph_module, reverse=True)": lambda graph_module: transformation(graph_module, reverse=True)
    }
    if subject.importable:
        ways["undo(graph_module)"] = undo
    for name, way in ways.items():
        try:
            restored = way(trial.transformed())
        except FxoptError as error:
            yield Flaw(f"{name} raises {type(error).__name__}: {error}", "the graph module of before the pass")
            return
        for what, now, was in changes(trial.before, picture(restored), limit=1):
            yield Flaw(f"after {name}, {what} is {now}", was)
        if transformation.get_transformed_nodes(restored):
            yield Flaw(f"after {name}, nodes are still marked", "no marks: `mark_as_restored`, or a ReversibleSitePass")
    untouched = picture(transformation(trial.fresh(), reverse=True))
    for what, now, was in changes(trial.before, untouched, limit=1):
        yield Flaw(f"reversing what was never applied makes {what} {now}", f"{was}: there is nothing to undo")


def _survives(subject: Subject, trial: Trial, way: str, travel: Callable[[GraphModule], GraphModule]) -> Iterator[Flaw]:
    transformation = subject.transformation
    travelled = travel(trial.done)
    marked = [node.name for node in transformation.get_transformed_nodes(trial.done)]
    found = [node.name for node in transformation.get_transformed_nodes(travelled)]
    if marked != found:
        lost = ", ".join(sorted(set(marked) ^ set(found)))
        yield Flaw(f"after {way}, the marks of {lost} differ", "the same nodes from get_transformed_nodes()")
    if len(history(travelled)) != len(history(trial.done)):
        yield Flaw(f"after {way}, there are {len(history(travelled))} records", f"{len(history(trial.done))}")
    if trial.case.device != "meta":
        if not trial.survives_torch:
            return  # it is not the pass's fault
        if not trial.computes(travelled, trial.found):
            yield Flaw(f"after {way}, the result computes something else", "the same outputs, bit for bit")
    if subject.reversible and subject.importable:
        yield from _undone(subject, trial, travelled, way)


def _undone(subject: Subject, trial: Trial, travelled: GraphModule, way: str) -> Iterator[Flaw]:
    equal = equal_pass(subject.transformation)
    assert isinstance(equal, ReversibleTransformation)
    restored = picture(equal(travelled, reverse=True))
    for what, now, was in changes(trial.before, restored):
        # torch's copies lose hooks and attributes, and make buffers persistent, which no pass can help.
        if what.startswith(("node ", "order of nodes", "parameter ", "values of `")) and was != "absent":
            yield Flaw(f"undone after {way}, {what} is {now}", was)


@on_model(
    "copies keep marks, records and numbers, and can be undone",
    "Mark nodes by `mark_as_transformed`; keep nothing on nodes, on the pass, or by identity.",
)
def survives_deepcopy(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    known = {key for node in iter_nodes(trial.source.graph) for key in vars(node)}
    for node in iter_nodes(trial.done.graph):
        own = vars(node).keys() - known
        if own:
            found = f"node `{node.name}` has an attribute `{min(own)}` that the pass has set"
            yield Flaw(found, "marks in node.meta: attributes are lost by copies and pickles")
    yield from _survives(subject, trial, "copy.deepcopy", copy.deepcopy)


@on_model(
    "pickles keep marks, records and numbers, and can be undone",
    "Mark nodes by `mark_as_transformed`; put only functions and modules into the graph that another process can "
    "import.",
)
def survives_pickling(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    try:
        pickle.dumps(trial.source)
    except Exception:  # a graph that cannot be pickled before need not be picklable afterwards
        return
    yield from _survives(subject, trial, "pickle", lambda each: pickle.loads(pickle.dumps(each)))
