"""The kit finds nothing in passes that are right, on a sixth of the zoo."""

from __future__ import annotations

import defects_of_checkpoints as checkpoints
import defects_of_passes as passes
import defects_of_results as results
import pytest

from fxopt_core import Transformation
from fxopt_testing import check_transformation, zoo


@pytest.mark.parametrize("cls", [results.Renewing, results.Padding, passes.Commuting, checkpoints.Doubling])
def test_passes_that_are_right_pass(cls: type[Transformation]) -> None:
    assert check_transformation(cls(), models=zoo()[1::6])
