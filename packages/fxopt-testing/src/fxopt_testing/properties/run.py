"""Properties of running a pass, whatever it does."""

from __future__ import annotations

from collections.abc import Iterator

from fxopt_core import iter_nodes, leaves
from fxopt_rewrite import REASONS
from fxopt_testing.findings import Flaw, if_preserving, on_model, on_pass
from fxopt_testing.forms import sizes_from_values
from fxopt_testing.pictures import changes, picture
from fxopt_testing.trial import Subject, Trial, memory_of


@on_model(
    "the pass raises no error on any valid model, and returns a graph module that lints and compiles",
    "End `transform` with `return graph_module`; insert new nodes in front of their users. Read calls through the "
    "views of fxopt_rewrite (`read_linear`, ...), which know keyword arguments and every form of graph; leave alone, "
    "with a reason, what you do not handle.",
    if_changed=False,
)
def runs(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    if trial.error is not None:
        # Core raises an error that names the pass; what the pass itself raised is the cause.
        cause = trial.error.__cause__ or trial.error
        yield Flaw(f"{type(cause).__name__}: {cause}", "a result, or the site left alone with a reason")
    elif trial.case.device == "cpu" and (trial.changed or trial.refusals):
        try:
            subject.transformation(sizes_from_values(trial.fresh()))
        except Exception as error:
            cause = error.__cause__ or error
            found = f"with batches whose size comes from a value: {type(cause).__name__}: {cause}"
            advice = "Compare sizes by `same_size` and `same_sizes`, which add no guard; refuse what is unknown."
            yield Flaw(found, "a result, or the site left alone with a reason", advice)


@on_model(
    "the compiled code is that of the graph",
    "Leave recompiling to the call of the pass.",
)
def well_formed(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    if trial.done.code != trial.done.graph.python_code("self").src:
        yield Flaw("the compiled code is not that of the graph", "graph_module.code to follow the graph")


@on_model(
    "the model that was traced stays as it is: values, memory, flags, keys, hooks, modes",
    "A tracer shares modules and tensors with the model. Put new modules beside the old ones (`Editor.add_module`), "
    "and write into no tensor and no attribute of an old one.",
    if_changed=False,
)
def caller_untouched(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    if trial.touched:
        more = f" (and {len(trial.touched) - 1} more)" if len(trial.touched) > 1 else ""
        yield Flaw(f"in the caller's model, {trial.touched[0]}{more}", "the caller's model as it was, bit for bit")


@on_model(
    "random state, grad mode, default dtype and the like stay as they are",
    "Make new modules without random initialisation (`bare_module`, or device='meta'), and set modes by `with`.",
    if_changed=False,
)
def process_untouched(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    if trial.process:
        yield Flaw(trial.process[0], "random state, grad mode, default dtype and context as they were")


@on_model(
    "on equal models, equal passes do the same, however often they ran before",
    "Let nothing but options and graph decide: no counter on the pass or its class, no random number, no order of a "
    "set.",
)
def deterministic(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    for by, differing, _ in trial.repeats:
        for name, now, was in differing:
            yield Flaw(f"{by} on an equal model: {name} is {now}", f"{was}, as the first time")


@on_model(
    "applying the pass twice equals applying it once",
    "Let `match` leave out what `rewrite` puts in: test `self.transformed(node)`, or look for what is gone afterwards.",
    applies=lambda subject, trial: if_preserving(subject, None),  # also on models that do not compute
)
def idempotent(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    again = subject.transformation(trial.transformed())
    for name, now, was in changes(trial.after, picture(again), limit=1):
        yield Flaw(f"applied twice, {name} is {now}", f"{was}, as after the first time")


@on_model(
    "a refusal has a reason code that is known, a sentence that names the node or module, and nodes of the graph",
    "Make refusals by `index.refuse(label, code, message, *nodes)`; `fxopt_rewrite.REASONS` lists codes, and the "
    "attribute `reasons` of the class those of its own: a mapping of each to what it means and what to do.",
    if_changed=False,
)
def refusals_explained(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    names = {node.name for node in iter_nodes(trial.source.graph)}
    declared = REASONS.keys() | {code for each in leaves(subject.transformation) for code in each.reasons}
    for refusal in trial.refusals:
        what = f"the refusal of `{refusal.site}`"
        if refusal.reason not in declared:
            yield Flaw(f"{what} has reason {refusal.reason!r}", "a reason that is declared")
        elif "`" not in refusal.message or len(refusal.message.split()) < 4:
            yield Flaw(f"{what} says {refusal.message!r}", "a sentence that names node or module in backticks")
        elif unknown := [name for name in refusal.nodes if name not in names]:
            yield Flaw(f"{what} names node `{unknown[0]}`, which the graph does not have", "nodes of the graph")


@on_pass(
    "the pass changes at least one of the models",
    "Give a model with sites, check_transformation(..., site_model=ModelCase(...)), or let the docstring of the pass "
    "have an example, `>>> MyPass()(graph_module)`, whose graph is tried.",
    applies=lambda subject, trial: None if subject.transformation._edits else "the pass leaves the graph as it is",
)
def finds_sites(subject: Subject) -> Iterator[Flaw]:
    site_model = subject.site_model
    # The site model in other forms, dtypes and modes has the same name, but not the same id.
    tried = [trial for trial in subject.trials if site_model is None or trial.case.name == site_model.name]
    if any(trial.error or trial.changed for trial in tried):
        return
    refused = {refusal.reason for trial in tried for refusal in trial.refusals}
    more = f"; refused for {', '.join(sorted(refused))}" if refused else ""
    what = f"none of {len(tried)} models" if site_model is None else f"nothing of the site_model {site_model.name!r}"
    yield Flaw(f"the pass changed {what}{more}, so that what it does was not seen", "a model with a site")


@on_model(
    "the results of two runs share no memory",
    "Make new tensors and modules in each run; keep none on the pass or its class.",
)
def results_independent(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    seen = memory_of(trial.done)
    for _, _, mine in trial.repeats:
        for memory in mine.keys() & seen.keys():
            yield Flaw(f"`{mine[memory]}` shares memory with `{seen[memory]}` of another result", "tensors of its own")
        seen.update(mine)
