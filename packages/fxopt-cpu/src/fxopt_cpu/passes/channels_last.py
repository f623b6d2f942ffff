"""``conv2d(x)`` -> ``contiguous(conv2d(channels_last(x)))``, once for a whole region of convolutions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch.fx import Node
from torch.fx.node import map_arg

from fxopt_core import Refusal
from fxopt_cpu.passes.channels_last_regions import Layouts, Region
from fxopt_cpu.passes.memory_formats import format_of
from fxopt_rewrite import ConvolutionCall, Editor, GraphIndex, ReversibleSitePass, read_convolution, tensor_facts

_CONTIGUOUS = torch.ops.aten.contiguous.default


@dataclass(frozen=True, eq=False)
class RegionSite:
    """A region that is converted.

    Attributes:
        label: name of its first convolution.
        region: the region.
        nodes: the nodes whose inputs change, in order.
    """

    label: str
    region: Region
    nodes: tuple[Node, ...]


class ConvertToChannelsLast(ReversibleSitePass[RegionSite]):
    """``conv2d(x)`` -> ``contiguous(conv2d(channels_last(x)))``, once for a whole region of convolutions.

    oneDNN computes convolutions channels last, and converts other images before and after each one. Most operations
    on images preserve the memory format, so a region that they connect only has to convert its inputs. A value that
    leaves the region for an operation that may depend on strides (``view``, an unknown module, the graph's caller) is
    converted back; one whose values alone are read is not.

    Refused: regions with more conversions than convolutions, regions with an in-place write through a view that
    conversion would turn into a copy, and convolutions whose input rank is unknown.

    Source:
        ``torch.channels_last``, the memory format of oneDNN's convolutions.

    Cost:
        A copy of each value that enters a region or is converted back, instead of copies at each convolution. No
        parameter is touched.

    >>> from fxopt_rewrite import infer_shapes
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
    >>> graph_module = infer_shapes(torch.fx.symbolic_trace(model), torch.randn(2, 3, 8, 8))
    >>> [str(node) for node in ConvertToChannelsLast()(graph_module).graph.nodes]
    ['input_1', 'contiguous_default', '_0_1', '_1', '_2_1', 'contiguous_default_1', 'output']
    """

    reasons: ClassVar[Mapping[str, str]] = {
        "more-conversions": "Converting the region's memory format and back would take longer than it saves. Nothing "
        "to do: the convolutions run as they are.",
    }

    def match(self, index: GraphIndex) -> Iterator[RegionSite | Refusal]:
        """Yield the regions, and refusals of convolutions whose input rank is unknown."""
        yield from _unknown(index)
        layouts = Layouts(index, moving=True)
        if layouts.stuck:  # the graph returns a view with unusual strides, say: then views keep their strides
            layouts = Layouts(index, moving=False)
        for region in layouts.regions():
            if region.conversions:
                nodes = sorted(_nodes_to_replace(region), key=index.position.__getitem__)
                call = read_convolution(index, region.convolutions[0])
                label = call.label if isinstance(call, ConvolutionCall) else region.convolutions[0].name
                yield RegionSite(label, region, tuple(nodes))

    def check(self, site: RegionSite, index: GraphIndex) -> Refusal | None:
        """Refuse writes through views, conversions that do not pay, and values that cannot be converted back."""
        region = site.region
        if region.problem is not None:
            message = f"region of `{site.label}`: {region.problem}"
            return index.refuse(site.label, "mutated", message, *site.nodes)
        if region.conversions > len(region.convolutions):
            message = f"region of `{site.label}` has {len(region.convolutions)} convolutions"
            message = f"{message}, but would need {region.conversions} conversions of memory format"
            return index.refuse(site.label, "more-conversions", message, *site.nodes)
        for unknown in (value for _, value in region.exits if format_of(value) is None):
            message = f"`{unknown.name}` leaves the region of `{site.label}` with unknown or unusual strides"
            return index.refuse(site.label, "shape-unknown", f"{message}; call infer_shapes first", *site.nodes)
        for odd in (node for node in site.nodes if not _can_be_inserted_again(node)):
            message = f"node `{odd.name}` has keyword arguments, which are not supported at a border"
            return index.refuse(site.label, "unsupported-call", message, *site.nodes)
        return None

    def rewrite(self, site: RegionSite, edit: Editor) -> None:
        """Insert the conversions, and let the nodes at the borders of the region read them."""
        _Conversion(site, edit).run()


class _Conversion:
    """The rewrite of one region."""

    def __init__(self, site: RegionSite, edit: Editor) -> None:
        self._site, self._edit = site, edit
        self._entries, self._exits = set(site.region.entries), set(site.region.exits)
        self._inside: dict[Node, Node] = {}
        self._restored: dict[Node, Node] = {}
        self._renewed: dict[Node, Node] = {}

    def run(self) -> None:
        """Replace the nodes at the borders, in order."""
        returned = set(_returned(self._site.region))
        for node in self._site.nodes:
            inputs = {value: self._read_by(node, value) for value in node.all_input_nodes}
            new = self._edit.undescribed(_insert_again(self._edit, node, inputs))
            self._renewed[node] = new
            if node in returned:
                self._restored[node] = self._convert(new, node, reader=node)
        for node, new in self._renewed.items():  # not before: each reads what the others were
            self._edit.replace(node, self._restored[node] if node in returned else new)
        for node in self._site.region.members:  # the strides of the others change, too
            if not self._edit.is_stale([node]):
                self._edit.undescribed(node)

    def _read_by(self, node: Node, value: Node) -> Node:
        """Return what a node reads instead of a value."""
        now = self._renewed.get(value, value)
        if (node, value) in self._entries:
            if value not in self._inside:
                self._inside[value] = self._convert(now, value, reader=node, channels_last=True)
            return self._inside[value]
        if (node, value) in self._exits:
            if value not in self._restored:
                self._restored[value] = self._convert(now, value, reader=node)
            return self._restored[value]
        return now

    def _convert(self, value: Node, original: Node, *, reader: Node, channels_last: bool = False) -> Node:
        """Insert the conversion of a value before a reader: to channels last, or back to the original format."""
        last = channels_last or format_of(original) == "channels_last"
        memory_format = torch.channels_last if last else torch.contiguous_format
        made = self._edit.call_function(_CONTIGUOUS, value, before=reader, like=[reader], memory_format=memory_format)
        return self._edit.undescribed(made)


def _returned(region: Region) -> list[Node]:
    """Return the values of a region that the graph returns."""
    return [value for reader, value in region.exits if reader.op == "output"]


def _nodes_to_replace(region: Region) -> set[Node]:
    """Return the nodes whose inputs change, the values that the graph returns, and the other readers of those."""
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
            message = f"the rank and strides of the input of convolution `{call.label}` are unknown"
            yield index.refuse(call.label, "shape-unknown", f"{message}; call infer_shapes first", node)


def _can_be_inserted_again(node: Node) -> bool:
    if node.op == "call_module":
        return not node.kwargs or (not node.args and set(node.kwargs) == {"input"})
    return node.op == "call_function" or not node.kwargs


def _insert_again(edit: Editor, node: Node, inputs: dict[Node, Node]) -> Node:
    """Insert the same call before a node, with other inputs."""
    args: Any = map_arg(node.args, lambda value: inputs.get(value, value))
    kwargs: Any = map_arg(node.kwargs, lambda value: inputs.get(value, value))
    if node.op == "call_module":
        return edit.call_module(str(node.target), *args, *kwargs.values(), before=node, like=[node])
    if node.op == "call_method":
        return edit.call_method(str(node.target), *args, before=node, like=[node])
    target: Any = node.target
    return edit.call_function(target, *args, before=node, like=[node], **kwargs)
