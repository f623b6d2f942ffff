"""Images of convolutions lie channels last: converted where a region of them begins, and back where it ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxopt_core import ConvolutionCall, Editor, GraphIndex, Refusal, ReversibleSitePass, read_convolution, tensor_facts
from fxopt_onednn.layouts import format_of
from fxopt_onednn.regions import Layouts, Region

_CONTIGUOUS = torch.ops.aten.contiguous.default
_VALUE_KEYS = ("val", "tensor_meta")


@dataclass(frozen=True, eq=False)
class RegionSite:
    """A region of a graph.

    Attributes:
        label: name of its first convolution.
        region: the region.
        nodes: the nodes that read something else than before, in order.
    """

    label: str
    region: Region
    nodes: tuple[Node, ...]


class ConvertToChannelsLast(ReversibleSitePass[RegionSite]):
    """``conv2d(x)`` -> ``contiguous(conv2d(channels_last(x)))``: once for a whole region of convolutions.

    oneDNN works on images whose channels lie next to each other, and brings others into that order and back at each
    convolution. Most operations on images give a result that lies as their input does, so that a region that such
    operations connect needs one conversion of what comes in. What leaves it for an operation that may notice strides
    (``view``, a module of unknown kind, the graph's caller) is converted back; what only reads values is not.

    Refused are regions with more conversions than convolutions, regions in which a view of a value is written that the
    conversion would make a copy of, and convolutions whose input has a rank that is not known.

    Source:
        ``torch.channels_last``, the order of memory that oneDNN's convolutions take images in.

    Cost:
        A copy of what comes into a region, and of what is converted back, in place of those at each convolution. No
        parameter is touched.

    >>> from fxopt_core import infer_shapes
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
    >>> graph_module = infer_shapes(torch.fx.symbolic_trace(model), torch.randn(2, 3, 8, 8))
    >>> [str(node) for node in ConvertToChannelsLast()(graph_module).graph.nodes]
    ['input_1', 'contiguous_default', '_0_1', '_1', '_2_1', 'contiguous_default_1', 'output']
    """

    def match(self, index: GraphIndex) -> Iterator[RegionSite | Refusal]:
        """Yield the regions, and refusals of convolutions of unknown rank."""
        yield from _unknown(index)
        layouts = Layouts(index, moving=True)
        if layouts.stuck:  # a view of unusual strides is returned, say: then no view gets other strides
            layouts = Layouts(index, moving=False)
        for region in layouts.regions():
            if region.conversions:
                nodes = sorted(_put_anew_in(region), key=index.position.__getitem__)
                call = read_convolution(index, region.convolutions[0])
                label = call.label if isinstance(call, ConvolutionCall) else region.convolutions[0].name
                yield RegionSite(label, region, tuple(nodes))

    def check(self, site: RegionSite, index: GraphIndex) -> Refusal | None:
        """Refuse what is written through views, what does not pay, and what cannot be converted back."""
        region = site.region
        if region.problem is not None:
            message = f"region of `{site.label}`: {region.problem}"
            return index.refuse(site.label, "mutated", message, *site.nodes)
        if region.conversions > len(region.convolutions):
            message = f"region of `{site.label}` has {len(region.convolutions)} convolutions"
            message = f"{message}, and would need {region.conversions} conversions of memory format"
            return index.refuse(site.label, "more-conversions", message, *site.nodes)
        unknown = next((value for _, value in region.exits if format_of(value) is None), None)
        if unknown is not None:
            message = f"the strides of `{unknown.name}`, which leaves the region of `{site.label}`, are not known or"
            return index.refuse(site.label, "shape-unknown", f"{message} unusual; call infer_shapes first", *site.nodes)
        odd = next((node for node in site.nodes if not _can_be_put_anew(node)), None)
        if odd is not None:
            message = f"node `{odd.name}` is called with keyword arguments, and cannot be put in anew"
            return index.refuse(site.label, "unsupported-call", message, *site.nodes)
        return None

    def rewrite(self, site: RegionSite, edit: Editor) -> None:
        """Insert the conversions, and let the nodes at the borders read them."""
        _Conversion(site, edit).run()


class _Conversion:
    """The rewrite of one region."""

    def __init__(self, site: RegionSite, edit: Editor) -> None:
        self._site, self._edit, self._region = site, edit, site.region
        self._entries, self._exits = set(site.region.entries), set(site.region.exits)
        self._inside: dict[Node, Node] = {}
        self._restored: dict[Node, Node] = {}
        self._renewed: dict[Node, Node] = {}

    def run(self) -> None:
        """Put the nodes at the borders in anew, in order."""
        returned = set(_returned(self._region))
        for node in self._site.nodes:
            inputs = {value: self._read_by(node, value) for value in node.all_input_nodes}
            new = _put_anew(self._edit, node, inputs)
            if node in returned:
                self._renewed[node] = new
                self._restored[node] = self._convert(new, node, reader=node)
            else:
                self._edit.replace(node, new)
        for node in self._renewed:
            self._edit.replace(node, self._restored[node])

    def _read_by(self, node: Node, value: Node) -> Node:
        """Return what a node reads for a value."""
        if (node, value) in self._entries:
            if value not in self._inside:
                self._inside[value] = self._convert(value, value, reader=node, memory_format=torch.channels_last)
            return self._inside[value]
        if (node, value) in self._exits:
            if value not in self._restored:
                self._restored[value] = self._convert(value, value, reader=node)
            return self._restored[value]
        return self._renewed.get(value, value)

    def _convert(
        self, value: Node, original: Node, *, reader: Node, memory_format: torch.memory_format | None = None
    ) -> Node:
        """Insert the conversion of a value before a reader; without a format, to the one that it had originally."""
        if memory_format is None:
            last = format_of(original) == "channels_last"
            memory_format = torch.channels_last if last else torch.contiguous_format
        made = self._edit.call_function(_CONTIGUOUS, value, before=reader, like=[reader], memory_format=memory_format)
        for key in _VALUE_KEYS:
            made.meta.pop(key, None)
            if key in original.meta:
                made.meta[key] = original.meta[key]
        return made


def _returned(region: Region) -> list[Node]:
    """Return the values of a region that the graph returns."""
    return [value for reader, value in region.exits if reader.op == "output"]


def _put_anew_in(region: Region) -> set[Node]:
    """Return the nodes that are to read something else, what the graph returns, and what else reads that."""
    returned = _returned(region)
    readers = {reader for reader, _ in (*region.entries, *region.exits)}
    nodes = {*readers, *returned, *(user for each in returned for user in each.users)}
    return {node for node in nodes if node.op != "output"}


def _unknown(index: GraphIndex) -> Iterator[Refusal]:
    for node in index.nodes:
        call = read_convolution(index, node)
        if not isinstance(call, ConvolutionCall) or call.dims != 2 or call.transposed:
            continue
        if tensor_facts(call.input, call.weight.tensor) is None:
            message = f"the rank and strides of the input of convolution `{call.label}` are not known"
            yield index.refuse(call.label, "shape-unknown", f"{message}; call infer_shapes first", node)


def _can_be_put_anew(node: Node) -> bool:
    if node.op == "call_module":
        return not node.kwargs or (not node.args and set(node.kwargs) == {"input"})
    return node.op == "call_function" or not node.kwargs


def _put_anew(edit: Editor, node: Node, inputs: dict[Node, Node]) -> Node:
    """Insert the same call before a node, with other inputs."""
    args: Any = map_arg(node.args, lambda value: inputs.get(value, value))
    kwargs: Any = map_arg(node.kwargs, lambda value: inputs.get(value, value))
    if node.op == "call_module":
        return edit.call_module(str(node.target), *args, *kwargs.values(), before=node, like=[node])
    if node.op == "call_method":
        return edit.call_method(str(node.target), *args, before=node, like=[node])
    target: Any = node.target
    return edit.call_function(target, *args, before=node, like=[node], **kwargs)
