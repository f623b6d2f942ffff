"""The stable codes of refusals that any pass may give; a pass declares codes of its own as `SitePass.reasons`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from fxopt_core import GENERAL

#: Meaning and remedy by reason code. These are the general ones; a pass declares further ones as its ``reasons``.
REASONS: Mapping[str, str] = MappingProxyType(
    {
        "subclass": "The module is an instance of a subclass, whose forward may differ. Capture the model with "
        "torch.export.",
        "hooks": "The module, or the gradient of its tensor, has hooks (pruning and weight norm use hooks). Remove "
        "them, or make them permanent.",
        "parametrized": "A parametrization computes the module's tensors. Remove it with "
        "torch.nn.utils.parametrize.remove_parametrizations.",
        "patched-forward": "The module's forward was replaced on the instance. Restore it (`del module.forward`).",
        "extra-state": "The module has attributes or tensors that its class does not have. Remove them first.",
        "adapter": "An adapter (LoRA, PEFT) is attached to the layer, or the layer is part of one. Merge the adapter "
        "first (`model.merge_and_unload()`), or detach it.",
        "lazy": "The module is lazy and has no weights yet. Run the model once before capturing it.",
        "decomposed": "The operation was decomposed into other operations. Transform the graph before "
        "`run_decompositions()`.",
        "computed-weight": "A tensor of the layer is an input, or computed in the graph. Run `fold-weights` first, if "
        "only other weights determine it, or remove a parametrization such as weight norm before capture: "
        "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight').",
        "not-a-parameter": "The tensor is not a plain, dense torch.nn.Parameter (a buffer, a tensor subclass, "
        "quantized). Register a parameter instead.",
        "transposed-weight": "The weight is stored as (in, out), as in Conv1D of GPT-2, and this pass reads (out, "
        "in). Use an nn.Linear with the transposed weight.",
        "shared-module": "The module is called elsewhere too, or has several names. Give the site its own copy.",
        "tied-parameter": "The parameter is tied to another, or read elsewhere. Untie it, if it need not be shared.",
        "training": "The site trains, or normalises with batch statistics. Call eval() before capturing.",
        "mixed-requires-grad": "Some of the tensors are frozen and some are trainable. Freeze all or none.",
        "shape-unknown": "A shape, rank or dtype is needed but not known. Call infer_shapes(graph_module, "
        "*example_inputs) first, or capture with torch.export.",
        "size-mismatch": "Feature counts do not match, so the model would not run. Fix the model.",
        "several-users": "The intermediate value is also used elsewhere, and would change there. Remove the other "
        "use, if possible.",
        "overlapping": "Another site of the same pass removed some of its nodes. Run the pass again.",
        "mutated": "A value or parameter is written in place between its readers, or a global mode (autocast, "
        "no_grad) changes there. Write out of place.",
        "returned": "The value, or a view of it, is returned, and the caller may write to it or compare memory. "
        "Nothing to do: the caller gets its own tensors, as before.",
        "dtype-mismatch": "The tensors differ in dtype or device. Convert the model as a whole: `model.to(...)`.",
        "out-of-range": "The new weights would not be finite in their dtype. Use a wider one, or fix the statistics.",
        "rounding-mode": "The division rounds its quotient. Nothing to do: no product rounds in the same way.",
        "filtered": "The pattern `where` excludes modules of this name. Widen it.",
        "unsupported-call": "The rewrite does not support some arguments of the call. Call the layer with its input "
        "only, and functions with fixed numbers.",
        "instrument": "An instrument of this run (a bisection, for example) left the site out. Run the pass without "
        "it.",
    }
)

GENERAL.update(REASONS)
