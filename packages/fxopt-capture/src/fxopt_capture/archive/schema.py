"""Check the JSON of a program against torch's schema, field by field, before torch reads it.

torch takes what it finds for what it expects: text where a number should be, an expression to evaluate, a name that
becomes code. Here every field has its type, and every text its rule; a text field that a new torch has is refused until
it has one.
"""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from enum import Enum
from functools import cache
from typing import Annotated, Any

from fxopt_capture._torch import CLASSES, UnionOfFields
from fxopt_capture.archive.expressions import is_size_expression
from fxopt_capture.archive.specs import check_spec, keyword_names
from fxopt_core.errors import CaptureError, FxoptError
from fxopt_core.values.names import OPERATORS
from fxopt_rewrite.plain_names import is_plain_identifier, is_plain_path, plain_function

_FLOATS = frozenset({"Infinity", "-Infinity", "NaN"})
_DEVICES = frozenset({"cpu", "cuda", "meta", "mps", "xpu"})
_DIALECTS = frozenset({"", "ATEN", "TRAINING"})
_SPACES = "nn|_C|fft|linalg|special|functional|ops|Tensor|amp"
_SOURCE = re.compile(rf"[\w.<>-]*,(?:torch\.(?:(?:{_SPACES})\.[\w.]+|\w+)|(?!torch|#)[\w.<> ':-]*)")
_TARGET = re.compile(r"(_operator|math|torch)\.(\w+)")


class _Malformed(Exception):
    """What a field has is not what its rule says."""


def checked(cls: str, data: Any, name: str, entry: str) -> Any:
    """Return data of a class of torch's schema, with the fields that the class has.

    Raises:
        CaptureError: something in it is of another type, or breaks a rule; the message says where.
    """
    try:
        return _of_class(CLASSES[cls], data, cls)
    except (_Malformed, RecursionError) as error:
        raise CaptureError(f"{name!r} was not loaded: {entry} in it is damaged or hostile: {error!s:.400}") from error


def _read(kind: Any, data: Any, place: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _read(arguments[0], data, place)
    if origin in (typing.Union, types.UnionType):
        return None if data is None else _read(next(each for each in arguments if each is not type(None)), data, place)
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _of_class(kind, data, place)
    if origin is list and isinstance(data, list):
        return [_read(arguments[0], item, f"{place}[{index}]") for index, item in enumerate(data)]
    if origin is dict and isinstance(data, dict):
        return {key: _read(arguments[1], item, f"{place}[{key[:60]!r}]") for key, item in data.items()}
    if isinstance(kind, type) and _is_plain(kind, data):
        return data
    raise _Malformed(f"{place} is {data!r:.80}, expected {getattr(kind, '__name__', kind)}")


def _is_plain(kind: type, data: Any) -> bool:
    if issubclass(kind, Enum):
        return type(data) is int and any(data == member.value for member in kind)
    if kind is float:
        return type(data) in (int, float) or data in _FLOATS
    if kind is int:
        return type(data) is int and -(1 << 63) <= data < 1 << 64
    return kind in (str, bool) and type(data) is kind


@cache
def _fields(cls: Any) -> Mapping[str, Any]:
    hints = typing.get_type_hints(cls, dict(CLASSES))
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _of_class(cls: Any, data: Any, place: str) -> dict[str, Any]:
    fields = _fields(cls)
    is_union = issubclass(cls, UnionOfFields)
    if not isinstance(data, dict) or (is_union and (len(data) != 1 or not data.keys() <= fields.keys())):
        raise _Malformed(f"{place} is {data!r:.80}, expected {cls.__name__}")
    found = {}
    for name, kind in fields.items():
        if name in data:
            found[name] = _read(kind, data[name], f"{place}.{name}")
            _check_text(cls.__name__, name, kind, found[name], f"{place}.{name}")
    return found


def _check_text(cls: str, field: str, kind: Any, value: Any, place: str) -> None:
    """Check the texts of a field by its rule."""
    rule = _RULES.get(f"{cls}.{field}")
    if rule is None:
        if value is not None and _holds_text(kind):
            raise _Malformed(f"{place} is a field that this version of fxopt does not know")
        return
    try:
        good = rule(value)
    except FxoptError as error:
        raise _Malformed(f"{place}: {error}") from error
    if not good:
        raise _Malformed(f"{place} is {value!r:.200}, which torch.export does not write there")


@cache
def _holds_text(kind: Any) -> bool:
    arguments = typing.get_args(kind)
    return kind is str or any(map(_holds_text, arguments))


def _all(rule: Callable[[Any], bool]) -> Callable[[Any], bool]:
    """Return the rule of a list, a mapping's keys, or what may be left out, whose texts follow a rule."""
    return lambda values: values is None or all(map(rule, values))


def _anything(value: object) -> bool:
    return True


def _name(value: Any) -> bool:
    return value is None or value == "" or is_plain_identifier(value)


def _path(value: Any) -> bool:
    return value == "" or is_plain_path(value)


def _argument(value: Any) -> bool:
    return value == "" or bool(value.isidentifier() and value.isascii())


def _operator(value: Any) -> bool:
    """Accept the functions and operators that a stranger's graph may call."""
    if value.startswith("torch.ops."):
        plain_function(OPERATORS + value.removeprefix("torch.ops."))
        return True
    match = _TARGET.fullmatch(value)
    if match is None:
        raise FxoptError(f"{value!r:.80} is no function that a file from a stranger may call")
    plain_function(f"{match[1]}:{match[2]}")
    return True


def _notes(value: Any) -> bool:
    sources = value.get("source_fn_stack")
    return not sources or all(map(_SOURCE.fullmatch, sources.split(";")))


def _structure(value: Any) -> bool:
    check_spec(value)
    return True


def _inputs(value: Any) -> bool:
    check_spec(value)
    return all(map(is_plain_identifier, keyword_names(value)))


_RULES: Mapping[str, Callable[[Any], bool]] = {
    "Device.type": lambda value: value in _DEVICES,
    "SymExpr.expr_str": is_size_expression,
    "SymIntArgument.as_name": _name,
    "SymFloatArgument.as_name": _name,
    "SymBoolArgument.as_name": _name,
    "TensorArgument.name": _name,
    "TokenArgument.name": _name,
    "GraphArgument.name": is_plain_identifier,
    "Argument.as_string": _anything,
    "Argument.as_strings": _anything,
    "Argument.as_operator": _operator,
    "Argument.as_string_to_argument": _anything,
    "NamedArgument.name": _argument,
    "Node.target": _operator,
    "Node.metadata": _notes,
    "Node.name": _name,
    "Graph.tensor_values": _all(is_plain_identifier),
    "Graph.sym_int_values": _all(is_plain_identifier),
    "Graph.sym_bool_values": _all(is_plain_identifier),
    "Graph.sym_float_values": _all(is_plain_identifier),
    "Graph.custom_obj_values": lambda value: not value,
    "ConstantValue.as_string": _anything,
    "InputToConstantInputSpec.name": _name,
    "InputToParameterSpec.parameter_name": is_plain_path,
    "InputToBufferSpec.buffer_name": is_plain_path,
    "InputToTensorConstantSpec.tensor_constant_name": is_plain_path,
    "BufferMutationSpec.buffer_name": is_plain_path,
    "GradientToParameterSpec.parameter_name": is_plain_path,
    "GradientToUserInputSpec.user_input_name": _name,
    "UserInputMutationSpec.user_input_name": _name,
    "ParameterMutationSpec.parameter_name": is_plain_path,
    "ModuleCallSignature.in_spec": _inputs,
    "ModuleCallSignature.out_spec": _structure,
    "ModuleCallSignature.forward_arg_names": _all(is_plain_identifier),
    "ModuleCallEntry.fqn": _anything,
    "NamedTupleDef.field_names": _all(is_plain_identifier),
    "GraphModule.metadata": _anything,
    "GraphModule.treespec_namedtuple_fields": _anything,
    "ExportedProgram.opset_version": _anything,
    "ExportedProgram.range_constraints": _all(is_size_expression),
    "ExportedProgram.verifiers": _all(lambda value: value in _DIALECTS),
    "ExportedProgram.torch_version": _anything,
    "ExportedProgram.guards_code": _anything,
    "PayloadMeta.path_name": _anything,
    "PayloadConfig.config": _all(is_plain_path),
}
"""By class and field, what a text, or each text of a list, or each key of a mapping, has to be."""
