"""What tables are in notebooks."""

from __future__ import annotations

import pytest

from fxopt_tools import Observation, Statistics, Timing, VerificationReport


@pytest.mark.parametrize(
    "shown", [Timing(), Statistics(), Observation(Timing(), Statistics()), VerificationReport((), ("a < b",))]
)
def test_notebooks_show_tables_line_by_line(shown: Timing | Statistics | Observation | VerificationReport) -> None:
    text = shown._repr_html_()
    assert text.startswith("<pre>")
    assert text == f"<pre>{str(shown).replace('<', '&lt;').replace('>', '&gt;')}</pre>"
