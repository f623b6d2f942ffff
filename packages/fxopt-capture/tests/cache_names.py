"""What the installed release of transformers calls the cache of keys and values that decoders take and return."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

try:
    IS_RENAMED = Version(version("transformers")) >= Version("5.24")
except PackageNotFoundError:  # the tests are skipped
    IS_RENAMED = False
FORMER = "past_key_values"
CACHE = "cache" if IS_RENAMED else FORMER
