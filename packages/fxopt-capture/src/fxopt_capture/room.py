"""Room for the frames of deep calls, all in one piece of memory.

CPython 3.11 and later keep the frames of Python functions in chunks of 16 KiB, and give a chunk back as soon as its
last frame returns. A function that is called often from just below the end of a chunk takes and gives back a chunk at
every call (https://github.com/python/cpython/issues/142183, mended in later releases of 3.13 and 3.14). Tracing a model
is deep enough that some function stands there, and how often it is called depends on how deep the caller of all is: an
export takes up to a quarter longer for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")
_WORDS = 2**15  # a little more than half of the chunk of 512 KiB that they make CPython take; the rest is for callees


def with_room(function: Callable[[], Result]) -> Result:
    """Return ``function()``, called with 256 KiB of room for the frames below it.

    >>> with_room(lambda: 3)
    3
    """
    return function()


with_room.__code__ = with_room.__code__.replace(co_stacksize=_WORDS)
