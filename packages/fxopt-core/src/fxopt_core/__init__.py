"""Transformations of torch.fx graphs: the contract of a pass, transactions, ledger and undo, registry and pipelines."""

from fxopt_core._torch import require_torch
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
from fxopt_core.graph import iter_nodes
from fxopt_core.ledger.history import History, history
from fxopt_core.ledger.records import Derived, Ledger, Record, Refusal, Rewrite
from fxopt_core.passes.compose import Composition, DeepCopy, LintAndRecompile, ReversibleComposition, compose
from fxopt_core.passes.instruments import Instrument, InstrumentProtocol, instrumented
from fxopt_core.passes.options import OptionInfo, options_of
from fxopt_core.passes.run import PassRun
from fxopt_core.passes.signature import signature_of, uuid_of
from fxopt_core.passes.transformation import ReversibleTransformation, Transformation
from fxopt_core.passes.undo import RecordedPass, undo
from fxopt_core.registry.hookspec import (
    FunctionsPlugin,
    LayersPlugin,
    PipelinesPlugin,
    TransformationsPlugin,
    hookimpl,
    hookspec,
)
from fxopt_core.registry.pass_info import PassInfo
from fxopt_core.registry.pipeline import parse_pipeline
from fxopt_core.registry.plugins import PluginEntryPoint
from fxopt_core.registry.registry import Registry, registry
from fxopt_core.state.copying import faithful_copy

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "CheckpointError",
    "Composition",
    "DeepCopy",
    "Derived",
    "DuplicatePassError",
    "FunctionsPlugin",
    "FxoptError",
    "History",
    "Instrument",
    "InstrumentProtocol",
    "LayersPlugin",
    "Ledger",
    "LintAndRecompile",
    "NotReversibleError",
    "OptionInfo",
    "PassError",
    "PassInfo",
    "PassOptionError",
    "PassRun",
    "PipelineOptionError",
    "PipelineSyntaxError",
    "PipelinesPlugin",
    "PluginEntryPoint",
    "PluginLoadError",
    "PostconditionError",
    "PreconditionError",
    "Record",
    "RecordedPass",
    "Refusal",
    "Registry",
    "RegistryError",
    "ReversibleComposition",
    "ReversibleTransformation",
    "Rewrite",
    "Transformation",
    "TransformationsPlugin",
    "UndoError",
    "UnknownPassError",
    "VerificationError",
    "VetoError",
    "compose",
    "faithful_copy",
    "history",
    "hookimpl",
    "hookspec",
    "instrumented",
    "iter_nodes",
    "options_of",
    "parse_pipeline",
    "registry",
    "require_torch",
    "signature_of",
    "undo",
    "uuid_of",
]
