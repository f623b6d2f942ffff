"""``norm(activation(x @ W.T + b) + r)`` -> ``panel_linear(x, r)``: a product and what follows it as one operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_cpu.layers.epilogue import NONE, Activation, norm_like
from fxopt_cpu.layers.panel_linear import PanelLinear
from fxopt_cpu.operators.linear import quantize
from fxopt_cpu.operators.rounding import lost, narrowed, static
from fxopt_cpu.passes import low_precision
from fxopt_cpu.passes.layouts import layout_of, operation, source_of
from fxopt_cpu.passes.matching import (
    REASONS,
    is_float,
    kernels_refusal,
    norm_tensors,
    parameter_of,
    sole_user,
    take_out,
)
from fxopt_cpu.passes.memory_formats import hidden_strides, shows_strides
from fxopt_cpu.passes.neighbours import activation_after, sum_after
from fxopt_rewrite import (
    Editor,
    ElementwiseCall,
    GraphIndex,
    LayerNormCall,
    LinearCall,
    Obstacle,
    Pattern,
    Piece,
    ReversibleSitePass,
    bare_module,
    read_elementwise,
    read_layer_norm,
    read_linear,
    same_size,
    same_sizes,
    sharing_refusal,
    tensor_facts,
    tensors_refusal,
)


@dataclass(frozen=True, eq=False)
class ProductSite(low_precision.LayerSite):
    """A call of a linear layer, and what is computed with it.

    Attributes:
        call: the layer.
        input: its float32 input.
        last: the node whose value is the result.
        between: the other nodes that are removed, including casts of the input.
        gated: whether the result is the product of two halves.
        activation: the activation of the product, or of the gate.
        residual: the value that is added, or None.
        norm: the norm at the end, or None.
        again: the later calls of the same layer, each followed by the same operations.
    """

    call: LinearCall
    input: Node
    last: Node
    between: tuple[Node, ...] = ()
    gated: bool = False
    activation: Activation = field(default_factory=Activation)
    residual: Node | None = None
    norm: LayerNormCall | None = None
    again: tuple[ProductSite, ...] = ()

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of all calls, one call after the other."""
        return tuple(dict.fromkeys(node for each in self.calls for node in each.chain))

    @property
    def chain(self) -> tuple[Node, ...]:
        """The nodes of this call: the layer first, the last one last."""
        return tuple(dict.fromkeys((self.call.node, *self.between, self.last)))

    @property
    def calls(self) -> tuple[ProductSite, ...]:
        """This call and the later ones."""
        return (self, *self.again)


class FuseLinears(low_precision.Options, ReversibleSitePass[ProductSite]):
    """``norm(activation(x @ W.T + b) + r)`` -> ``panel_linear(x, r)``: a product and what follows it as one operator.

    Each part that follows a linear layer is fused with it if nothing else reads the values between: one of ReLU, GELU
    (both forms, and ``x * sigmoid(1.702 x)``), SiLU, tanh, sigmoid, hardswish, hardsigmoid, hardtanh, LeakyReLU and
    ELU; or the product of two halves of a merged layer, of which the first is activated (SwiGLU, GeGLU); the sum with a
    value of the same shape; a layer norm or RMS norm over the features. The layers are ``nn.Linear`` and its like in
    float32, also with weights stored as (in, out). Only the panels of a weight stay, see `PanelLinear`.

    A layer that the graph calls several times is packed once. What follows goes with it if it is the same after every
    call; otherwise the norm stays where it is, or everything but the product.

    With ``weights="bfloat16"`` or ``"int8"``, weights are rounded, and inputs at each call: the pass approximates, by
    no more than `promised_sqnr`. An int8 weight has one scale for each output channel and no zero point; an input has
    one for each row (a token), so that a result depends only on its row; or, with ``activations="static"``, each
    element has a range taken from data (`calibrated`): values beyond it are clipped, and an element that is large
    in all rows, as some are in transformers, does not coarsen the others. Results have the dtype of the input.

    Refused: other dtypes and devices, train mode, tied or mutated tensors, bfloat16 where the processor has no
    instructions for it, and static ranges from fewer than 512 rows.

    Args:
        weights: ``"float32"``, ``"bfloat16"`` or ``"int8"``.
        activations: ``"dynamic"``, by rows, or ``"static"``; for int8.
        where: glob pattern over full module names; layers with other names are left alone.
        keep: glob patterns; layers with such names are left alone.
        keep_first: how many layers are left alone at the beginning, where rounding errors run through the whole model.
        keep_last: how many are left alone at the end, such as a classifier.
        min_weights: the least number of weights of a layer in int8: with fewer, rounding the input takes longer than
            the product gains.
        keep_originals: whether to keep the original weights beside those in bfloat16 or int8, so that the pass can be
            undone and the original ``state_dict`` restored.

    Raises:
        PassOptionError: ``weights`` or ``activations`` is something else, or a count is negative.
        PreconditionError: ``activations`` is ``"static"``, and there are no data.
        NotReversibleError: The pass is to be undone, but weights were rounded and ``keep_originals`` is off.

    Source:
        Goto and van de Geijn, Anatomy of High-Performance Matrix Multiplication,
        https://doi.org/10.1145/1356052.1356053: panels that fit the registers, one after the other in memory.

    Cost:
        One call instead of up to five. The first call packs the weight: about as long as reading it twice. The panels
        take the plain weight's place; where something else holds it, such as the original model, they are additional.
        In bfloat16 they take half of the memory, in int8 a quarter.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.GELU()).eval()
    >>> graph_module = FuseLinears()(torch.fx.symbolic_trace(model))
    >>> print(graph_module.code.strip())
    def forward(self, input):
        input_1 = input
        _0_panels = getattr(self, "0_panels")(input_1);  input_1 = None
        return _0_panels
    >>> graph_module.get_submodule("0_panels")
    PanelLinear(in_features=4, out_features=8, bias=True, activation=gelu)
    """

    reasons: ClassVar[Mapping[str, str]] = {**REASONS, **low_precision.REASONS}
    kinds: ClassVar = {
        "float32": (torch.float32,),
        "bfloat16": (torch.float32,),
        "int8": (torch.float32, torch.bfloat16, torch.float16),
    }
    arithmetic = (quantize, static, narrowed, lost)

    def match(self, index: GraphIndex) -> Iterator[ProductSite | Refusal]:
        """Yield the linear layers, with what follows them."""
        layers: dict[tuple[Any, ...], list[ProductSite]] = {}
        for node in index.nodes:
            call = read_linear(index, node, transposed=True)
            if isinstance(call, Obstacle):
                yield Refusal(call.site, call.reason, f"{call.message}; it stays as it is", (node.name,))
            elif call is not None:
                key = (call.module_name, call.transposed, *[(ref.key, id(ref.tensor)) for ref in call.tensors])
                layers.setdefault(key, []).append(ProductSite(call, call.input, node))
        claimed: set[Node] = set()
        hidden = cache(lambda: hidden_strides(index))
        given = self.given_to(index, [sites[0].call for sites in layers.values()])
        for sites, its in zip(layers.values(), given, strict=True):
            site = sites[0] if its["left_out"] is not None else _as_one(index, sites, claimed, hidden)
            claimed.update(() if its["left_out"] is not None else site.nodes)
            yield replace(site, **its)

    def check(self, site: ProductSite, index: GraphIndex) -> Refusal | None:
        """Refuse what the operator does not take, and shared, tied or mutated tensors."""
        call = site.call
        problem = self._problem(site)
        if problem is not None:
            return index.refuse(call.label, problem[0], f"linear `{call.label}` {problem[1]}", call.node)
        for each in site.calls:
            if index.effects.written_between(each.input, each.call.node, each.last):
                written, first, last = each.input.name, each.call.node.name, each.last.name
                message = f"`{written}` is written in place between `{first}` and `{last}`"
                return index.refuse(call.label, "mutated", message, each.call.node)
        nodes = [each.call.node for each in site.calls]
        refusal = tensors_refusal(call, index) or sharing_refusal(call, nodes, index)
        return refusal or kernels_refusal(call.label, index, call.node)

    def _problem(self, site: ProductSite) -> tuple[str, str] | None:
        """Return why a layer is left alone, as (reason code, predicate)."""
        if site.left_out is not None:
            return site.left_out
        unfit, known = self.unfit(site.call, site.ends, site.rows), tensor_facts(site.input)
        if unfit is None and self.weights != "int8" and known is not None and known.dtype is not torch.float32:
            return "unsupported-dtype", f"takes values of {known.dtype}; the operators take torch.float32"
        return unfit

    def rewrite(self, site: ProductSite, edit: Editor) -> None:
        """Insert one module with the same parameters, and drop what it replaces."""
        call, norm = site.call, site.norm
        module = self._module(site)
        full = call.module_name or call.weight.name
        name = edit.add_module(full, f"{full.rpartition('.')[2]}_panels", module.train(call.training))
        for each in site.calls:
            inputs = [each.input] if each.residual is None else [each.input, each.residual]
            # The last node first: the new node takes its metadata.
            made = edit.call_module(name, *inputs, before=each.last, like=each.chain[::-1])
            take_out(edit, each.last, made, each.chain)
        pieces = {call.weight.name: Piece(f"{name}.weight", transposed=call.transposed)}
        if self.weights != "float32":
            pieces = self.record(edit, call, name)
        if call.bias is not None:
            pieces[call.bias.name] = Piece(f"{name}.bias")
        edit.drop(call, pieces, twin=name)
        if norm is not None and norm.tensors:  # a norm without tensors was removed with its last call
            refs = {ref.name: Piece(f"{name}.norm_{key}") for key, ref in norm_tensors(norm).items()}
            edit.drop(norm, refs, twin=name)

    def _module(self, site: ProductSite) -> PanelLinear:
        """Return the layer, with the tensors of the call."""
        call, norm, is_int8 = site.call, site.norm, self.weights == "int8"
        module = bare_module(
            PanelLinear, call.in_features, call.out_features, bias=call.bias is not None, integers=is_int8,
            rounding=is_int8 and site.ends is not None, activation=tuple(site.activation), gated=site.gated,
            norm=() if norm is None else tuple(norm_like(norm)),
        )  # fmt: skip
        weight = call.weight.tensor
        if self.weights != "float32":
            self.put_rounded(module, call, site.ends)
        elif call.transposed:
            with torch.inference_mode(False), torch.no_grad():
                module.weight = nn.Parameter(weight.detach().t().contiguous(), weight.requires_grad)
        else:
            module.weight = parameter_of(weight)
        if call.bias is not None:
            module.bias = parameter_of(call.bias.tensor)
        for key, ref in norm_tensors(norm).items():
            module.register_parameter(f"norm_{key}", parameter_of(ref.tensor))
        return module


def _as_one(
    index: GraphIndex, plain: list[ProductSite], claimed: set[Node], hidden: Callable[[], set[Node]]
) -> ProductSite:
    """Return the site of all calls of a layer, with as much of what follows as is the same after each of them.

    What another layer has claimed stays out: the sum of two layers goes with the first.
    """
    fused = plain
    # In the order in which the operator computes them; with a gate, there is no other activation.
    for extend in (_with_gate, _with_activation, partial(_with_residual, hidden=hidden)):
        fused = [extend(index, site) for site in fused]
    for sites in ([_with_norm(index, site) for site in fused], fused):
        norm, norms = sites[0].norm, [site.norm.node for site in sites if site.norm is not None]
        alike = all(_epilogue(site) == _epilogue(sites[0]) and claimed.isdisjoint(site.chain) for site in sites)
        apart = len({site.last for site in sites}) == len(sites)  # the sum of two of the calls is one node
        if alike and apart and (norm is None or sharing_refusal(norm, norms, index) is None):
            return replace(sites[0], again=tuple(sites[1:]))
    return replace(plain[0], again=tuple(plain[1:]))


def _epilogue(site: ProductSite) -> tuple[Any, ...]:
    """Return what has to be equal for calls of one layer to become calls of one packed layer."""
    norm = site.norm
    its = None if norm is None else (norm.module_name, norm.eps, norm.centred, [id(ref.tensor) for ref in norm.tensors])
    return site.gated, site.activation, site.residual is None, its


def _extended(site: ProductSite, last: Node, *others: Node, **settings: Any) -> ProductSite:
    return replace(site, last=last, between=(*site.between, site.last, *others), **settings)


def _with_activation(index: GraphIndex, site: ProductSite) -> ProductSite:
    if site.gated:
        return site
    last, activation = activation_after(index, site.last)
    if activation != NONE:
        return _extended(site, last, activation=activation)
    return _with_quick_gelu(index, site)


@cache
def _quick_gelu() -> Pattern:
    return Pattern(lambda x: x * torch.sigmoid(1.702 * x))


def _with_quick_gelu(index: GraphIndex, site: ProductSite) -> ProductSite:
    value = site.last
    for match in (found for user in value.users for found in _quick_gelu().matches(index, user)):
        inner = [node for node in match.nodes if node is not match.root]
        alone = match.other_reader() is None and {*value.users} <= {*match.nodes}
        if match.values["x"] is value and alone and not any(map(index.effects.writes, match.nodes)):
            return _extended(site, match.root, *inner, activation=Activation("quick_gelu"))
    return site


def _with_gate(index: GraphIndex, site: ProductSite) -> ProductSite:
    """``activation(gate) * up`` of two halves of a layer."""
    features = site.call.out_features
    if features % 2 or site.between:
        return site
    halves: dict[int, Node] = {}
    way: list[Node] = []
    for user in site.last.users:
        ends = list(user.users) if operation(index, user) in ("split", "chunk") else [user]
        for end in ends:
            cut, chain = _followed(index, end)
            layout = layout_of(index, cut)
            if layout is None or layout.base is not site.last or not same_size(layout.axes[-1].size, features // 2):
                return site
            if layout.axes[-1].stride != 1 or layout.offset in halves:
                return site
            halves[layout.offset] = cut
            way += [user, *chain]
    if set(halves) != {0, features // 2}:
        return site
    # The operator activates the first half. If a model activates the second, its calls stay.
    gate, up = halves[0], halves[features // 2]
    activated, activation = activation_after(index, gate)
    product = sole_user(activated)
    call = None if product is None else read_elementwise(product)
    if activation == NONE or not isinstance(call, ElementwiseCall) or call.operation != "mul" or call.inplace:
        return site
    if index.effects.writes(activated) or {call.left, call.right} != {activated, up} or sole_user(up) is not call.node:
        return site
    return _extended(site, call.node, *way, activated, gated=True, activation=activation)


def _followed(index: GraphIndex, node: Node) -> tuple[Node, list[Node]]:
    """Return the end of a chain of copies and slices, each with one reader, and the chain."""
    chain = [node]
    while (user := sole_user(chain[-1])) is not None and operation(index, user) in ("clone", "contiguous"):
        if source_of(index, user) is not chain[-1]:
            break
        chain.append(user)
    return chain[-1], chain


def _with_residual(index: GraphIndex, site: ProductSite, hidden: Callable[[], set[Node]]) -> ProductSite:
    found = sum_after(index, site.last)
    if found is None or shows_strides(found.node, hidden) or not is_float(found.other) or not is_float(site.last):
        return site
    mine, its = tensor_facts(site.last), tensor_facts(found.other)
    if mine is None or its is None or not same_sizes(mine.shape, its.shape):
        return site
    return _extended(site, found.node, residual=found.other)


def _with_norm(index: GraphIndex, site: ProductSite) -> ProductSite:
    user = sole_user(site.last)
    norm = None if user is None else read_layer_norm(index, user)
    if not isinstance(norm, LayerNormCall) or norm.input is not site.last:
        return site
    features = site.call.out_features // 2 if site.gated else site.call.out_features
    if norm.normalized_shape != (features,) or norm.training or tensors_refusal(norm, index) is not None:
        return site
    if any(ref.tensor.dtype is not torch.float32 for ref in norm.tensors):
        return site
    if index.effects.written_between(site.last, site.last, norm.node):
        return site
    return _extended(site, norm.node, norm=norm)
