"""The stable codes of refusals, each with what it means and what to do about it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "subclass": "The module is of a subclass, whose forward may differ. Capture the model by torch.export, so that "
        "the graph shows what it computes.",
        "hooks": "The module has hooks (pruning and weight norm work by hooks). Remove them, or make them permanent.",
        "parametrized": "The module's tensors are computed by a parametrization. Remove it by "
        "torch.nn.utils.parametrize.remove_parametrizations.",
        "patched-forward": "The module's forward was replaced on the instance. Restore it.",
        "extra-state": "The module carries attributes or tensors that its class does not have. Remove them first.",
        "lazy": "The module is lazy and has no weights yet. Run the model once.",
        "computed-weight": "The weight is computed in the graph, or is an input. Nothing to do.",
        "not-a-parameter": "The weight is no plain, dense torch.nn.Parameter (a buffer, a tensor subclass, quantized).",
        "shared-module": "The module is called elsewhere too, or has several names. Give the site a copy of its own.",
        "tied-parameter": "The parameter is tied to another one, or read elsewhere. Untie it, if that is meant.",
        "training": "The site trains, or normalises with the statistics of the batch. Call eval() before capturing.",
        "mixed-requires-grad": "Some of the tensors are frozen and some are trainable. Freeze all or none.",
        "mixed-mode": "Some of the modules are in train mode and some in eval mode.",
        "shape-unknown": "A fact about shape, rank or dtype is needed and not known. Call "
        "infer_shapes(graph_module, *example_inputs) first, or capture by torch.export.",
        "wrong-axis": "The normalisation works on another axis than the one that the layer produces or consumes.",
        "size-mismatch": "Numbers of features do not fit each other.",
        "several-users": "The intermediate value is used elsewhere too, and would change there.",
        "overlapping": "Another site of the same pass took some of its nodes. Run the pass again.",
        "mutated": "A value or parameter is written in place between the places that read it, or a global mode "
        "(autocast, no_grad) changes there.",
        "dtype-mismatch": "The tensors differ in dtype or device.",
        "unsafe-constant": "The constant's inverse is not finite or not normal in the dtype of the computation.",
        "out-of-range": "The new weights would not be finite in their dtype. Use a wider one, or mend the statistics.",
        "shape-arithmetic": "The dividend is a Python number that is computed from shapes; a product would round.",
        "rounded-quotient": "Later the quotient is rounded, compared, made an integer, or decides an index or a jump.",
        "rounding-mode": "The division rounds its quotient.",
        "group-too-small": "Fewer linear layers share this input than the pass is told to merge.",
        "filtered": "The pass is told to leave modules of this name alone.",
        "no-statistics": "The normalisation keeps no running statistics, so that it always uses those of the batch.",
        "unsupported-call": "The call passes arguments that the rewrite has no place for.",
        "transposed-weight": "The weight is stored as (in, out), as in Conv1D of GPT-2, and this pass reads (out, in).",
        "opaque-call": "The layers are inside of a module or operator that the graph calls as a whole. Capture the "
        "model by torch.export, so that the graph shows them.",
        "unsupported-mode": "The module works in a mode that the rewrite does not cover (padding, output size).",
    }
)
"""Reason code to meaning and remedy. Plugins may use codes of their own."""
