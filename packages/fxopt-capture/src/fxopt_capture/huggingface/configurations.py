"""The configurations of Hugging Face models, which may be nested, and which the models read while they run."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from fxopt_core import Containers

_KINDS = {
    "transformers.configuration_utils": "PreTrainedConfig",
    "transformers.generation.configuration_utils": "GenerationConfig",
}


def configurations(model: nn.Module) -> list[Any]:
    """Return the configurations that the modules of a model have as attributes, and those in them, each once.

    >>> configurations(nn.Linear(2, 2))
    []
    """
    kinds = tuple(getattr(sys.modules[module], name) for module, name in _KINDS.items() if module in sys.modules)
    found: dict[int, Any] = {}
    waiting = [vars(each) for each in model.modules()] if kinds else []
    # The list grows meanwhile, by the configurations that are found in others.
    for attributes in waiting:
        for value in attributes.values():
            if isinstance(value, kinds) and id(value) not in found:
                found[id(value)] = value
                waiting.append(vars(value))
    return list(found.values())


@contextmanager
def configurations_kept(model: nn.Module, others: Iterable[object] = ()) -> Iterator[None]:
    """Restore the contents of a model's configurations, and of other containers, after a ``with`` block, at any depth.

    Setting an implementation of attention or experts also writes to all nested configurations.
    """
    containers = Containers()
    containers.add([*(vars(config) for config in configurations(model)), *others])
    try:
        yield
    finally:
        containers.restore()
