"""What a pass over layers is built from: typed readers, effects, shapes, legality, recorded edits, `SitePass`."""

from fxopt_rewrite.calls.operation import Operation, calls_of, input_of, is_call, operands_of, read_operation
from fxopt_rewrite.calls.readers import (
    read_activation,
    read_batch_norm,
    read_convolution,
    read_elementwise,
    read_embedding,
    read_layer_norm,
    read_linear,
    read_true_division,
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
    ParameterisedCall,
    TensorRef,
    TrueDivision,
)
from fxopt_rewrite.data.codec import stored
from fxopt_rewrite.effects.analysis import Effects
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.journal.editor import Editor
from fxopt_rewrite.journal.edits import CustomEdit, Piece
from fxopt_rewrite.journal.provenance import Provenance, provenance
from fxopt_rewrite.layers import bare_module
from fxopt_rewrite.legality import mixed_flags_refusal, replacement_refusal, sharing_refusal, tensors_refusal
from fxopt_rewrite.reasons import REASONS
from fxopt_rewrite.shapes.facts import TensorFacts, is_python_number, same_size, same_sizes, tensor_facts
from fxopt_rewrite.shapes.infer import infer_shapes
from fxopt_rewrite.site_pass import ReversibleSitePass, Site, SitePass
from fxopt_rewrite.tolerances import Tolerance, tolerance
from fxopt_rewrite.watching import Watched, on_refresh, refresh

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
    "Obstacle",
    "Operation",
    "ParameterisedCall",
    "Piece",
    "Provenance",
    "ReversibleSitePass",
    "Site",
    "SitePass",
    "TensorFacts",
    "TensorRef",
    "Tolerance",
    "TrueDivision",
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
    "provenance",
    "read_activation",
    "read_batch_norm",
    "read_convolution",
    "read_elementwise",
    "read_embedding",
    "read_layer_norm",
    "read_linear",
    "read_operation",
    "read_true_division",
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
