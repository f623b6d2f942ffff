"""Where a pass is documented."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, metadata, requires

from fxopt_core import PassInfo

SITE = "site/"
"""Where `nox -s docs` builds the site in a checkout."""


def page_of(name: str) -> str:
    """Return the page of a pass, relative to the site.

    >>> page_of("merge-linears")
    'passes/merge-linears.html'
    """
    return f"passes/{name}.html"


def documentation_of(info: PassInfo) -> str:
    """Return where a pass is documented.

    Its distribution states an address as ``Documentation`` among its project URLs; for the distributions of fxopt, that
    is a site with a page for each pass. Without one, it is the page that `nox -s docs` builds in a checkout of fxopt,
    relative to that checkout, or, for other distributions, the command that shows the docstring.
    """
    stated = _stated(info.distribution)
    if _is_of_fxopt(info.distribution):
        stated = stated or _stated("fxopt")
        if stated:
            return f"{stated.rstrip('/')}/{page_of(info.name)}"
        return f"{SITE}{page_of(info.name)}"
    cls = info.transformation
    return stated or f"python -m pydoc {cls.__module__}.{cls.__qualname__}"


def _stated(distribution: str) -> str:
    """Return the address of the documentation that a distribution states; "" for none."""
    try:
        lines = metadata(distribution).get_all("Project-URL") or []
    except (PackageNotFoundError, ValueError):  # a plugin registered by hand has no distribution
        return ""
    found = re.search(r"^(?:documentation|docs) *, *(\S+)", "\n".join(map(str, lines)), re.IGNORECASE | re.MULTILINE)
    return "" if found is None else found[1]


def _is_of_fxopt(distribution: str) -> bool:
    """Whether a distribution is fxopt, or one of its own that it requires: those share one site."""
    names = {re.split(r"[^\w.-]", each, maxsplit=1)[0] for each in requires("fxopt") or []}
    return distribution == "fxopt" or (distribution.startswith("fxopt-") and distribution in names)
