"""The properties, in the order in which findings are told: what others follow from comes first."""

from __future__ import annotations

from fxopt_testing.properties.base import Property
from fxopt_testing.properties.of_cost import COST
from fxopt_testing.properties.of_faults import FAULTS
from fxopt_testing.properties.of_the_numbers import EFFECTS, GRADIENTS, OTHER_INPUTS, OUTPUTS, TRAIN_MODE
from fxopt_testing.properties.of_the_pass import CONSTRUCTIBLE, NAMED, OPTIONS, SIGNATURE
from fxopt_testing.properties.of_the_result import (
    CHECKPOINTS,
    DTYPES,
    FLAGS,
    HOOKS,
    INTERFACE,
    KEYS,
    LEFTOVERS,
    TIES,
    TRACES,
)
from fxopt_testing.properties.of_the_run import (
    CALLER,
    DETERMINISTIC,
    FINDS,
    IDEMPOTENT,
    INDEPENDENT,
    PROCESS,
    REFUSALS,
    RETURNS,
    RUNS,
    WELL_FORMED,
)
from fxopt_testing.properties.of_travel import DEEPCOPY, PICKLE, UNDO

PROPERTIES: tuple[Property, ...] = (
    CONSTRUCTIBLE,
    NAMED,
    SIGNATURE,
    OPTIONS,
    RETURNS,
    RUNS,
    WELL_FORMED,
    CALLER,
    PROCESS,
    DETERMINISTIC,
    INDEPENDENT,
    HOOKS,
    DTYPES,
    FLAGS,
    TIES,
    KEYS,
    LEFTOVERS,
    INTERFACE,
    TRAIN_MODE,
    OUTPUTS,
    EFFECTS,
    OTHER_INPUTS,
    GRADIENTS,
    TRACES,
    IDEMPOTENT,
    UNDO,
    DEEPCOPY,
    PICKLE,
    CHECKPOINTS,
    FAULTS,
    COST,
    REFUSALS,
    FINDS,
)

__all__ = ["PROPERTIES", "Property"]
