"""The properties, in the order in which findings are reported: causes before their consequences."""

from __future__ import annotations

from fxopt_testing.findings import Property
from fxopt_testing.properties import numbers, result, run, the_pass, travel, way_back

PROPERTIES: tuple[Property, ...] = (
    the_pass.constructible,
    the_pass.named,
    the_pass.signature_stable,
    the_pass.options_honoured,
    run.runs,
    run.well_formed,
    run.caller_untouched,
    run.process_untouched,
    run.deterministic,
    run.results_independent,
    result.hooks_kept,
    result.dtypes_kept,
    result.flags_kept,
    result.ties_kept,
    result.keys_kept,
    result.no_leftovers,
    result.interface_kept,
    numbers.TRAIN_MODE,
    numbers.OUTPUTS,
    numbers.EFFECTS,
    numbers.other_inputs,
    numbers.GRADIENTS,
    result.traces_kept,
    run.idempotent,
    travel.exact_undo,
    travel.survives_deepcopy,
    travel.survives_pickling,
    result.checkpoints_load,
    way_back.checkpoints_return,
    run.refusals_explained,
    run.finds_sites,
)

__all__ = ["PROPERTIES", "Property"]
