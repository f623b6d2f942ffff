"""What a family may need beside the face of this package: kinds of values, branches in code, words, graphs as data.

These names are as public as those of the package itself; `fxopt` does not repeat them.
"""

from __future__ import annotations

from fxopt_rewrite.branches import Branching, Region, is_branching, is_edited, start_branching, stop_branching
from fxopt_rewrite.calls.operation import read_call
from fxopt_rewrite.calls.readers import owner_of, tensor_ref, trains
from fxopt_rewrite.data.forms import ValueReader, ValueWriter
from fxopt_rewrite.data.graph_rows import read_graph, write_graph
from fxopt_rewrite.dtypes import dtype_kind
from fxopt_rewrite.effects.modules import is_plain_module
from fxopt_rewrite.effects.same_views import is_view
from fxopt_rewrite.fast_paths import is_plain_tensor, needs_gradient, runs_in_transform, runs_plainly
from fxopt_rewrite.layers import module_with
from fxopt_rewrite.ops.names import MISSING, argument, aten_overloads
from fxopt_rewrite.ops.tables import DROPOUTS, PURE_ATTRIBUTES, words
from fxopt_rewrite.plain_graphs import check_settings, check_targets, check_values
from fxopt_rewrite.plain_names import PLAIN, is_plain_method, plain_name
from fxopt_rewrite.shapes.kinds import MEMORY_FREE, Kind, kind_of
from fxopt_rewrite.shapes.meta import ONE_AT_A_TIME, VALUE_KEYS

__all__ = [
    "DROPOUTS",
    "MEMORY_FREE",
    "MISSING",
    "ONE_AT_A_TIME",
    "PLAIN",
    "PURE_ATTRIBUTES",
    "VALUE_KEYS",
    "Branching",
    "Kind",
    "Region",
    "ValueReader",
    "ValueWriter",
    "argument",
    "aten_overloads",
    "check_settings",
    "check_targets",
    "check_values",
    "dtype_kind",
    "is_branching",
    "is_edited",
    "is_plain_method",
    "is_plain_module",
    "is_plain_tensor",
    "is_view",
    "kind_of",
    "module_with",
    "needs_gradient",
    "owner_of",
    "plain_name",
    "read_call",
    "read_graph",
    "runs_in_transform",
    "runs_plainly",
    "start_branching",
    "stop_branching",
    "tensor_ref",
    "trains",
    "words",
    "write_graph",
]
