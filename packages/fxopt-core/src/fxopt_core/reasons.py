"""The stable codes of refusals, each with what it means and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxopt_core.ledger import Refusal

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "subclass": "The module is of a subclass, whose forward may differ. Capture the model by torch.export, so that "
        "the graph shows what it computes.",
        "hooks": "The module, or the gradient of its tensor, has hooks (pruning and weight norm work by hooks). Remove "
        "them, or make them permanent.",
        "parametrized": "The module's tensors are computed by a parametrization. Remove it by "
        "torch.nn.utils.parametrize.remove_parametrizations.",
        "patched-forward": "The module's forward was replaced on the instance. Restore it (`del module.forward`).",
        "extra-state": "The module carries attributes or tensors that its class does not have. Remove them first.",
        "adapter": "An adapter (LoRA, PEFT) is attached to the layer, or the layer is part of one. Merge the adapter "
        "into its base first, or take it off: `model.merge_and_unload()`.",
        "lazy": "The module is lazy and has no weights yet. Run the model once before capturing it.",
        "opaque-call": "The layers are inside of a module or operator that the graph calls as a whole. Capture the "
        "model by torch.export, so that the graph shows them.",
        "decomposed": "The operation was decomposed into others. Transform the graph before `run_decompositions()`.",
        "computed-weight": "The weight, or another tensor of the layer, is computed in the graph or is an input. "
        "Nothing to do: it is not known before the graph runs.",
        "not-a-parameter": "The tensor is no plain, dense torch.nn.Parameter (a buffer, a tensor subclass, quantized). "
        "Register a parameter in its place, if that is meant.",
        "transposed-weight": "The weight is stored as (in, out), as in Conv1D of GPT-2, and this pass reads (out, in). "
        "Put an nn.Linear with the transposed weight in its place.",
        "shared-module": "The module is called elsewhere too, or has several names. Give the site a copy of its own.",
        "tied-parameter": "The parameter is tied to another one, or read elsewhere. Untie it, if that is meant.",
        "training": "The site trains, or normalises with the statistics of the batch. Call eval() before capturing.",
        "mixed-requires-grad": "Some of the tensors are frozen and some are trainable. Freeze all or none.",
        "mixed-mode": "Some of the modules are in train mode and some in eval mode. Call eval() or train() on all.",
        "shape-unknown": "A fact about shape, rank or dtype is needed and not known. Call "
        "infer_shapes(graph_module, *example_inputs) first, or capture by torch.export.",
        "wrong-axis": "The normalisation works on another axis than the one that the layer produces or consumes. "
        "Nothing to do: one layer cannot compute both.",
        "size-mismatch": "Numbers of features do not fit each other, so that the model would not run. Mend the model.",
        "not-adjacent": "Something stands between the two that only moves or drops values (a view, dropout, identity). "
        "Call one right after the other, where the model can.",
        "several-users": "The intermediate value is used elsewhere too, and would change there. Drop the other use, if "
        "it is not needed.",
        "overlapping": "Another site of the same pass took some of its nodes. Run the pass again.",
        "mutated": "A value or parameter is written in place between the places that read it, or a global mode "
        "(autocast, no_grad) changes there. Write out of place, if all are to read the same.",
        "dtype-mismatch": "The tensors differ in dtype or device. Convert the model as a whole: `model.to(...)`.",
        "unsafe-constant": "The constant's inverse is not finite or not normal in the dtype of the computation. "
        "Compute in a wider dtype, if there is one that holds it.",
        "out-of-range": "The new weights would not be finite in their dtype. Use a wider one, or mend the statistics.",
        "shape-arithmetic": "The dividend is a Python number that is computed from shapes; a product would round. "
        "Nothing to do: no tensor is divided.",
        "rounded-quotient": "Later the quotient is rounded, compared, made an integer, or decides an index or a jump. "
        "Nothing to do, but to divide by a power of two, whose inverse is exact.",
        "rounding-mode": "The division rounds its quotient. Nothing to do: no product rounds in the same way.",
        "group-too-small": "Fewer linear layers share this input than the pass is told to merge. Lower `min_group`, if "
        "it is above 2; the message says what keeps others out.",
        "filtered": "The pass is told to leave modules of this name alone. Widen its pattern `where`, if that is not "
        "meant.",
        "no-statistics": "The normalisation keeps no running statistics, so that it always uses those of the batch. "
        "Nothing to do, but to train it with track_running_stats=True.",
        "unsupported-call": "The call passes arguments that the rewrite has no place for. Call the layer with its "
        "input alone, and functions with numbers that are fixed.",
        "no-measured-benefit": "The pass is told to measure first, and the rewrite is not faster on this machine "
        "beyond noise. Run it without `only_if_faster`, or measure on the machine that the model is for.",
        "not-on-cpu": "The layer is on another device, and the pass is for CPUs. Move the model: `model.to('cpu')`.",
        "unsupported-dtype": "The layer has a dtype that the operators do not take. Convert it: `model.float()`.",
        "no-operators": "This build of torch, or this processor, has no oneDNN operators for the layer. Nothing to do: "
        "it runs as it is.",
        "padding-mode": "The convolution pads by reflection, replication or around the edge, and the operators pad "
        "with zeros. Nothing to do: one operator cannot do both.",
        "more-conversions": "Converting the region's memory format and back would take longer than it saves. Nothing "
        "to do: the convolutions run as they are.",
        "instrument": "An instrument of this run left the site out (a bisection, or a tuning). Run the pass without "
        "it, if all sites are meant.",
    }
)
"""Reason code to meaning and remedy. Plugins may use codes of their own."""

_SHOWN = 20


def refusals_text(refusals: Sequence[Refusal]) -> str:
    """Return what was refused, a line each: up to 20 sites, with one at least for each reason, then what to do.

    >>> from fxopt_core.ledger import Refusal
    >>> print(refusals_text([Refusal(f"k{i}", "lazy", f"module `k{i}` is lazy") for i in range(22)][18:]))
      k18: lazy: module `k18` is lazy
      k19: lazy: module `k19` is lazy
      k20: lazy: module `k20` is lazy
      k21: lazy: module `k21` is lazy
      What to do for lazy: The module is lazy and has no weights yet. Run the model once before capturing it.
    """
    counts = Counter(refusal.reason for refusal in refusals)
    first = {refusal.reason: place for place, refusal in reversed(list(enumerate(refusals)))}
    others = (place for place in range(len(refusals)) if place not in first.values())
    shown = sorted([*first.values(), *others][: max(_SHOWN, len(first))])
    lines = [f"{refusals[place].site}: {refusals[place].reason}: {refusals[place].message}" for place in shown]
    left = counts - Counter(refusals[place].reason for place in shown)
    if left:
        lines.append(f"and {left.total()} more: {', '.join(f'{n} for {reason}' for reason, n in left.most_common())}")
    lines += [f"What to do for {reason}: {REASONS[reason]}" for reason, _ in counts.most_common() if reason in REASONS]
    return "\n".join(f"  {line}" for line in lines)
