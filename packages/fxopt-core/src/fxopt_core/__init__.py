"""Transformations of torch.fx graphs: the contract of a pass, transactions, ledger and undo, registry and pipelines."""

from fxopt_core._torch import (
    ExportCodeGen as ExportCodeGen,
    PyTreeCodeGen as PyTreeCodeGen,
    PyTreeInfo as PyTreeInfo,
    add_node as add_node,
    codegen_of as codegen_of,
    inputs_of as inputs_of,
    names_of as names_of,
    require_torch,
    set_arguments as set_arguments,
)
from fxopt_core.changes import changed as changed, latest_change as latest_change
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
from fxopt_core.graph import check_graph_module as check_graph_module, iter_nodes
from fxopt_core.ledger.history import History, history, site_text as site_text
from fxopt_core.ledger.marks import (
    META_KEY as META_KEY,
    NodeTag as NodeTag,
    forget_ids as forget_ids,
    set_tag as set_tag,
    tag_of as tag_of,
)
from fxopt_core.ledger.reasons import GENERAL as GENERAL, meaning as meaning
from fxopt_core.ledger.records import (
    LEDGER_VERSION as LEDGER_VERSION,
    Derived,
    Journal as Journal,
    Ledger,
    Memo as Memo,
    Record,
    Refusal,
    Rewrite,
    find_ledger as find_ledger,
    is_plain_data as is_plain_data,
    ledger_of as ledger_of,
    set_ledger as set_ledger,
    undo_error as undo_error,
)
from fxopt_core.names import (
    OPERATORS as OPERATORS,
    class_path as class_path,
    describe as describe,
    import_class as import_class,
    known_class as known_class,
    load_operator as load_operator,
    name_of as name_of,
    operator_path as operator_path,
)
from fxopt_core.naming import (
    close_names as close_names,
    option_text as option_text,
    type_text as type_text,
    with_article as with_article,
)
from fxopt_core.passes.base import leaves as leaves, signature_or_empty as signature_or_empty
from fxopt_core.passes.call import (
    Demands as Demands,
    lint_and_recompile as lint_and_recompile,
    perform as perform,
)
from fxopt_core.passes.compose import (
    Composition,
    DeepCopy,
    LintAndRecompile,
    check_is_transformation as check_is_transformation,
    compose,
)
from fxopt_core.passes.instruments import (
    Instrument,
    InstrumentProtocol,
    active_instruments as active_instruments,
    instrumented,
)
from fxopt_core.passes.options import OptionInfo, options_of, show_annotation as show_annotation
from fxopt_core.passes.run import (
    RELEASED_FROM as RELEASED_FROM,
    PassRun,
    editing_run as editing_run,
    new_run as new_run,
    release as release,
    transaction as transaction,
)
from fxopt_core.passes.signature import signature_of as signature_of, uuid_of as uuid_of
from fxopt_core.passes.transformation import ReversibleTransformation, Transformation
from fxopt_core.passes.undo import undo, undo_pass as undo_pass
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
from fxopt_core.registry.registry import Registry, registry
from fxopt_core.registry.shipped import SHIPPED as SHIPPED, SHIPPED_NAMES as SHIPPED_NAMES
from fxopt_core.state.containers import Containers as Containers
from fxopt_core.state.copying import faithful_copy
from fxopt_core.state.gc_pause import collector_paused as collector_paused
from fxopt_core.state.pickling import install_pickling as install_pickling
from fxopt_core.state.snapshot import Snapshot as Snapshot, kept as kept
from fxopt_core.text import text_table as text_table

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
    "PluginLoadError",
    "PostconditionError",
    "PreconditionError",
    "Record",
    "Refusal",
    "Registry",
    "RegistryError",
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
    "undo",
]
