"""The conformance kit for passes of fxopt: what scikit-learn's ``check_estimator`` is for estimators.

`check_transformation` tries a pass on a zoo of models and checks what every pass has to keep.
"""

from fxopt_testing.assertions import assert_code, assert_left_alone, assert_rewrites, code_of
from fxopt_testing.cases import ModelCase
from fxopt_testing.conformance import check_transformation, passes_of
from fxopt_testing.findings import ConformanceError, ConformanceReport, Finding
from fxopt_testing.models import model_case, zoo
from fxopt_testing.plugin import conformance_tests
from fxopt_testing.properties import PROPERTIES, Property

__version__ = "0.1.0"

__all__ = [
    "PROPERTIES",
    "ConformanceError",
    "ConformanceReport",
    "Finding",
    "ModelCase",
    "Property",
    "assert_code",
    "assert_left_alone",
    "assert_rewrites",
    "check_transformation",
    "code_of",
    "conformance_tests",
    "model_case",
    "passes_of",
    "zoo",
]
