"""The parts of a pass over layers: typed readers, effects, shapes, legality, recorded edits, `SitePass`."""

from fxopt_rewrite._torch import generator_class as generator_class
from fxopt_rewrite.branches import (
    Branching as Branching,
    Region as Region,
    is_branching as is_branching,
    is_edited as is_edited,
    start_branching as start_branching,
    stop_branching as stop_branching,
)
from fxopt_rewrite.calls.operation import (
    Operation,
    calls_of,
    computed_by as computed_by,
    input_of,
    is_call,
    operands_of,
    read_call as read_call,
    read_operation,
)
from fxopt_rewrite.calls.readers import (
    module_running as module_running,
    owner_of as owner_of,
    read_activation,
    read_batch_norm,
    read_convolution,
    read_elementwise,
    read_embedding,
    read_layer_norm,
    read_linear,
    tensor_ref as tensor_ref,
    trains as trains,
)
from fxopt_rewrite.calls.records import (
    ActivationCall,
    BatchNormCall,
    ConvolutionCall,
    ElementwiseCall,
    EmbeddingCall,
    LayerNormCall,
    LinearCall,
    Obstacle,
    Operand,
    ParameterisedCall,
    TensorRef,
)
from fxopt_rewrite.data.codec import (
    ledger_from_json as ledger_from_json,
    ledger_to_json as ledger_to_json,
    stored,
    tag_from_json as tag_from_json,
    tag_to_json as tag_to_json,
)
from fxopt_rewrite.data.forms import (
    Fields as Fields,
    Form as Form,
    InexpressibleError as InexpressibleError,
    MalformedError as MalformedError,
    ValueReader as ValueReader,
    ValueWriter as ValueWriter,
)
from fxopt_rewrite.data.graph_rows import OPERATIONS as OPERATIONS, read_graph as read_graph, write_graph as write_graph
from fxopt_rewrite.data.policies import (
    Names as Names,
    Unresolved as Unresolved,
    find as find,
    is_identifier as is_identifier,
)
from fxopt_rewrite.dtypes import dtype_kind as dtype_kind
from fxopt_rewrite.effects.analysis import Effects, changes_mode as changes_mode
from fxopt_rewrite.effects.equal_calls import call_key as call_key
from fxopt_rewrite.effects.modules import is_plain_module as is_plain_module
from fxopt_rewrite.fast_paths import (
    is_plain_tensor as is_plain_tensor,
    needs_gradient as needs_gradient,
    outside_inference_mode as outside_inference_mode,
    runs_in_transform as runs_in_transform,
    runs_plainly as runs_plainly,
)
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.journal.arithmetic import (
    derived_problem as derived_problem,
    registered_functions as registered_functions,
    unregistered as unregistered,
)
from fxopt_rewrite.journal.editor import Editor
from fxopt_rewrite.journal.edits import (
    CustomEdit,
    EditVisitor as EditVisitor,
    Listed as Listed,
    ModuleAdded as ModuleAdded,
    ModuleRemoved as ModuleRemoved,
    ModuleRow as ModuleRow,
    Neutral as Neutral,
    NodeAdded as NodeAdded,
    NodeRemoved as NodeRemoved,
    NodeReplaced as NodeReplaced,
    NodeRow as NodeRow,
    Piece,
    TensorRemoved as TensorRemoved,
    TensorRow as TensorRow,
    of_kind as of_kind,
)
from fxopt_rewrite.journal.journal import edits_of as edits_of
from fxopt_rewrite.journal.order import KeyOrders as KeyOrders
from fxopt_rewrite.journal.resolve import mapped as mapped, module_of as module_of
from fxopt_rewrite.journal.rewiring import set_places as set_places
from fxopt_rewrite.layers import bare_module, module_with as module_with, plain_attributes as plain_attributes
from fxopt_rewrite.legality import mixed_flags_refusal, replacement_refusal, sharing_refusal, tensors_refusal
from fxopt_rewrite.ops.names import MISSING as MISSING, argument as argument, aten_overloads as aten_overloads
from fxopt_rewrite.ops.tables import DROPOUTS as DROPOUTS, PURE_ATTRIBUTES as PURE_ATTRIBUTES, words as words
from fxopt_rewrite.pattern_pass import PatternPass
from fxopt_rewrite.patterns import Match, Pattern
from fxopt_rewrite.plain_graphs import (
    check_settings as check_settings,
    check_targets as check_targets,
    check_values as check_values,
    is_plain_value as is_plain_value,
)
from fxopt_rewrite.plain_names import (
    PLAIN as PLAIN,
    UntrustedNameError as UntrustedNameError,
    is_plain_identifier as is_plain_identifier,
    is_plain_method as is_plain_method,
    is_plain_path as is_plain_path,
    plain_name as plain_name,
    torch_class as torch_class,
)
from fxopt_rewrite.reasons import REASONS
from fxopt_rewrite.shapes.facts import TensorFacts, is_python_number, same_size, same_sizes, tensor_facts
from fxopt_rewrite.shapes.infer import infer_shapes
from fxopt_rewrite.shapes.kinds import MEMORY_FREE as MEMORY_FREE, Kind as Kind, kind_of as kind_of
from fxopt_rewrite.shapes.meta import ONE_AT_A_TIME as ONE_AT_A_TIME, VALUE_KEYS as VALUE_KEYS, strides_in as strides_in
from fxopt_rewrite.site_pass import ReversibleSitePass, Site, SitePass
from fxopt_rewrite.special_files import special_kind as special_kind
from fxopt_rewrite.tolerances import Tolerance, tolerance
from fxopt_rewrite.watching import State as State, Watched, on_refresh, refresh, state_of as state_of

__version__ = "0.1.0"

__all__ = [
    "REASONS",
    "ActivationCall",
    "BatchNormCall",
    "ConvolutionCall",
    "CustomEdit",
    "Editor",
    "Effects",
    "ElementwiseCall",
    "EmbeddingCall",
    "GraphIndex",
    "LayerNormCall",
    "LinearCall",
    "Match",
    "Obstacle",
    "Operand",
    "Operation",
    "ParameterisedCall",
    "Pattern",
    "PatternPass",
    "Piece",
    "ReversibleSitePass",
    "Site",
    "SitePass",
    "TensorFacts",
    "TensorRef",
    "Tolerance",
    "Watched",
    "bare_module",
    "calls_of",
    "infer_shapes",
    "input_of",
    "is_call",
    "is_python_number",
    "mixed_flags_refusal",
    "on_refresh",
    "operands_of",
    "read_activation",
    "read_batch_norm",
    "read_convolution",
    "read_elementwise",
    "read_embedding",
    "read_layer_norm",
    "read_linear",
    "read_operation",
    "refresh",
    "replacement_refusal",
    "same_size",
    "same_sizes",
    "sharing_refusal",
    "stored",
    "tensor_facts",
    "tensors_refusal",
    "tolerance",
]
