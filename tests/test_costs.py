"""What the shipped passes do grows as the number of nodes does."""

from __future__ import annotations

import pytest
from house_properties import COST
from nightly import mostly_nightly
from shipped_passes import CPU, FAMILIES, name_of, tried_everywhere

from fxopt_testing.plugin import run_check
from fxopt_testing.trial import Subject

IN_CI = ("merge-linears",)  # that of all passes takes minutes


@pytest.mark.parametrize("subject", mostly_nightly(tried_everywhere(*FAMILIES, CPU), IN_CI, name_of))
def test_what_passes_cost(subject: Subject) -> None:
    run_check(subject, COST)
