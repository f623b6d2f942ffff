"""Transformations of torch.fx graphs: contract, ledger, transaction, typed reading and editing, registry.

Everything that users and authors of passes need is here; the modules below are fxopt's own.
"""

from fxopt_core.adapters import as_inductor_pass, as_pass_base
from fxopt_core.checkpoints import load_original_state_dict, original_state_dict
from fxopt_core.compose import Composition, DeepCopy, LintAndRecompile, ReversibleComposition, compose
from fxopt_core.copying import faithful_copy
from fxopt_core.editor import Editor
from fxopt_core.effects import Effects
from fxopt_core.errors import (
    CaptureError,
    CheckpointError,
    DuplicatePassError,
    FxoptError,
    NotReversibleError,
    PassError,
    PassOptionError,
    PipelineOptionError,
    PipelineSyntaxError,
    PluginLoadError,
    PostconditionError,
    PreconditionError,
    RegistryError,
    UndoError,
    UnknownPassError,
    VerificationError,
    VetoError,
)
from fxopt_core.facts import TensorFacts, infer_shapes, is_python_number, same_size, tensor_facts
from fxopt_core.graph import iter_nodes
from fxopt_core.history import History
from fxopt_core.hookspec import PipelinesPlugin, TransformationsPlugin, hookimpl, hookspec
from fxopt_core.index import GraphIndex
from fxopt_core.instruments import Instrument, InstrumentProtocol, PassRun, instrumented
from fxopt_core.key_map import Destination, KeyMap, OriginalTensor
from fxopt_core.key_tracing import key_map
from fxopt_core.ledger import Derived, Ledger, Piece, Record, Refusal, Rewrite, history
from fxopt_core.legality import mixed_flags_refusal, sharing_refusal, tensors_refusal
from fxopt_core.module_state import bare_module
from fxopt_core.options import OptionInfo, options_of
from fxopt_core.pipeline import parse_pipeline
from fxopt_core.plugins import PassInfo
from fxopt_core.provenance import Provenance, provenance
from fxopt_core.reasons import REASONS
from fxopt_core.recorded_pass import RecordedPass
from fxopt_core.registry import PluginEntryPoint, Registry, registry
from fxopt_core.signature import signature_of, uuid_of
from fxopt_core.site_pass import ReversibleSitePass, Site, SitePass
from fxopt_core.speed import Ratio, Speedup, compare_speed, comparing_with, measured_speedup
from fxopt_core.tolerances import Tolerance, tolerance
from fxopt_core.transformation import ReversibleTransformation, Transformation
from fxopt_core.undo import undo
from fxopt_core.views import (
    BatchNormCall,
    ConvolutionCall,
    LinearCall,
    Obstacle,
    ParameterisedCall,
    TensorRef,
    TrueDivision,
    input_of,
    read_batch_norm,
    read_convolution,
    read_linear,
    read_true_division,
)
from fxopt_core.wrapped import from_function, from_torch_pass

__version__ = "0.1.0"

__all__ = [
    "REASONS",
    "BatchNormCall",
    "CaptureError",
    "CheckpointError",
    "Composition",
    "ConvolutionCall",
    "DeepCopy",
    "Derived",
    "Destination",
    "DuplicatePassError",
    "Editor",
    "Effects",
    "FxoptError",
    "GraphIndex",
    "History",
    "Instrument",
    "InstrumentProtocol",
    "KeyMap",
    "Ledger",
    "LinearCall",
    "LintAndRecompile",
    "NotReversibleError",
    "Obstacle",
    "OptionInfo",
    "OriginalTensor",
    "ParameterisedCall",
    "PassError",
    "PassInfo",
    "PassOptionError",
    "PassRun",
    "Piece",
    "PipelineOptionError",
    "PipelineSyntaxError",
    "PipelinesPlugin",
    "PluginEntryPoint",
    "PluginLoadError",
    "PostconditionError",
    "PreconditionError",
    "Provenance",
    "Ratio",
    "Record",
    "RecordedPass",
    "Refusal",
    "Registry",
    "RegistryError",
    "ReversibleComposition",
    "ReversibleSitePass",
    "ReversibleTransformation",
    "Rewrite",
    "Site",
    "SitePass",
    "Speedup",
    "TensorFacts",
    "TensorRef",
    "Tolerance",
    "Transformation",
    "TransformationsPlugin",
    "TrueDivision",
    "UndoError",
    "UnknownPassError",
    "VerificationError",
    "VetoError",
    "as_inductor_pass",
    "as_pass_base",
    "bare_module",
    "compare_speed",
    "comparing_with",
    "compose",
    "faithful_copy",
    "from_function",
    "from_torch_pass",
    "history",
    "hookimpl",
    "hookspec",
    "infer_shapes",
    "input_of",
    "instrumented",
    "is_python_number",
    "iter_nodes",
    "key_map",
    "load_original_state_dict",
    "measured_speedup",
    "mixed_flags_refusal",
    "options_of",
    "original_state_dict",
    "parse_pipeline",
    "provenance",
    "read_batch_norm",
    "read_convolution",
    "read_linear",
    "read_true_division",
    "registry",
    "same_size",
    "sharing_refusal",
    "signature_of",
    "tensor_facts",
    "tensors_refusal",
    "tolerance",
    "undo",
    "uuid_of",
]
