"""The plan of a region for inputs of one kind: its nodes run once, on shapes and strides only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_aggregate, map_arg

from fxopt_cpu.layers.attention import LARGEST_HEAD, MergedAttention, RowAttention
from fxopt_cpu.layers.epilogue import Activation, norm_like
from fxopt_cpu.layers.norms import EmbeddingNorm, SumNorm
from fxopt_cpu.layers.packed_conv import PackedConv2d
from fxopt_cpu.layers.panel_linear import PanelLinear
from fxopt_cpu.operators.plan import Plan, PlanBuilder, Value, need
from fxopt_cpu.passes.layouts import CASTS, operation
from fxopt_cpu.passes.matching import norm_tensors
from fxopt_cpu.regions import images, strides
from fxopt_cpu.regions.finding import CHECK, COPIES, ELEMENTWISE, VIEW_MODULES, VIEWS, norm_of
from fxopt_cpu.regions.images import Kept
from fxopt_cpu.regions.strides import called
from fxopt_rewrite import GraphIndex, LayerNormCall, Region, TensorRef


class Planned(NamedTuple):
    """The plan of a region, and where the results of its nodes lie.

    Attributes:
        plan: the plan.
        read: tensors of the model that its nodes read.
        results: for each result, the place of the tensor that it lies in, counted through the region's inputs, ``read``
            and the plan's outputs; and its shape, strides and offset in there, or None if it is that tensor. Empty if
            the results are the plan's outputs.
    """

    plan: Plan
    read: tuple[Tensor, ...]
    results: tuple[tuple[int, tuple[tuple[int, ...], tuple[int, ...], int] | None], ...]

    def finish(self, inputs: tuple[Any, ...], outputs: list[Tensor]) -> list[Tensor]:
        """Return the results of a call: what is a view in eager mode, is one of the same memory here."""
        tensors, finished = (*inputs, *self.read, *outputs), []
        for number, place in self.results:
            tensor: Tensor = tensors[number]
            if place is not None:
                shape, strides, offset = place
                tensor = tensor.as_strided(shape, strides, tensor.storage_offset() + offset)
            finished.append(tensor)
        return finished


def plan_of(graph_module: GraphModule, region: Region, values: Sequence[Any], kept: Kept) -> Planned | None:
    """Return the plan of a region for inputs of these shapes, strides and dtypes; None where there is none.

    It packs layers that are not packed yet. ``kept`` holds what plans have computed from tensors of torch's layers.
    """
    index, builder = GraphIndex(graph_module), PlanBuilder()
    made: dict[Node, Any] = {}
    for node, value in zip(region.inputs, values, strict=True):
        made[node] = builder.input(value) if isinstance(value, Tensor) else value
    try:
        step = _Step(index, builder, made, kept, frozenset(region.nodes))
        for node in region.nodes:
            made[node] = step.of(node)
        read = [node for node in region.nodes if node.op == "get_attr"]
        numbers = {node: number for number, node in enumerate((*region.inputs, *read))}
        given, results = len(numbers), []
        found = strides.layouts_of(index, region, values, made)
        homes = strides.homes_of(region, found, made)
        for node in region.outputs:
            home = homes[strides.storage_of(found[node])]
            if home not in numbers:
                builder.output(made[home].permute(*strides.order_of(found[home])))
                numbers[home] = len(numbers)
            shape, stride = tuple(found[node].shape), found[node].stride()
            # Plans write contiguous outputs; other strides take a view, even if no view was made in eager mode.
            usual = numbers[home] < given or stride == torch.empty(shape, device="meta").stride()
            itself = usual and found[node] is found[home]
            results.append((numbers[home], None if itself else (shape, stride, found[node].storage_offset())))
        if results == [(given + number, None) for number in range(len(results))]:
            results = []
        held: Any = tuple(map(index.attribute_of, read))
        return Planned(builder.build(), held, tuple(results))
    # No step for a call, or arguments that torch refuses: run one by one, the nodes raise their own errors.
    except (ValueError, RuntimeError, IndexError, TypeError):
        return None


class _Step:
    """Adds what a node computes to a plan."""

    def __init__(
        self, index: GraphIndex, builder: PlanBuilder, made: Mapping[Node, Any], kept: Kept, inside: frozenset[Node]
    ) -> None:
        self.index, self.builder, self.made, self.kept, self.inside = index, builder, made, kept, inside
        self.activated: set[Node] = set()  # whose steps compute the activation after them, too

    def of(self, node: Node) -> Any:
        """Return the value of a node, or the number."""
        args: Any = map_arg(node.args, self.made.__getitem__)
        kwargs: Any = map_arg(node.kwargs, self.made.__getitem__)
        if node.op == "get_attr":
            return self._read(self.index.attribute_of(node))
        if (pooling := images.pooling_of(self.index, node)) is not None:
            return images.pool(self.builder, pooling, self.made[pooling.input])
        if (activation := images.activation_of(self.index, node)) is not None:
            (source,) = node.all_input_nodes
            if source in self.activated:
                return self.made[source]
            return images.elementwise(self.builder, self.made[source], None, "copy", activation)
        if (grouped := images.group_norm_of(self.index, node)) is not None:
            return self._group_norm(node, grouped)
        if (norm := norm_of(self.index, node)) is not None:
            return self._norm(norm)
        if (plain := images.plain_layer_of(self.index, node)) is not None:
            return images.compute(self.builder, plain, self.made[plain.input], self.kept)
        if (enlarged := images.enlarged_by(self.index, node)) is not None:
            return self._enlarge(node, enlarged)
        module = self.index.module_of(node)
        if module is not None:
            need(not kwargs)
            return self._view(module, args, kwargs) if type(module) in VIEW_MODULES else self._layer(module, *args)
        name = operation(self.index, node) or images.overwriting(self.index, node)
        if (joined := images.concatenation_of(self.index, node)) is not None:
            values: list[Value] = [self.made[part] for part in joined[0]]
            ranks = {len(each.shape) for each in values}
            need(len(ranks) == 1 and all(each.layout.dtype is torch.float32 for each in values))
            return images.concatenate(self.builder, values, joined[1] % ranks.pop())
        if name in ELEMENTWISE and any(isinstance(each, Value) for each in args):
            return self._elementwise(ELEMENTWISE[name], *args)
        if name in CASTS or name == CHECK:
            need(args[0].layout.dtype is torch.float32)
            return args[0]  # a cast to its own dtype, or a check of it
        if name in COPIES:
            # No step overwrites an operand, so a copy can be its source; as an output, it still gets its own memory.
            kept = args[0].layout.is_contiguous() or kwargs.get("memory_format") is torch.channels_last
            return args[0] if kept else self.builder.elementwise(args[0])
        if args and type(args[0]) is tuple:  # one of the parts that a split gives
            return called(node, args, kwargs)
        if name in VIEWS and any(isinstance(each, Value) for each in args):
            return self._view(node, args, kwargs)
        return called(node, _layouts(args), _layouts(kwargs))  # sizes

    def _view(self, call: Node | nn.Module, args: Any, kwargs: Any) -> Any:
        source = args[0]
        found = called(call, _layouts(args), _layouts(kwargs))
        views = found if isinstance(found, tuple | list) else (found,)
        need(all(each.dtype is source.layout.dtype for each in views))
        # On the meta device, too, a view shares the storage of its base, and a copy does not.
        place = source.layout.untyped_storage()._cdata
        if any(each.untyped_storage()._cdata != place for each in views):  # a reshape that copies
            return self._view(call, (self.builder.elementwise(source), *args[1:]), kwargs)
        made = tuple(Value(source.buffer, each) for each in views)
        return made if isinstance(found, tuple | list) else made[0]

    def _enlarge(self, node: Node, source: Node) -> Value:
        def compute(other: Tensor) -> Tensor:
            given = {**self.made, source: other}
            args: Any = map_arg(node.args, given.__getitem__)
            found: Tensor = called(self.index.module_of(node) or node, args, map_arg(node.kwargs, given.__getitem__))
            return found

        return images.enlarge(self.builder, self.made[source], compute)

    def _elementwise(self, kind: str, one: Any, other: Any) -> Value:
        one, other = (
            each if isinstance(each, Value) else self.builder.weight(torch.tensor([float(each)]))
            for each in (one, other)
        )
        need(one.layout.dtype is torch.float32 and other.layout.dtype is torch.float32)
        return images.elementwise(self.builder, one, other, kind, Activation())

    def _read(self, tensor: Any) -> Value:
        need(images.is_weight(tensor))
        return self.builder.weight(tensor)

    def _norm_of(self, module: EmbeddingNorm | SumNorm) -> dict[str, Any]:
        """Return the settings and tensors of a layer's norm."""
        held = {"weight": module.weight, "bias": module.bias}
        given = {key: self._read(tensor) for key, tensor in held.items() if tensor is not None}
        return {**given, "norm": module.norm}

    def _layer(self, module: nn.Module, *args: Value) -> Value:
        count = {MergedAttention: 1, RowAttention: 3}.get(type(module), len(args))  # a mask may follow
        dtype = torch.int64 if isinstance(module, EmbeddingNorm) else torch.float32
        need(all(each.layout.numel() > 0 for each in args))
        need(all(each.layout.dtype is dtype for each in args[:count]))
        if isinstance(module, PanelLinear):
            return self._linear(module, *args)
        if isinstance(module, PackedConv2d):
            need(all(len(each.shape) == module.dims + 2 for each in args) and args[0].shape[1] == module.in_channels)
            return images.convolve(self.builder, module, *args)
        if isinstance(module, EmbeddingNorm):
            return self.builder.embedding_norm(args, [*map(self._read, module.tables)], **self._norm_of(module))
        if isinstance(module, MergedAttention | RowAttention):
            return self._attention(module, *args[:count], mask=args[count] if len(args) > count else None)
        assert isinstance(module, SumNorm)
        need(all(each.shape == args[0].shape for each in args))
        return self.builder.norm(*args, **self._norm_of(module))

    def _norm(self, call: LayerNormCall) -> Value:
        input = self.made[call.input]
        need(input.layout.dtype is torch.float32 and input.shape[-1:] == call.normalized_shape)
        need(input.layout.numel() > 0)
        given = self._tensors(norm_tensors(call))
        for each in given.values():
            need(each.shape == call.normalized_shape and each.layout.dtype is torch.float32)
        return self.builder.norm(input, **given, norm=norm_like(call))

    def _tensors(self, refs: Mapping[str, TensorRef]) -> dict[str, Value]:
        return {key: self.made[ref.node] if ref.node else self._read(ref.tensor) for key, ref in refs.items()}

    def _group_norm(self, node: Node, call: images.GroupNorm) -> Value:
        need(self.made[call.input].layout.dtype is torch.float32)
        readers = self.inside & {*node.users}
        activation = images.activation_of(self.index, *readers) if len(node.users) == len(readers) == 1 else None
        if activation is not None:
            self.activated.add(node)
        given = self._tensors(call.tensors)
        return images.normalize(self.builder, self.made[call.input], call, given, activation or Activation())

    def _linear(self, module: PanelLinear, input: Value, residual: Value | None = None) -> Value:
        operands = module.operands()
        if operands is None or input.shape[-1] != module.in_features:
            raise ValueError("the layer cannot be packed, or its input has another size")
        need(residual is None or residual.shape == (*input.shape[:-1], module.features))
        panels, vectors = operands
        settings: Any = {"activation": module.activation, "norm": module.norm, "gated": module.gated}
        return self.builder.linear(input, panels, vectors, features=module.features, residual=residual, **settings)

    def _attention(self, module: MergedAttention | RowAttention, *operands: Value, mask: Value | None) -> Value:
        settings: Any = {"mask": mask, "scale": module.scale, "causal": module.causal, "rounded": module.rounded}
        need(mask is None or mask.layout.dtype in (torch.bool, torch.float32))
        if isinstance(module, MergedAttention):
            operands = (*operands[0].split(module.heads, module.kv_heads),)
        else:
            need(operands[0].shape[-1] <= LARGEST_HEAD)
        return self.builder.attention(*operands, **settings)


def _layouts(values: Any) -> Any:
    """Return arguments with tensors on the meta device for values."""

    def layout(each: Any) -> Any:
        return each.layout if isinstance(each, Value) else each

    return map_aggregate(values, layout)
