"""Properties of the result's modules, tensors and nodes."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator
from contextlib import suppress

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxopt_checkpoints.load import current_tensors, load_original_state_dict
from fxopt_core import history, iter_nodes
from fxopt_core.errors import CheckpointError, PreconditionError
from fxopt_rewrite import (
    derived_problem,
    infer_shapes,
    registered_functions,
)
from fxopt_testing.findings import Flaw, if_preserving, on_model
from fxopt_testing.outcomes import behaviour_of, differences
from fxopt_testing.trial import Subject, Trial, called_modules, hooks_of


def used_names(graph_module: GraphModule) -> set[str]:
    """Return the names of the parameters and buffers that the graph reads, itself or by a module that it calls."""
    used: set[int] = set()
    for node in iter_nodes(graph_module.graph):
        if node.op == "call_module":
            module = graph_module.get_submodule(str(node.target))
            used.update(id(tensor) for tensor in (*module.parameters(), *module.buffers()))
        elif node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            used.add(id(getattr(graph_module.get_submodule(owner), name)))
    return {name for name, tensor in current_tensors(graph_module).items() if id(tensor) in used}


def _if_exact(subject: Subject, trial: Trial | None) -> str | None:
    """Apply to passes that promise no signal-to-noise ratio: the others may approximate by other dtypes."""
    approximates = getattr(subject.transformation, "promised_sqnr", None) is not None
    return "the pass declares an accuracy (promised_sqnr)" if approximates else None


def if_tensors(subject: Subject, trial: Trial | None) -> str | None:
    """Apply to models that have parameters or buffers."""
    if trial is not None and not trial.source.state_dict():
        return "the model has no parameters or buffers"
    return None


@on_model(
    "frozen stays frozen, trainable stays trainable, and train and eval mode stay",
    "Make new parameters with requires_grad of what they stand for, new modules with `.train(original.training)`, and "
    "refuse a mix (`mixed_flags_refusal`).",
)
def flags_kept(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    old = dict(trial.source.named_parameters(remove_duplicate=False))
    flags = {parameter.requires_grad for parameter in old.values()}
    for name, parameter in trial.done.named_parameters(remove_duplicate=False):
        # What a new parameter stands for is not known: its flag is checked where all old ones agree.
        expected = {old[name].requires_grad} if name in old else flags
        if expected == {not parameter.requires_grad}:
            what = "parameter" if name in old else "new parameter"
            yield Flaw(f"{what} `{name}` has requires_grad={parameter.requires_grad}", "that of what it stands for")
    modules, called = dict(trial.source.named_modules(remove_duplicate=False)), called_modules(trial.done)
    # An exported program says that it trains, whether or not its model does.
    modes = {trial.case.training, *(modules[name].training for name in called_modules(trial.source))}
    for name, module in trial.done.named_modules(remove_duplicate=False):
        # Modules that are new and not called, such as containers, may be in either mode.
        expected = {modules[name].training} if name in modules else modes if name in called else set()
        if expected == {not module.training}:
            yield Flaw(f"module `{name}` has training={module.training}", "that of what it stands for")


@on_model(
    "dtype and device of parameters and buffers stay",
    "Make new tensors in the dtype and on the device of what they stand for; compute in a wider one and round once.",
    applies=_if_exact,
)
def dtypes_kept(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    old, new = current_tensors(trial.source), current_tensors(trial.done)
    for kind in ("dtype", "device"):
        known = {getattr(tensor, kind) for tensor in old.values()}
        for name, tensor in new.items():
            expected = {getattr(old[name], kind)} if name in old else known
            if expected and getattr(tensor, kind) not in expected:
                yield Flaw(f"`{name}` has {kind} {getattr(tensor, kind)}", " or ".join(sorted(map(str, expected))))


@on_model(
    "a tensor with several names stays one tensor under all of them",
    "Change a tensor under all of its names, or refuse it (`sharing_refusal`, reason `tied-parameter`).",
)
def ties_kept(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    new = current_tensors(trial.done)
    groups: dict[int, list[str]] = {}
    for name, tensor in current_tensors(trial.source).items():
        groups.setdefault(id(tensor), []).append(name)
    for names in groups.values():
        left = [name for name in names if name in new]
        apart = [name for name in left[1:] if new[name] is not new[left[0]]]
        if apart:
            yield Flaw(f"`{apart[0]}` and `{left[0]}` are two tensors", "one tensor under both names, as before")


@on_model(
    "the state_dict loses and gains only what the pass replaced",
    "Remove what your rewrite made unused, by `Editor.drop`, and nothing else (not `delete_all_unused_submodules`); "
    "pass `persistent` on when registering a buffer anew.",
)
def keys_kept(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    old, new = current_tensors(trial.source), current_tensors(trial.done)
    used = used_names(trial.source)
    lost = [name for name in old if name not in new and name not in used]
    if lost:
        yield Flaw(f"`{lost[0]}` is gone, which the graph did not use before the pass either", "it to stay")
    was, now = trial.source.state_dict(), trial.done.state_dict()
    for name in sorted(old.keys() & new.keys()):
        if (name in was) != (name in now):
            states = "not in the state_dict", "in the state_dict (persistent)"
            yield Flaw(f"`{name}` is {states[name in now]}", states[name in was])


@on_model(
    "what became unused is removed from the module and the state_dict",
    "Drop the modules and parameters that your rewrite replaced: `Editor.drop(call, pieces)`.",
)
def no_leftovers(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    left = (used_names(trial.source) & current_tensors(trial.done).keys()) - used_names(trial.done)
    if left:
        more = f" and {len(left) - 1} more" if len(left) > 1 else ""
        yield Flaw(f"`{min(left)}`{more} is not read any more, and still there", "it to be removed")


@on_model(
    "modules and parameters with hooks stay, and are still called",
    "Refuse modules with hooks: the views of fxopt_rewrite do so by themselves (reason `hooks`).",
)
def hooks_kept(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    found, called = hooks_of(trial.done), called_modules(trial.done)
    called_before = called_modules(trial.source)
    for name, count in hooks_of(trial.source).items():
        plain = name.split("`")[1]
        if found.get(name, 0) != count:
            yield Flaw(f"{name} has {found.get(name, 0)} hooks", f"{count}, as before")
        elif plain in called_before and plain not in called:
            yield Flaw(f"{name}, which has hooks, is not called any more", "its call to stay: the hooks see it")


@on_model(
    "the result is called as the model was: arguments keep names, order and defaults",
    "Leave placeholders alone, also those that nothing reads any more; rename values, not arguments.",
    applies=if_preserving,
)
def interface_kept(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    for what, of in (("forward", lambda each: str(inspect.signature(each.forward))), ("placeholders ", _arguments)):
        was, now = of(trial.source), of(trial.done)
        if was != now:
            yield Flaw(f"the result has {what}{now}", f"{what}{was}")


def _arguments(graph_module: GraphModule) -> str:
    return ", ".join(str(node.target) for node in iter_nodes(graph_module.graph) if node.op == "placeholder")


#: Entries of `node.meta` that say where in the model a node comes from.
_KEPT = ("stack_trace", "nn_module_stack", "source_fn_stack")


@on_model(
    "nodes keep stack traces and shapes, and new ones have their own shapes",
    "Leave `node.meta` of other nodes alone; update single entries, do not replace it. Make new ones by an `Editor`, "
    "and give those whose shape is not that of what they replace to `undescribed`.",
)
def traces_kept(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    old = {node.name: node for node in iter_nodes(trial.source.graph)}
    for node in iter_nodes(trial.done.graph):
        # A new node is compared with itself, and has lost nothing.
        was = old.get(node.name, node)
        for key in _KEPT if was.op == node.op else ():
            if key in was.meta.keys() - node.meta.keys():
                yield Flaw(f"node `{node.name}` has lost its {key!r}", f"node.meta[{key!r}] to stay")
    # A pass can give new nodes shapes only where the nodes before it have some.
    if all("val" in node.meta for node in old.values() if node.op.startswith("call_")):
        yield from _shapes(trial, old.keys())


def _shapes(trial: Trial, known: Collection[str]) -> Iterator[Flaw]:
    """Compare what nodes note that are new, or have lost their notes, with what their inputs give."""
    twin, inputs = trial.transformed(), trial.case.example()
    with suppress(PreconditionError):  # what the graph calls does not run on fake tensors
        infer_shapes(twin, *inputs.args, **inputs.kwargs)
    for node, described in zip(iter_nodes(trial.done.graph), iter_nodes(twin.graph), strict=True):
        if node.name not in known or "val" not in node.meta:
            found, wanted = _sizes(node.meta.get("val")), _sizes(described.meta.get("val"))
            if len(found) != len(wanted) or not all(map(_agree, found, wanted)):
                yield Flaw(f"node `{node.name}` notes {found or 'no shape'}", f"{wanted}")


def _sizes(value: object) -> list[object]:
    """Return dtypes and sizes of the tensors in a value, one after the other."""
    tensors = [each for each in torch.utils._pytree.tree_leaves(value) if isinstance(each, Tensor)]
    return [part for each in tensors for part in (each.dtype, *each.shape)]


def _agree(one: object, other: object) -> bool:
    # A size may be a symbol in the result, and is a number in a run on the example.
    return isinstance(one, torch.SymInt) or isinstance(other, torch.SymInt) or one == other


@on_model(
    "a state_dict of the original model can be loaded into the result",
    "Give `Editor.drop` the pieces of the new tensors that hold the old ones; each with the right dimension, start and "
    "length.",
    applies=if_tensors,
)
def checkpoints_load(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    twin = trial.transformed()
    for derived in (each for record in history(twin) for each in record.derived):
        problem = derived_problem(derived, registered_functions())
        if problem is not None:
            advice = "List in the pass's `arithmetic` the functions that its `Derived` records name."
            yield Flaw(f"a record {problem}", "functions that the pass lists, and data", advice)
    if any(record.rekeyed for record in history(twin)):
        return  # no record says where the values are
    try:
        load_original_state_dict(twin, trial.source.state_dict())
    except CheckpointError as error:
        yield Flaw(f"the original state_dict does not load: {error}", "load_original_state_dict(result, state) to work")
        return
    if trial.case.device == "meta":
        return
    found = behaviour_of(twin, trial.case.example(), gradients=False)
    for difference in differences(trial.found, found):
        yield Flaw(f"after loading the original state_dict, {difference.text}", "what the result does")
