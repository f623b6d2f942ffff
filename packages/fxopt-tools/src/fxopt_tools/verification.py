"""`verify`: does a transformed module compute what the original does?"""

from __future__ import annotations

import math
import numbers
from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from fxopt_core import PreconditionError
from fxopt_tools.baseline import baseline, report_on, run_or_refuse
from fxopt_tools.inputs import OneInput, read_inputs
from fxopt_tools.reference import Reference
from fxopt_tools.report import VerificationReport


def verify(
    original: nn.Module,
    transformed: nn.Module,
    inputs: OneInput | Sequence[OneInput],
    *,
    rtol: float | None = None,
    atol: float | None = None,
) -> VerificationReport:
    """Run two modules on the same inputs and compare everything that they return.

    Each run gets copies of the inputs and of the module's buffers, runs without gradients and from the same random
    state; inputs, buffers, attributes of modules and random number generators are afterwards as they were. The modules
    keep their mode, so that dropout and batch norm in train mode are compared, too.

    Every tensor in nested tuples, lists, mappings, dataclasses, named tuples and other objects is compared, and so are
    arguments that either module wrote into, containers and caches among them. Floating-point and complex tensors have
    to agree within the tolerance of their dtype (of the dtype in which the original computes, where that is coarser);
    `fxopt_tools.measuring` states the criterion. Python's float and complex are held to that of float32. All else has
    to be equal, as have structure, shapes, dtypes, devices and layouts.

    Args:
        original: the module before it was transformed: a pass works in place, so keep a copy of it.
        transformed: the module after it.
        inputs: a tensor (one positional argument), a tuple (positional arguments), a mapping (keyword arguments),
            `Inputs` (both), or a list of such, to be verified one after the other.
        rtol: relative tolerance in place of the dtype's.
        atol: absolute tolerance in place of the dtype's. Where either is stated, both are taken as they are: atol is
            not scaled by the magnitude of the output.

    Returns:
        The report, which is true if all agree and a table when printed. Signal-to-noise ratios in it are against a run
        of the original in float64 where that is possible.

    Raises:
        PreconditionError: A module refuses the inputs (its error is chained), or inputs or tolerances make no sense.

    >>> import torch
    >>> report = verify(torch.nn.ReLU(), torch.nn.ReLU6(), [torch.tensor([1.0, -2.0]), torch.tensor([8.0])])
    >>> report.passed, [output.max_absolute_error for output in report.outputs]
    (False, [0.0, 2.0])
    """
    check_tolerances(rtol, atol)
    check_modules(original=original, transformed=transformed)
    reference = Reference(original)
    pairs = (  # one after the other: the outputs of all inputs at once could be many
        (
            baseline(original, item, "the original", number, reference),
            run_or_refuse(transformed, item, "the transformed module", number),
        )
        for number, item in enumerate(read_inputs(inputs))
    )
    report = report_on(pairs, rtol=rtol, atol=atol)
    same = ("original and transformed are the same object, which agrees with itself: transform a copy",)
    return replace(report, notes=(*report.notes, *same)) if original is transformed else report


def check_modules(**modules: object) -> None:
    """Check that what is given by a name is a module.

    Raises:
        PreconditionError: One is none.
    """
    for name, module in modules.items():
        if not isinstance(module, nn.Module):
            raise PreconditionError(
                f"{name} is a {type(module).__name__}, expected a torch.nn.Module (of an exported program, .module())"
            )


def check_tolerances(rtol: float | None, atol: float | None) -> None:
    """Check stated tolerances.

    Raises:
        PreconditionError: One is negative, infinite or no number.
    """
    for name, value in (("rtol", rtol), ("atol", atol)):
        if value is not None and not (_is_number(value) and 0 <= value < math.inf):
            raise PreconditionError(
                f"{name} is {value!r}, expected a finite number that is not negative, or None for that of the dtype"
            )


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
