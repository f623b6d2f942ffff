"""What the other process does; see `fxopt_testing.processes`."""

from __future__ import annotations

import importlib
import importlib.util
import pickle
import sys
import warnings
from typing import Any

from fxopt_core import Transformation
from fxopt_core.options import construct
from fxopt_testing.models import model_case
from fxopt_testing.pictures import picture
from fxopt_testing.processes import Elsewhere


def answer(given: dict[str, Any]) -> Elsewhere:
    """Return what a pass is and does here."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            for name, file in given["modules"]:
                _import(name, file)
            made = pickle.loads(given["pass"])
            if isinstance(made, tuple):
                made = construct(*made)
            assert isinstance(made, Transformation)
            pictures = {id: _rows(made, id) for id in given["models"]}
            return Elsewhere(made.signature, pictures)
        except Exception as error:
            return Elsewhere(error=f"{type(error).__name__}: {error}")


def _import(name: str, file: str | None) -> None:
    try:
        importlib.import_module(name)
    except ImportError:  # a file of tests, which pytest imported by its path
        if file is None:
            raise
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)


def _rows(transformation: Transformation, id: str) -> dict[str, str]:
    case = model_case(id)
    try:
        made = transformation(case.capture().graph_module)
    finally:
        case.forget()  # the pass may have written into it
    return {name: repr(value) for name, value in picture(made).items()}
