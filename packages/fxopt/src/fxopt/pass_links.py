"""Where a pass is documented."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, metadata

from fxopt_core import PassInfo


def page_of(name: str) -> str:
    """Return the page of a pass, relative to the site.

    >>> page_of("merge-linears")
    'passes/merge-linears.html'
    """
    return f"passes/{name}.html"


def documentation_of(info: PassInfo) -> str:
    """Return where a pass is documented.

    Its distribution states an address as ``Documentation`` among its project URLs. fxopt's own site has a page for each
    pass. Without an address, it is the command that shows the docstring.
    """
    stated, cls = _stated(info.distribution), info.transformation
    if stated and stated == _stated("fxopt"):
        return f"{stated}/{page_of(info.name)}"
    return stated or f"python -m pydoc {cls.__module__}.{cls.__qualname__}"


def _stated(distribution: str) -> str:
    """Return the address of the documentation that a distribution states; "" for none."""
    try:
        lines = metadata(distribution).get_all("Project-URL") or []
    except (PackageNotFoundError, ValueError):  # a plugin registered by hand has no distribution
        return ""
    found = re.search(r"^(?:documentation|docs) *, *(\S+)", "\n".join(map(str, lines)), re.IGNORECASE | re.MULTILINE)
    return "" if found is None else found[1]
