"""An unknown pass that another distribution of fxopt has is told where it is."""

from __future__ import annotations

import importlib.metadata

import pytest

from fxopt_core import SHIPPED_NAMES, Registry, UnknownPassError, registry


def test_the_table_has_what_the_distributions_offer() -> None:
    """A pass or pipeline that is added to a distribution of fxopt is added to the table, too."""
    found = {
        name: source.distribution
        for source, offer in registry()._contents().offers.items()
        for name, _ in offer.items
        if source.shipped
    }
    assert found == SHIPPED_NAMES


def test_a_pass_whose_distribution_is_not_installed() -> None:
    installed = importlib.metadata.entry_points(group="fxopt")
    few = Registry([point for point in installed if point.name in ("core", "linear", "fxopt")])
    found = "it is in fxopt-simplify, which is not loaded; unless it is installed: pip install fxopt-simplify"
    with pytest.raises(UnknownPassError, match=found):
        few.pipeline("inference")
    with pytest.raises(UnknownPassError, match="did you mean merge-linears"):
        few.create("merge-linear")


def test_at_most_three_names_are_given() -> None:
    with pytest.raises(UnknownPassError) as caught:
        registry().create("f")
    assert str(caught.value).partition("did you mean ")[2].count(" or ") == 2
    with pytest.raises(UnknownPassError, match="fxopt list` shows those") as caught:
        registry().create("xyz")
    assert "merge-linears" not in str(caught.value)
