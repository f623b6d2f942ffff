"""The library of kernels: defines the operators `torch.ops.fxopt.*`, and loads their kernels where they were built.

Every operator is defined here, with a reference in plain torch that tells its results under fake tensors. Without a
library (`isa()` is None), the reference runs in its place.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import torch

from fxopt_cpu.operators.attention import ATTENTION, ATTENTION_MERGED
from fxopt_cpu.operators.conv import CONV
from fxopt_cpu.operators.definition import Operator
from fxopt_cpu.operators.linear import LINEAR
from fxopt_cpu.operators.norms import EMBEDDING_NORM, NORM
from fxopt_cpu.operators.plan import RUN

OPERATORS: tuple[Operator, ...] = (LINEAR, ATTENTION, ATTENTION_MERGED, NORM, EMBEDDING_NORM, CONV, RUN)
# Instruction sets that the library is compiled for; one with a later name has all of those before it, except avxvnni.
ISAS = ("portable", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512bf16", "amx")
VARIABLE = "FXOPT_KERNELS_ISA"

_library = torch.library.Library("fxopt", "FRAGMENT")  # type: ignore[no-untyped-call]  # torch.library is untyped
# One file for every Python and for torch from 2.13 on, because it uses torch's stable ABI only.
_file = Path(__file__).with_name("_kernels.so")
_loaded: ctypes.CDLL | None = None
_isa: str | None = None


def isa() -> str | None:
    """Return the instruction set that the operators use (`ISAS`), or None where the library was not built.

    It is the highest that the processor has; the environment variable `FXOPT_KERNELS_ISA` lowers it.
    """
    return _isa


def limit_isa(name: str) -> str | None:
    """Use the highest instruction set of the processor that is not above this one, and return it; for tests."""
    global _isa
    if name not in ISAS:
        raise ValueError(f"{VARIABLE} is {name!r}, expected one of {', '.join(ISAS)}")
    if _loaded is not None:
        _isa = ISAS[_loaded.fxopt_limit_kernels(ISAS.index(name))]
    return _isa


for _operator in OPERATORS:
    _library.define(_operator.schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    # The reference serves as the fake: a separate one would trace faster, but its shapes or strides could differ.
    torch.library.register_fake(f"fxopt::{_operator.name}", _operator.reference, lib=_library)
    _library.impl(_operator.name, _operator.with_gradient, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
    if not _file.exists():
        _library.impl(_operator.name, _operator.reference, "CPU")  # type: ignore[no-untyped-call]
if _file.exists():
    torch.ops.load_library(str(_file))  # type: ignore[no-untyped-call]
    # The same library, for its C function `fxopt_limit_kernels`, which is not an operator.
    _loaded = ctypes.CDLL(str(_file))
limit_isa(os.environ.get(VARIABLE) or ISAS[-1])
