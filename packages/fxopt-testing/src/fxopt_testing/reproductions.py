"""`reproduction`: a program that shows a finding by itself."""

from __future__ import annotations

from fxopt_core import Composition, Transformation
from fxopt_testing.cases import ModelCase
from fxopt_testing.models import is_of_the_zoo
from fxopt_testing.trial import Subject


def reproduction(subject: Subject, property_name: str, case: ModelCase | None) -> str:
    """Return a program that fails with the finding: the pass, the one model, the one property."""
    imports = ["from fxopt_testing import check_transformation"]
    models = ""
    if case is not None and is_of_the_zoo(case):
        imports = ["from fxopt_testing import check_transformation, model_case"]
        models = f", models=[model_case({case.id!r})]"
    elif case is not None:
        models = ", models=[case]"
    elif subject.own:
        models = ", models=cases"
    lines = [*imports, *_imports_of(subject.transformation), ""]
    if models.endswith(("[case]", "cases")):
        lines.append(f"# {'case' if case is not None else 'cases'}: your ModelCase{'' if case else 's'}")
        lines[-1] += f" {case.name!r}, form={case.form!r}" if case is not None else ""
    return "\n".join([*lines, f"check_transformation({subject.name}{models}, properties=[{property_name!r}])"]) + "\n"


def _imports_of(transformation: Transformation) -> list[str]:
    if isinstance(transformation, Composition):
        members = [line for each in transformation.transformations for line in _imports_of(each)]
        return list(dict.fromkeys(["from fxopt_core import compose", *members]))
    cls = type(transformation)
    outermost = cls.__qualname__.partition(".")[0]
    if "<locals>" in cls.__qualname__ or cls.__module__ in ("__main__", "builtins"):
        return [f"# {cls.__qualname__}: your pass"]
    return [f"from {cls.__module__} import {outermost}"]
