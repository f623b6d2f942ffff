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
    )
    from fxopt_capture import (
        InputGuards as InputGuards,
    )
    from fxopt_capture import (
        capture as capture,
    )
    from fxopt_capture import (
        symbolic_trace as symbolic_trace,
    )
    from fxopt_core import (
        REASONS as REASONS,
    )
    from fxopt_core import (
        BatchNormCall as BatchNormCall,
    )
    from fxopt_core import (
        CaptureError as CaptureError,
    )
    from fxopt_core import (
        Composition as Composition,
    )
    from fxopt_core import (
        ConvolutionCall as ConvolutionCall,
    )
    from fxopt_core import (
        DeepCopy as DeepCopy,
    )
    from fxopt_core import (
        Derived as Derived,
    )
    from fxopt_core import (
        DuplicatePassError as DuplicatePassError,
    )
    from fxopt_core import (
        Editor as Editor,
    )
    from fxopt_core import (
        Effects as Effects,
    )
    from fxopt_core import (
        FxoptError as FxoptError,
    )
    from fxopt_core import (
        GraphIndex as GraphIndex,
    )
    from fxopt_core import (
        Instrument as Instrument,
    )
    from fxopt_core import (
        InstrumentProtocol as InstrumentProtocol,
    )
    from fxopt_core import (
        Ledger as Ledger,
    )
    from fxopt_core import (
        LinearCall as LinearCall,
    )
    from fxopt_core import (
        LintAndRecompile as LintAndRecompile,
    )
    from fxopt_core import (
        NotReversibleError as NotReversibleError,
    )
    from fxopt_core import (
        Obstacle as Obstacle,
    )
    from fxopt_core import (
        OptionInfo as OptionInfo,
    )
    from fxopt_core import (
        ParameterisedCall as ParameterisedCall,
    )
    from fxopt_core import (
        PassError as PassError,
    )
    from fxopt_core import (
        PassInfo as PassInfo,
    )
    from fxopt_core import (
        PassOptionError as PassOptionError,
    )
    from fxopt_core import (
        PassRun as PassRun,
    )
    from fxopt_core import (
        Piece as Piece,
    )
    from fxopt_core import (
        PipelineOptionError as PipelineOptionError,
    )
    from fxopt_core import (
        PipelinesPlugin as PipelinesPlugin,
    )
    from fxopt_core import (
        PipelineSyntaxError as PipelineSyntaxError,
    )
    from fxopt_core import (
        PluginEntryPoint as PluginEntryPoint,
    )
    from fxopt_core import (
        PluginLoadError as PluginLoadError,
    )
    from fxopt_core import (
        PostconditionError as PostconditionError,
    )
    from fxopt_core import (
        PreconditionError as PreconditionError,
    )
    from fxopt_core import (
        Record as Record,
    )
    from fxopt_core import (
        Refusal as Refusal,
    )
    from fxopt_core import (
        Registry as Registry,
    )
    from fxopt_core import (
        RegistryError as RegistryError,
    )
    from fxopt_core import (
        ReversibleComposition as ReversibleComposition,
    )
    from fxopt_core import (
        ReversibleSitePass as ReversibleSitePass,
    )
    from fxopt_core import (
        ReversibleTransformation as ReversibleTransformation,
    )
    from fxopt_core import (
        Rewrite as Rewrite,
    )
    from fxopt_core import (
        Site as Site,
    )
    from fxopt_core import (
        SitePass as SitePass,
    )
    from fxopt_core import (
        TensorFacts as TensorFacts,
    )
    from fxopt_core import (
        TensorRef as TensorRef,
    )
    from fxopt_core import (
        Tolerance as Tolerance,
    )
    from fxopt_core import (
        Transformation as Transformation,
    )
    from fxopt_core import (
        TransformationsPlugin as TransformationsPlugin,
    )
    from fxopt_core import (
        TrueDivision as TrueDivision,
    )
    from fxopt_core import (
        UndoError as UndoError,
    )
    from fxopt_core import (
        UnknownPassError as UnknownPassError,
    )
    from fxopt_core import (
        VerificationError as VerificationError,
    )
    from fxopt_core import (
        compose as compose,
    )
    from fxopt_core import (
        faithful_copy as faithful_copy,
    )
    from fxopt_core import (
        history as history,
    )
    from fxopt_core import (
        hookimpl as hookimpl,
    )
    from fxopt_core import (
        hookspec as hookspec,
    )
    from fxopt_core import (
        infer_shapes as infer_shapes,
    )
    from fxopt_core import (
        input_of as input_of,
    )
    from fxopt_core import (
        instrumented as instrumented,
    )
    from fxopt_core import (
        is_python_number as is_python_number,
    )
    from fxopt_core import (
        iter_nodes as iter_nodes,
    )
    from fxopt_core import (
        mixed_flags_refusal as mixed_flags_refusal,
    )
    from fxopt_core import (
        options_of as options_of,
    )
    from fxopt_core import (
        parse_pipeline as parse_pipeline,
    )
    from fxopt_core import (
        read_batch_norm as read_batch_norm,
    )
    from fxopt_core import (
        read_convolution as read_convolution,
    )
    from fxopt_core import (
        read_linear as read_linear,
    )
    from fxopt_core import (
        read_true_division as read_true_division,
    )
    from fxopt_core import (
        registry as registry,
    )
    from fxopt_core import (
        same_size as same_size,
    )
    from fxopt_core import (
        sharing_refusal as sharing_refusal,
    )
    from fxopt_core import (
        signature_of as signature_of,
    )
    from fxopt_core import (
        tensor_facts as tensor_facts,
    )
    from fxopt_core import (
        tensors_refusal as tensors_refusal,
    )
    from fxopt_core import (
        tolerance as tolerance,
    )
    from fxopt_core import (
        undo as undo,
    )
    from fxopt_core import (
        uuid_of as uuid_of,
    )
    from fxopt_linear import (
        FuseBiasInLinear as FuseBiasInLinear,
    )
    from fxopt_linear import (
        MergeLinears as MergeLinears,
    )
    from fxopt_norm import (
        FuseBatchNorm1dInConv1d as FuseBatchNorm1dInConv1d,
    )
    from fxopt_norm import (
        FuseBatchNorm1dInLinear as FuseBatchNorm1dInLinear,
    )
    from fxopt_norm import (
        FuseBatchNorm2dInConv2d as FuseBatchNorm2dInConv2d,
    )
    from fxopt_norm import (
        FuseBatchNorm3dInConv3d as FuseBatchNorm3dInConv3d,
    )
    from fxopt_norm import (
        FuseBatchNormInConvTranspose as FuseBatchNormInConvTranspose,
    )
    from fxopt_tools import (
        Check as Check,
    )
    from fxopt_tools import (
        Inputs as Inputs,
    )
    from fxopt_tools import (
        Measurement as Measurement,
    )
    from fxopt_tools import (
        OutputReport as OutputReport,
    )
    from fxopt_tools import (
        VerificationReport as VerificationReport,
    )
    from fxopt_tools import (
        Verify as Verify,
    )
    from fxopt_tools import (
        Worst as Worst,
    )
    from fxopt_tools import (
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
