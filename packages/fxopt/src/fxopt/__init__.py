"""Fewer and faster operations in PyTorch graphs, with proof: one import for all of fxopt.

Everything that the packages offer resolves here, each on first use: ``from fxopt import MergeLinears, symbolic_trace``
loads the families that it names and no others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxopt.optimizing import (
        optimize as optimize,
    )
    from fxopt_arith import (
        ChangeTrueDivToMulByInverse as ChangeTrueDivToMulByInverse,
    )
    from fxopt_capture import (
        CapturedModule as CapturedModule,
        InputGuards as InputGuards,
        capture as capture,
        symbolic_trace as symbolic_trace,
    )
    from fxopt_core import (
        REASONS as REASONS,
        BatchNormCall as BatchNormCall,
        CaptureError as CaptureError,
        Composition as Composition,
        ConvolutionCall as ConvolutionCall,
        DeepCopy as DeepCopy,
        Derived as Derived,
        DuplicatePassError as DuplicatePassError,
        Editor as Editor,
        Effects as Effects,
        FxoptError as FxoptError,
        GraphIndex as GraphIndex,
        Instrument as Instrument,
        InstrumentProtocol as InstrumentProtocol,
        Ledger as Ledger,
        LinearCall as LinearCall,
        LintAndRecompile as LintAndRecompile,
        NotReversibleError as NotReversibleError,
        Obstacle as Obstacle,
        OptionInfo as OptionInfo,
        ParameterisedCall as ParameterisedCall,
        PassError as PassError,
        PassInfo as PassInfo,
        PassOptionError as PassOptionError,
        PassRun as PassRun,
        Piece as Piece,
        PipelineOptionError as PipelineOptionError,
        PipelinesPlugin as PipelinesPlugin,
        PipelineSyntaxError as PipelineSyntaxError,
        PluginEntryPoint as PluginEntryPoint,
        PluginLoadError as PluginLoadError,
        PostconditionError as PostconditionError,
        PreconditionError as PreconditionError,
        Record as Record,
        Refusal as Refusal,
        Registry as Registry,
        RegistryError as RegistryError,
        ReversibleComposition as ReversibleComposition,
        ReversibleSitePass as ReversibleSitePass,
        ReversibleTransformation as ReversibleTransformation,
        Rewrite as Rewrite,
        Site as Site,
        SitePass as SitePass,
        TensorFacts as TensorFacts,
        TensorRef as TensorRef,
        Tolerance as Tolerance,
        Transformation as Transformation,
        TransformationsPlugin as TransformationsPlugin,
        TrueDivision as TrueDivision,
        UndoError as UndoError,
        UnknownPassError as UnknownPassError,
        VerificationError as VerificationError,
        bare_module as bare_module,
        compose as compose,
        faithful_copy as faithful_copy,
        history as history,
        hookimpl as hookimpl,
        hookspec as hookspec,
        infer_shapes as infer_shapes,
        input_of as input_of,
        instrumented as instrumented,
        is_python_number as is_python_number,
        iter_nodes as iter_nodes,
        mixed_flags_refusal as mixed_flags_refusal,
        options_of as options_of,
        parse_pipeline as parse_pipeline,
        read_batch_norm as read_batch_norm,
        read_convolution as read_convolution,
        read_linear as read_linear,
        read_true_division as read_true_division,
        registry as registry,
        same_size as same_size,
        sharing_refusal as sharing_refusal,
        signature_of as signature_of,
        tensor_facts as tensor_facts,
        tensors_refusal as tensors_refusal,
        tolerance as tolerance,
        undo as undo,
        uuid_of as uuid_of,
    )
    from fxopt_linear import (
        FuseBiasInLinear as FuseBiasInLinear,
        MergeLinears as MergeLinears,
    )
    from fxopt_norm import (
        FuseBatchNorm1dInConv1d as FuseBatchNorm1dInConv1d,
        FuseBatchNorm1dInLinear as FuseBatchNorm1dInLinear,
        FuseBatchNorm2dInConv2d as FuseBatchNorm2dInConv2d,
        FuseBatchNorm3dInConv3d as FuseBatchNorm3dInConv3d,
        FuseBatchNormInConvTranspose as FuseBatchNormInConvTranspose,
    )
    from fxopt_tools import (
        Check as Check,
        Inputs as Inputs,
        Measurement as Measurement,
        OutputReport as OutputReport,
        VerificationReport as VerificationReport,
        Verify as Verify,
        Worst as Worst,
        verify as verify,
    )

__version__ = "0.1.0"

_HOMES = {
    "fxopt_core": (
        "REASONS",
        "BatchNormCall",
        "CaptureError",
        "Composition",
        "ConvolutionCall",
        "DeepCopy",
        "Derived",
        "DuplicatePassError",
        "Editor",
        "Effects",
        "FxoptError",
        "GraphIndex",
        "Instrument",
        "InstrumentProtocol",
        "Ledger",
        "LinearCall",
        "LintAndRecompile",
        "NotReversibleError",
        "Obstacle",
        "OptionInfo",
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
        "Record",
        "Refusal",
        "Registry",
        "RegistryError",
        "ReversibleComposition",
        "ReversibleSitePass",
        "ReversibleTransformation",
        "Rewrite",
        "Site",
        "SitePass",
        "TensorFacts",
        "TensorRef",
        "Tolerance",
        "Transformation",
        "TransformationsPlugin",
        "TrueDivision",
        "UndoError",
        "UnknownPassError",
        "VerificationError",
        "bare_module",
        "compose",
        "faithful_copy",
        "history",
        "hookimpl",
        "hookspec",
        "infer_shapes",
        "input_of",
        "instrumented",
        "is_python_number",
        "iter_nodes",
        "mixed_flags_refusal",
        "options_of",
        "parse_pipeline",
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
    ),
    "fxopt_linear": (
        "FuseBiasInLinear",
        "MergeLinears",
    ),
    "fxopt_norm": (
        "FuseBatchNorm1dInConv1d",
        "FuseBatchNorm1dInLinear",
        "FuseBatchNorm2dInConv2d",
        "FuseBatchNorm3dInConv3d",
        "FuseBatchNormInConvTranspose",
    ),
    "fxopt_arith": ("ChangeTrueDivToMulByInverse",),
    "fxopt_capture": (
        "CapturedModule",
        "InputGuards",
        "capture",
        "symbolic_trace",
    ),
    "fxopt_tools": (
        "Check",
        "Inputs",
        "Measurement",
        "OutputReport",
        "VerificationReport",
        "Verify",
        "Worst",
        "verify",
    ),
    "fxopt.optimizing": ("optimize",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> object:
    """Load a name from the package that it lives in."""
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return all names, loaded or not."""
    return sorted({*globals(), *_HOME_OF})
