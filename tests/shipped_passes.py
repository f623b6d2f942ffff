"""The passes that are shipped, and the models of the conformance kit on which CI tries each of them."""

from __future__ import annotations

import itertools

from generated_models import generated_cases

from fxopt_testing import PROPERTIES, ModelCase, Property, passes_of, zoo
from fxopt_testing.trial import Subject

FAMILIES = ("fxopt-linear", "fxopt-norm", "fxopt-arith", "fxopt-core")
CPU = "fxopt-cpu"
PASSES = [each for name in (*FAMILIES, CPU) for each in passes_of(name)]
MODELS = [list(cases) for _, cases in itertools.groupby(zoo(), key=lambda case: case.name)]
GENERATED = tuple(generated_cases(2))
SOME = zoo()[::6]  # for passes that are tried on all of the zoo by themselves


def in_ci(number: int) -> tuple[ModelCase, ...]:
    """Return each model of the zoo in every third of its forms, dtypes and modes, other ones for the next pass.

    Passes read all forms of graph by the same code, so that each cell is met by some pass; each night, by all of them.
    """
    chosen = (cases[number % min(3, len(cases)) :: 3] for cases in MODELS)
    return (*itertools.chain.from_iterable(chosen), *GENERATED)


def tried_in_ci(*distributions: str) -> list[Subject]:
    """Return the passes of some distributions, each with the models on which CI tries it."""
    names = {each.name for name in distributions for each in passes_of(name)}
    return [Subject(each, in_ci(number)) for number, each in enumerate(PASSES) if each.name in names]


def tried_everywhere(*distributions: str) -> list[Subject]:
    """Return the passes of some distributions with all models."""
    return [Subject(each, (*zoo(), *GENERATED)) for name in distributions for each in passes_of(name)]


def checks(subjects: list[Subject]) -> list[tuple[Subject, Property]]:
    """Return each pass with each property that applies to it."""
    return [(each, rule) for each in subjects for rule in PROPERTIES if rule.not_applicable(each) is None]


def name_of(value: Subject | Property) -> str:
    """Return the name of a parameter in the name of a test."""
    return value.transformation.name if isinstance(value, Subject) else value.name
