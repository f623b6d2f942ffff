"""Names of passes, options and pipelines: their spelling, and hints for misspelt ones."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache

#: A valid name of a pass or pipeline in pipeline text.
NAME = re.compile(r"[^\W\d][\w-]*")

# Before a capital after a lower-case letter or digit (Norm2d|In), and before the last capital of several (QKV|Linears).
_WORD_START = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


@cache
def kebab_case(identifier: str) -> str:
    """Return the kebab-case form of a class name or a parameter name.

    >>> kebab_case("MergeLinears"), kebab_case("FuseBatchNorm2dInConv2d"), kebab_case("FuseQKVLinears")
    ('merge-linears', 'fuse-batch-norm2d-in-conv2d', 'fuse-qkv-linears')
    """
    words = _WORD_START.sub("-", identifier).replace("_", "-")
    return re.sub("-+", "-", words).strip("-").lower()


def option_text(parameter: str) -> str:
    """Return how pipeline text spells a constructor's parameter.

    Only the underscores change, so that two parameters never share a spelling.

    >>> option_text("min_group")
    'min-group'
    """
    return parameter.replace("_", "-")


def close_names(name: str, candidates: Iterable[str]) -> str:
    """Return a hint with up to three candidates that resemble or begin with a name; empty if there are none.

    >>> close_names("MergeLinear", ["merge-linears", "fuse-bias"])
    '; did you mean merge-linears?'
    """
    kebab, known = kebab_case(name), list(candidates)
    close = difflib.get_close_matches(kebab, known, n=3, cutoff=0.6) or [c for c in known if c.startswith(kebab)][:3]
    return f"; did you mean {' or '.join(close)}?" if close else ""


def type_text(value: object) -> str:
    """Return the name of a value's class with its article, for messages.

    >>> type_text(3), type_text("three")
    ('an int', 'a str')
    """
    return with_article(type(value).__name__)


def with_article(noun: str) -> str:
    """Return a noun with "a" or "an", chosen by its first letter.

    >>> with_article("integer")
    'an integer'
    """
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"
