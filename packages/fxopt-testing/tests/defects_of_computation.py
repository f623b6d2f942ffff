"""Passes that are wrong in what their results compute, and that claim to preserve it."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.utils import parametrize

from fxopt_core import Transformation, iter_nodes


def calls(graph_module: GraphModule, *targets: object) -> Iterator[Node]:
    """Yield calls of functions, or of methods by name."""
    for node in list(iter_nodes(graph_module.graph)):
        if node.op in ("call_function", "call_method") and node.target in targets:
            yield node


def substitute(node: Node, other: Node) -> None:
    """Let another node take the place of one."""
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


def plain(module: nn.Linear) -> bool:
    """Whether a layer has a bias and no hooks."""
    own = list(module.parameters())
    return len(own) == 2 and not module._forward_hooks and not any(each._backward_hooks for each in own)


class Preserving(Transformation):
    """A pass that claims to preserve what is computed."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Edit the graph."""
        self.edit(graph_module)
        return graph_module

    def edit(self, graph_module: GraphModule) -> None:
        """Edit it."""
        raise NotImplementedError


class ClaimsWrongly(Preserving):
    """``x * y`` -> ``x + y``, as in a tutorial."""

    def edit(self, graph_module: GraphModule) -> None:
        """Change the operators."""
        for node in calls(graph_module, operator.mul):
            node.target = operator.add


class ForgetsSharedModule(Preserving):
    """``2.0 * linear(x)`` -> ``doubled_linear(x)``, though the layer may be called elsewhere."""

    def edit(self, graph_module: GraphModule) -> None:
        """Replace the module under its name."""
        names = Counter(each for _, each in graph_module.named_modules(remove_duplicate=False))
        for node in list(iter_nodes(graph_module.graph)):
            module = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
            if type(module) is nn.Linear and names[module] == 1 and plain(module):
                self.negate(graph_module, node, module)

    def negate(self, graph_module: GraphModule, node: Node, module: nn.Linear) -> None:
        """``linear(x)`` -> ``-linear(x)`` with the layer negated."""
        if not self.transformed(node) and all(user.target is not operator.neg for user in node.users):
            made = nn.Linear(module.in_features, module.out_features, device="meta").train(module.training)
            for name, parameter in module.named_parameters():
                setattr(made, name, nn.Parameter(-parameter.detach(), requires_grad=parameter.requires_grad))
            owner, _, name = str(node.target).rpartition(".")
            graph_module.get_submodule(owner)._modules[name] = made
            with graph_module.graph.inserting_after(node):
                negative = graph_module.graph.call_function(operator.neg, (node,))
            node.replace_all_uses_with(negative, delete_user_cb=lambda user: user is not negative)
            negative.meta.update(node.meta)
            self.mark_as_transformed(node)


class TakesSubclasses(Preserving):
    """``linear(x)`` -> ``F.linear(x, weight, bias)``, of subclasses, too."""

    def edit(self, graph_module: GraphModule) -> None:
        """Call the function in place of the module."""
        for node in list(iter_nodes(graph_module.graph)):
            module = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
            if isinstance(module, nn.Linear) and plain(module) and not parametrize.is_parametrized(module):
                with graph_module.graph.inserting_before(node):
                    read = [graph_module.graph.get_attr(f"{node.target}.{name}") for name in ("weight", "bias")]
                    value = node.args[0] if node.args else node.kwargs["input"]
                    node.replace_all_uses_with(graph_module.graph.call_function(F.linear, (value, *read)))
                graph_module.graph.erase_node(node)


class TakesNoKeywords(Preserving):
    """``linear(x)`` -> ``linear(x)``, with the argument read by its position."""

    def edit(self, graph_module: GraphModule) -> None:
        """Look at the arguments."""
        for node in iter_nodes(graph_module.graph):
            if node.op == "call_module" and type(graph_module.get_submodule(str(node.target))) is nn.Linear:
                assert isinstance(node.args[0], Node)


class IgnoresRounding(Preserving):
    """``x / c`` -> ``x * (1 / c)``, in every spelling, whatever else the arguments say."""

    def edit(self, graph_module: GraphModule) -> None:
        """Multiply."""
        for node in calls(graph_module, operator.truediv, torch.div, torch.ops.aten.div.Tensor_mode):
            value, by = node.args[:2]
            if isinstance(value, Node) and isinstance(by, float):
                node.target, node.args, node.kwargs = operator.mul, (value, 1.0 / by), {}


class WrongOnAtenAlone(Preserving):
    """``aten.linear(x, w, b)`` -> ``x @ w.T``, without the bias: right on the forms that it was tried on."""

    def edit(self, graph_module: GraphModule) -> None:
        """Multiply."""
        for node in calls(graph_module, torch.ops.aten.linear.default):
            with graph_module.graph.inserting_before(node):
                transposed = graph_module.graph.call_method("t", (node.args[1],))
                substitute(node, graph_module.graph.call_function(torch.matmul, (node.args[0], transposed)))


class FoldsInTrainMode(Preserving):
    """``batch_norm(x)`` -> ``x * scale + shift`` by the running statistics, in train mode, too."""

    def edit(self, graph_module: GraphModule) -> None:
        """Put the constants into the graph."""
        for node in list(iter_nodes(graph_module.graph)):
            module = graph_module.get_submodule(str(node.target)) if node.op == "call_module" else None
            if type(module) is nn.BatchNorm2d and module.track_running_stats:
                self.fold(graph_module, node, module)

    def fold(self, graph_module: GraphModule, node: Node, module: nn.BatchNorm2d) -> None:
        """Call the function, which is told not to train."""
        names = ["running_mean", "running_var", *(["weight", "bias"] if module.affine else [])]
        with graph_module.graph.inserting_before(node):
            read = [graph_module.graph.get_attr(f"{node.target}.{name}") for name in names]
            made = graph_module.graph.call_function(F.batch_norm, (node.args[0], *read), {"eps": module.eps})
        made.meta.update(node.meta)
        for each in read:
            each.meta["stack_trace"] = ""
        substitute(node, made)


class SharesAcrossWrites(Preserving):
    """``f(x), f(x)`` -> one call of it, though ``x`` may be written between the two."""

    def edit(self, graph_module: GraphModule) -> None:
        """Keep the first of equal calls."""
        seen: dict[object, Node] = {}
        for node in list(iter_nodes(graph_module.graph)):
            if node.op == "call_function" and node.target in (operator.mul, torch.ops.aten.mul.Tensor):
                key = (node.target, node.args)
                if seen.setdefault(key, node) is not node:
                    substitute(node, seen[key])


class RemovesWrites(Preserving):
    """Removes what nothing reads, in-place operations included."""

    def edit(self, graph_module: GraphModule) -> None:
        """Erase from the end."""
        for node in reversed(list(iter_nodes(graph_module.graph))):
            if node.op in ("call_method", "call_function") and not node.users:
                graph_module.graph.erase_node(node)


class WritesCopies(Preserving):
    """``x.mul_(c)`` -> ``x * c``, which leaves the caller's tensor as it was."""

    def edit(self, graph_module: GraphModule) -> None:
        """Read the product where the argument was read from there on."""
        for node in calls(graph_module, "mul_"):
            value = node.args[0]
            assert isinstance(value, Node)
            node.target = "mul"
            later = list(iter_nodes(graph_module.graph))
            after = set(later[later.index(node) + 1 :])
            value.replace_all_uses_with(node, delete_user_cb=after.__contains__)


class ReturnsViews(Preserving):
    """``x + 0.0`` -> ``x``, which is the caller's own tensor then."""

    def edit(self, graph_module: GraphModule) -> None:
        """Remove products by one."""
        for node in calls(graph_module, operator.mul):
            value, by = node.args
            if by == 1.0 and isinstance(value, Node) and value.op == "placeholder":
                substitute(node, value)


class Detaches(Preserving):
    """``tanh(x)`` -> ``tanh(x.detach())``, which has no gradient."""

    def edit(self, graph_module: GraphModule) -> None:
        """Detach the argument."""
        for node in calls(graph_module, torch.relu, torch.tanh):
            value = node.args[0]
            assert isinstance(value, Node)
            if value.target != "detach":
                with graph_module.graph.inserting_before(node):
                    node.replace_input_with(value, graph_module.graph.call_method("detach", (value,)))


class BakesBatchSize(Preserving):
    """``x.view(rows, 2, 2)`` -> ``x.view(3, 2, 2)``: the size of the example."""

    def edit(self, graph_module: GraphModule) -> None:
        """Take the size from the shapes that are known."""
        for node in calls(graph_module, "view", "reshape"):
            sizes = tuple(node.meta["val"].shape)
            node.args = (node.args[0], *sizes)


class BreaksOnEmptyBatch(Preserving):
    """``relu(x)`` -> ``relu(x)``, after a look at the largest element."""

    def edit(self, graph_module: GraphModule) -> None:
        """Look at it."""
        for node in calls(graph_module, torch.relu):
            value = node.args[0]
            assert isinstance(value, Node)
            node.target = largest_first
            node.meta.pop("val", None)


def largest_first(x: Tensor) -> Tensor:
    """``relu``, with a short cut that an empty tensor does not have."""
    return x if (x.detach().amin() >= 0).item() else torch.relu(x)


class ExpectsContiguous(Preserving):
    """``x.view(...)`` of arguments that are laid out as the example is."""

    def edit(self, graph_module: GraphModule) -> None:
        """View the memory of the argument as the example's."""
        for node in calls(graph_module, "view", operator.mul):
            value, *others = node.args
            if isinstance(value, Node) and value.op == "placeholder" and value.meta["val"].dim() == 2:
                with graph_module.graph.inserting_before(node):
                    seen = graph_module.graph.call_function(torch.as_strided, (value, *_layout(value)))
                node.args = (seen, *others)


def _layout(value: Node) -> tuple[tuple[int, ...], tuple[int, ...]]:
    example = value.meta["val"]
    return tuple(example.shape), tuple(example.stride())


class RenamesArguments(Preserving):
    """``forward(x)`` -> ``forward(argument_0)``."""

    def edit(self, graph_module: GraphModule) -> None:
        """Rename them."""
        for number, node in enumerate(iter_nodes(graph_module.graph)):
            if node.op == "placeholder":
                node.target = f"argument_{number}"


class LosesDefaults(Preserving):
    """``forward(x, scale=2.0)`` -> ``forward(x, scale)``."""

    def edit(self, graph_module: GraphModule) -> None:
        """Drop the defaults."""
        for node in iter_nodes(graph_module.graph):
            if node.op == "placeholder":
                node.args = ()


class AddsEachTime(Preserving):
    """``relu(x)`` -> ``relu(relu(x))``: the same, and again each time."""

    def edit(self, graph_module: GraphModule) -> None:
        """Put one more in."""
        for node in calls(graph_module, torch.relu, F.relu):
            with graph_module.graph.inserting_after(node):
                again = graph_module.graph.call_function(torch.relu, (node,))
            again.meta.update({key: value for key, value in node.meta.items() if key != "fxopt"})
            node.replace_all_uses_with(again, delete_user_cb=partial(operator.is_not, again))
