"""A tree of modules as rows of data, and back, for archives.

Each module is one row, the root first; further names of a module are rows that refer to it. Modules are made without
running their constructors: they get their attributes, parameters, buffers and children. Layers are those of torch, and
those that plugins offer in the hook ``fxopt_layers``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from fxopt_core import (
    class_path,
    describe,
    registry,
)
from fxopt_rewrite import (
    Form,
    MalformedError,
    is_plain_identifier,
    is_plain_path,
    is_plain_value,
)

_RESERVED = frozenset(dir(nn.Module()))
_ACTIVATIONS = """
    celu elu gelu glu hardsigmoid hardswish hardtanh leaky_relu log_softmax logsigmoid mish relu relu6 rrelu selu
    sigmoid silu softmax softplus softsign tanh
"""


@cache
def layer_classes() -> Mapping[str, type[nn.Module]]:
    """Return the layers of ``torch.nn`` by path."""
    public: list[Any] = [getattr(nn, name) for name in dir(nn) if not name.startswith(("Lazy", "DataParallel"))]
    public.append(torch.nn.modules.linear.NonDynamicallyQuantizableLinear)  # within nn.MultiheadAttention
    return {class_path(cls): cls for cls in public if isinstance(cls, type) and issubclass(cls, nn.Module)}


def layer_class(path: object) -> type[nn.Module] | None:
    """Return the class of this path if an untrusted file may have such layers: torch's, and those of plugins.

    >>> layer_class("torch.nn.modules.linear:Linear"), layer_class("torch.nn.modules.lazy:LazyModuleMixin")
    (<class 'torch.nn.modules.linear.Linear'>, None)
    """
    if not isinstance(path, str):
        return None
    # Plugins offer layers by the hook that fxopt's own families use; a fixed list would leave out third-party layers.
    return layer_classes().get(path) or registry().layers().get(path)


@cache
def activations() -> frozenset[Any]:
    """Return the functions that a layer of an untrusted file may hold as an attribute."""
    spaces = (torch, nn.functional)
    return frozenset(getattr(space, name) for space in spaces for name in _ACTIVATIONS.split() if hasattr(space, name))


def write_modules(
    root: nn.Module,
    tensor: Callable[[str, Tensor], Form],
    extra: Callable[[str, nn.Module], Mapping[str, Form]],
    left_out: Iterable[str] = (),
) -> list[Form]:
    """Return a root and the modules below it as data, without the children ``left_out``.

    ``tensor`` writes a parameter or buffer; ``extra`` returns the ``class`` and ``attributes`` of a module's row.
    """
    names: dict[int, str] = {}
    rows: list[Form] = []
    for name, module in root.named_modules(remove_duplicate=False):
        if name.split(".")[0] in left_out:
            continue
        if id(module) in names:
            rows.append({"name": name, "same": names[id(module)]})
            continue
        names[id(module)] = name
        rows.append({"name": name, **_state(f"{name}." if name else "", module, tensor), **extra(name, module)})
    return rows


def _state(prefix: str, module: nn.Module, tensor: Callable[[str, Tensor], Form]) -> dict[str, Form]:
    def written(local: str, value: Tensor | None) -> Form:
        return None if value is None else tensor(prefix + local, value)

    transient = module._non_persistent_buffers_set
    return {
        "training": module.training,
        "parameters": [[local, written(local, value)] for local, value in module._parameters.items()],
        "buffers": [[local, written(local, value), local not in transient] for local, value in module._buffers.items()],
        "none": [local for local, child in module._modules.items() if child is None],
    }


def read_modules(
    rows: Iterable[Form], instance: Callable[[Mapping[str, Form]], nn.Module], tensor: Callable[[Form], Tensor]
) -> dict[str, nn.Module]:
    """Return the modules that `write_modules` has written, by name.

    ``instance`` makes the module of a row, with its attributes and without tensors and children; ``tensor`` reads a
    parameter or buffer. Malformed rows raise an FxoptError, KeyError, TypeError or ValueError.
    """
    made: dict[str, nn.Module] = {}
    for row in rows:
        name = row["name"]
        # The root, whose name is empty, is the first row, and no other row is a root.
        if not isinstance(name, str) or name in made or (not made) != (name == ""):
            raise MalformedError(f"{name!r:.60} is not a valid name of a module here")
        made[name] = made[row["same"]] if "same" in row else _with_state(instance(row), row, tensor)
        if name:
            parent, _, local = name.rpartition(".")
            made[parent]._modules[_checked(local)] = made[name]
    for row in rows:
        for local in row.get("none", ()):
            made[row["name"]]._modules.setdefault(_checked(local), None)
    if not made:
        raise MalformedError("there are no modules")
    return made


def _with_state(module: nn.Module, row: Mapping[str, Form], tensor: Callable[[Form], Tensor]) -> nn.Module:
    module.training = bool(row["training"])
    for local, form in row["parameters"]:
        parameter = None if form is None else tensor(form)
        if parameter is not None and not isinstance(parameter, nn.Parameter):
            raise MalformedError(f"{form!r:.60} is not a parameter")
        module._parameters[_checked(local)] = parameter
    for local, form, persistent in row["buffers"]:
        buffer = None if form is None else tensor(form)
        if not isinstance(buffer, Tensor | None):
            raise MalformedError(f"{form!r:.60} is not a tensor")
        module._buffers[_checked(local)] = buffer
        if not persistent:
            module._non_persistent_buffers_set.add(local)
    return module


def new_module(cls: type[nn.Module], attributes: Iterable[tuple[Any, object]] = ()) -> nn.Module:
    """Make a module of a class with attributes that a layer may have, without calling its constructor.

    Attributes are data, or functions from a short list of activations; none may replace a method. The method
    ``check_attributes`` of a class, if it has one, raises if they are not what its constructor sets.
    """
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    for key, value in attributes:
        # For a name that no attribute may have, any function will do: functions are refused below.
        known = getattr(cls, key, None) if is_plain_identifier(key) and key not in _RESERVED else new_module
        if callable(known) or hasattr(type(known), "__set__"):
            raise MalformedError(f"{key!r:.60} is not an attribute of a layer")
        is_data = is_plain_value(value) and not isinstance(value, type)
        if not (is_data or (callable(value) and value in activations())):
            raise MalformedError(f"attribute {key!r:.60} of a {cls.__name__} is {describe(value)}, which is not data")
        if key in _ENLARGING and _is_excessive(cls, value):
            raise MalformedError(f"attribute {key!r} of a {cls.__name__} is {value!r:.60}, which makes huge results")
        vars(module)[key] = value
    check = getattr(module, "check_attributes", None)
    if check is not None:
        try:
            check()
        except Exception as error:  # whatever wrong types lead to
            raise MalformedError(f"a {cls.__name__} has invalid attributes: {error}") from error
    return module


_ENLARGING = frozenset({"padding", "output_padding", "output_size", "size", "scale_factor", "stride"})
_MOST_ELEMENTS = 2**30


def _is_excessive(cls: type[nn.Module], value: object) -> bool:
    """Return whether a call of a layer, for so large a number in a file, makes a result that the file does not hold."""
    # `AvgPool1d` and `Conv3d` have the number of dimensions in their names; each dimension gets an equal share.
    dims = int(cls.__name__[-2]) if cls.__name__[-2:] in ("1d", "3d") else 2
    numbers = value if isinstance(value, (list, tuple)) else (value,)
    return any(type(each) in (int, float) and abs(each) > _MOST_ELEMENTS ** (1 / dims) for each in numbers)


def _checked(local: object) -> str:
    """Return a local name that generated code can read as an attribute."""
    if not isinstance(local, str) or "." in local or not is_plain_path(f"x.{local}"):
        raise MalformedError(f"{local!r:.60} is not a valid name of a module or tensor")
    return local
