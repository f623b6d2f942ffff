"""The properties, in the order in which findings are reported: causes before their consequences."""

from __future__ import annotations

from fxopt_testing.findings import Property
from fxopt_testing.properties import numbers, result, run, the_pass, travel, way_back

PROPERTIES: tuple[Property, ...] = (
    the_pass.CONSTRUCTIBLE,
    the_pass.NAMED,
    the_pass.SIGNATURE,
    the_pass.OPTIONS,
    run.RETURNS,
    run.RUNS,
    run.WELL_FORMED,
    run.CALLER,
    run.PROCESS,
    run.DETERMINISTIC,
    run.INDEPENDENT,
    result.HOOKS,
    result.DTYPES,
    result.FLAGS,
    result.TIES,
    result.KEYS,
    result.LEFTOVERS,
    result.INTERFACE,
    numbers.TRAIN_MODE,
    numbers.OUTPUTS,
    numbers.EFFECTS,
    numbers.OTHER_INPUTS,
    numbers.GRADIENTS,
    result.TRACES,
    run.IDEMPOTENT,
    travel.UNDO,
    travel.DEEPCOPY,
    travel.PICKLE,
    result.CHECKPOINTS,
    way_back.RETURN,
    run.REFUSALS,
    run.DECLARED,
    run.FINDS,
)

__all__ = ["PROPERTIES", "Property"]
