"""Properties of a pass as an object: constructor, options, name and signature."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterable, Iterator
from contextlib import suppress
from inspect import Parameter
from typing import Any

from fxopt_core import Composition, FxoptError, Registry, Transformation, hookimpl, options_of
from fxopt_testing.findings import Flaw, on_pass
from fxopt_testing.trial import Subject, Trial, equal_pass


def _if_a_class_of_its_own(subject: Subject, trial: Trial | None) -> str | None:
    return "a composition has the options of its members" if isinstance(subject.transformation, Composition) else None


@on_pass(
    "the constructor takes keyword parameters with annotations and defaults, and no others",
    "Write `def __init__(self, *, times: int = 2) -> None`, or a dataclass with defaults.",
    applies=_if_a_class_of_its_own,
)
def constructible(subject: Subject) -> Iterator[Flaw]:
    cls = type(subject.transformation)
    init: Any = cls.__init__
    parameters = [] if init is object.__init__ else list(inspect.signature(init).parameters.values())[1:]
    for parameter in parameters:
        is_bare = Parameter.empty is parameter.default or Parameter.empty is parameter.annotation
        if is_bare or parameter.kind not in (Parameter.KEYWORD_ONLY, Parameter.POSITIONAL_OR_KEYWORD):
            found = f"{cls.__name__}() takes `{parameter}`, {parameter.kind.description}"
            yield Flaw(found, "a keyword with a type and a default, so that text can name and check it")
    cls()


@on_pass(
    "the pass has a name in kebab-case and a summary, and a registry takes it",
    "Leave `name` to the name of the class, and say in the first line of its docstring what it does.",
    applies=_if_a_class_of_its_own,
)
def named(subject: Subject) -> Iterator[Flaw]:
    name, cls = subject.transformation.name, type(subject.transformation)
    if not inspect.cleandoc(cls.__doc__ or "") or cls.__doc__ == Transformation.__doc__:
        yield Flaw("its class has no docstring", "a first line that says what it does: registries list it")
    passes = _registry_of(cls)
    if passes.failed:
        yield Flaw(f"a registry refuses it: {next(iter(passes.failed.values()))}", "a registry to take it")
    elif name not in passes.available():
        yield Flaw(f"a registry knows it as {', '.join(passes.available())}", f"{name}, the name that it gives itself")


def _registry_of(cls: type[Transformation]) -> Registry:
    class Plugin:
        @hookimpl
        def fxopt_transformations(self) -> Iterable[type[Transformation]]:
            return [cls]

    # Without the installed plugins, one of which may have a pass of this name.
    passes = Registry(entry_points=[])
    passes.register(Plugin(), name="checked")
    return passes


def _variants(transformation: Transformation) -> Iterator[tuple[str, Transformation]]:
    """Yield passes that differ from one in one option each, a number, a text or a flag."""
    for name, info in options_of(type(transformation)).items():
        other: object = None
        match transformation.options.get(name):
            # A bool is an int too, so its case comes first.
            case bool(value):
                other = not value
            case int(value) | float(value):
                other = value + 1
            case str(value):
                other = f"{value}*"
        # Annotations such as `int | None` or a Literal may exclude the changed value.
        if type(other) is info.annotation:
            with suppress(Exception):  # the pass may refuse a value
                yield name, equal_pass(transformation, **{name: other})


@on_pass(
    "options survive pipeline text and pickling, and count in the signature",
    "Let the constructor's parameters be the options, store them under their names, and leave `signature` and "
    "`options` to core.",
    applies=_if_a_class_of_its_own,
)
def options_honoured(subject: Subject) -> Iterator[Flaw]:
    transformation = subject.transformation
    passes = _registry_of(type(transformation))
    if passes.failed:
        return  # the property `named` reports it
    for name, made in [("", transformation), *_variants(transformation)]:
        value = f"`{name}={made.options.get(name)!r}`"
        if name and made.signature == transformation.signature:
            was = f"`{name}={transformation.options.get(name)!r}`"
            yield Flaw(f"the signature is the same for {value} and {was}", "options to be part of the signature")
        try:
            text = passes.pipeline_text(made)
        except FxoptError:
            continue  # a value that text cannot express
        read = passes.pipeline(text)
        (again,) = getattr(read, "transformations", None) or (read,)
        if again.signature != made.signature:
            yield Flaw(f"pipeline text {text!r} gives {again!r}", f"{made!r}, of which it was made")
        if pickle.loads(pickle.dumps(made)).signature != made.signature if subject.importable else False:
            yield Flaw(f"a pickled pass has lost {value or 'its options'}", "an equal pass")


@on_pass(
    "equal passes have equal signatures, before and after a run",
    "Leave `signature` to core; let no id, hash, time, path or counter into the options.",
)
def signature_stable(subject: Subject) -> Iterator[Flaw]:
    transformation = subject.transformation
    first = transformation.signature
    for made, other in {"equal options": equal_pass(transformation), "deepcopy": copy.deepcopy(transformation)}.items():
        if other.signature != first or other != transformation or hash(other) != hash(transformation):
            yield Flaw(f"a pass made by {made} has another signature, or is not equal", "equal passes to be equal")
    trials = subject.trials  # which run the pass, so that whatever it stores is stored
    if trials and transformation.signature != first:
        yield Flaw("running the pass changes its signature", "a signature that only options decide")
