"""Passes that are wrong in what they leave behind: modules, tensors, flags, hooks, keys, marks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from typing import ClassVar

import torch
from padded_linears import PadOutputs
from site_passes import LinearSite
from torch import nn
from torch.fx import GraphModule, Node

from fxopt_core import Refusal, ReversibleTransformation, Transformation, iter_nodes
from fxopt_rewrite import (
    Editor,
    GraphIndex,
    LinearCall,
    SitePass,
    read_linear,
)


def layers(graph_module: GraphModule) -> Iterator[tuple[Node, nn.Linear]]:
    """Yield calls of linear layers."""
    for node in iter_nodes(graph_module.graph):
        if node.op == "call_module":
            module = graph_module.get_submodule(str(node.target))
            if type(module) is nn.Linear:
                yield node, module


def _note(module: nn.Module) -> None:
    vars(module)["renewed"] = True


def copied(module: nn.Linear) -> nn.Linear:
    """Return a faithful copy of a layer, which computes the same."""
    made: nn.Linear = copy.deepcopy(module)
    return made


def shared(graph_module: GraphModule) -> set[nn.Module]:
    """Return the layers that something else reads, or parts of which it reads."""
    uses: Counter[int] = Counter()
    for _, module in graph_module.named_modules(remove_duplicate=False):
        uses.update(map(id, module._parameters.values()))
    for node in iter_nodes(graph_module.graph):
        if node.op == "get_attr":
            owner, _, name = str(node.target).rpartition(".")
            uses[id(getattr(graph_module.get_submodule(owner), name))] += 1
    calls = Counter(module for _, module in layers(graph_module))
    return {each for each in calls if calls[each] > 1 or any(uses[id(p)] > 1 for p in each.parameters())}


class Renewing(Transformation):
    """``linear(x)`` -> ``renewed(x)``: each layer called once is replaced by a copy, as right passes do."""

    preserves_computation = True
    done = "_renewed"

    def renew(self, module: nn.Linear) -> nn.Module:
        """Return what stands for a layer."""
        return copied(module)

    def legal(self, module: nn.Linear) -> bool:
        """Whether a layer is replaced."""
        return not _hooked(module)

    def sites(self, graph_module: GraphModule) -> list[tuple[Node, nn.Linear]]:
        """Return the layers that are replaced: what is shared is none of them."""
        used = shared(graph_module)
        found = [(node, each) for node, each in layers(graph_module) if not str(node.target).endswith(self.done)]
        return [(node, each) for node, each in found if each not in used and self.legal(each)]

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Replace the layers."""
        for node, module in self.sites(graph_module):
            name = f"{node.target}{self.done}"
            graph_module.add_submodule(name, self.renew(module))
            node.target = name
            self.mark_as_transformed(node)
        self.clean(graph_module)
        return graph_module

    def clean(self, graph_module: GraphModule) -> None:
        """Remove the layers that are called no more."""
        for node in iter_nodes(graph_module.graph):
            if node.op == "call_module" and str(node.target).endswith(self.done):
                was = str(node.target).removesuffix(self.done)
                owner, _, name = was.rpartition(".")
                graph_module.get_submodule(owner)._modules.pop(name, None)


class ForgetsTies(Renewing):
    """Puts copies, too, in the place of layers whose weight is that of an embedding."""

    def sites(self, graph_module: GraphModule) -> list[tuple[Node, nn.Linear]]:
        """Return all layers, each once."""
        calls = {module: node for node, module in layers(graph_module) if self.legal(module)}
        return [(node, module) for module, node in calls.items() if not hasattr(module, "renewed")]

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Replace the layers under their names."""
        for node, module in self.sites(graph_module):
            made = copied(module)
            _note(made)
            owner, _, name = str(node.target).rpartition(".")
            graph_module.get_submodule(owner)._modules[name] = made
        return graph_module


class KeepsDeadModules(Renewing):
    """Leaves the old layers where they are."""

    def clean(self, graph_module: GraphModule) -> None:
        """Do nothing."""


class Unfreezes(Renewing):
    """Makes new parameters that train."""

    def renew(self, module: nn.Linear) -> nn.Module:
        """Return a copy with gradients."""
        return copied(module).requires_grad_(True)


class TrainsAgain(Renewing):
    """Makes modules that are in train mode, as new modules are."""

    def renew(self, module: nn.Linear) -> nn.Module:
        """Return a copy in train mode."""
        return copied(module).train()


class ChangesDtype(Renewing):
    """Computes in float32, and leaves the results in it."""

    def renew(self, module: nn.Linear) -> nn.Module:
        """Return a copy in float32."""
        return copied(module).float()


class DropsHooks(Renewing):
    """Replaces layers with hooks."""

    def legal(self, module: nn.Linear) -> bool:
        """Whatever has hooks, or has none."""
        return True

    def renew(self, module: nn.Linear) -> nn.Module:
        """Return a layer of the same numbers, and nothing else."""
        made = copied(module)
        made._forward_hooks.clear()
        return made


class LosesUnusedKeys(Renewing):
    """Removes all that the graph does not use, whoever put it there."""

    def clean(self, graph_module: GraphModule) -> None:
        """Remove too much."""
        super().clean(graph_module)
        graph_module.delete_all_unused_submodules()


class MakesPersistent(Renewing):
    """Registers buffers again, without saying which are persistent."""

    def clean(self, graph_module: GraphModule) -> None:
        """Register them."""
        super().clean(graph_module)
        for name, buffer in list(graph_module.named_buffers(recurse=False)):
            delattr(graph_module, name)
            graph_module.register_buffer(name, buffer)


class WritesCaller(Transformation):
    """``linear(x) * 2.0`` -> ``linear(x)``, with the factor multiplied into the weight that the caller holds."""

    preserves_computation = True

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Fold the factors."""
        for node, module in list(layers(graph_module)):
            users = list(node.users)
            if len(users) == 1 and users[0].op == "call_function" and users[0].args[1:] == (2.0,):
                with torch.no_grad():
                    for parameter in module.parameters():
                        parameter.mul_(2.0)
                users[0].replace_all_uses_with(node)
                graph_module.graph.erase_node(users[0])
        return graph_module


class LosesMetadata(Renewing):
    """Throws away what nodes know."""

    def clean(self, graph_module: GraphModule) -> None:
        """Forget stack traces and shapes."""
        super().clean(graph_module)
        for node in iter_nodes(graph_module.graph):
            node.meta = {key: value for key, value in node.meta.items() if key == "fxopt"}


class MarksOnNodes(Renewing):
    """Remembers what it has done in attributes of nodes, which copies lose."""

    def clean(self, graph_module: GraphModule) -> None:
        """Note it."""
        super().clean(graph_module)
        for node, _ in layers(graph_module):
            node.my_mark = True


class SharesBetweenResults(Renewing):
    """Keeps what it has made on its class, for the next time."""

    made: ClassVar[dict[str, nn.Linear]] = {}

    def renew(self, module: nn.Linear) -> nn.Module:
        """Return a copy; of an equal layer, the same one."""
        return self.made.setdefault(f"{module.training}, {list(module.named_parameters())}", copied(module))


class DrawsRandomNumbers(Renewing):
    """Lets torch initialise the layers that it overwrites."""

    def renew(self, module: nn.Linear) -> nn.Module:
        """Return a layer that was initialised at random."""
        nn.Linear(module.in_features, module.out_features)
        return copied(module)


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks) or any(each._backward_hooks for each in module.parameters())


class Inverting(ReversibleTransformation):
    """``linear(x)`` -> ``linear(x)`` of twice the weight: undone by halving, for a start."""

    times = 3.0

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Multiply."""
        return self._scaled(graph_module, self.times, done=True)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Divide, which rounds."""
        return self._scaled(graph_module, 1.0 / self.times, done=False)

    def restore(self, node: Node) -> None:
        """Take the mark away."""
        self.mark_as_restored(node)

    def _scaled(self, graph_module: GraphModule, factor: float, *, done: bool) -> GraphModule:
        used = shared(graph_module)
        for node, module in list(layers(graph_module)):
            if self.transformed(node) is not done and module not in used and not _hooked(module):
                made = copied(module)
                made.weight = nn.Parameter(made.weight.detach() * factor, requires_grad=made.weight.requires_grad)
                owner, _, name = str(node.target).rpartition(".")
                graph_module.get_submodule(owner)._modules[name] = made
                if done:
                    self.mark_as_transformed(node)
                else:
                    self.restore(node)
        return graph_module


class UndoesInexactly(Inverting):
    """Makes weights too small for all their digits, and large again."""

    times = 2.0**-140


class UndoesNothing(Inverting):
    """Reverses what was never applied, too."""

    times = 2.0

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Divide in any case."""
        for node, _ in layers(graph_module):
            if not self.transformed(node):
                self.mark_as_transformed(node)
        return super().reverse(graph_module)


class Padding(PadOutputs):
    """``linear(x)`` -> ``narrow(padded(x))``, rightly."""

    preserves_computation = True


class WrongPiece(Padding):
    """Says that the old rows are where they are not."""

    start = 1


class RefusesBadly(SitePass[LinearSite]):
    """Refuses with a sentence that names nothing."""

    def match(self, index: GraphIndex) -> Iterator[LinearSite]:
        """Yield all layers."""
        for node in index.nodes:
            call = read_linear(index, node)
            if isinstance(call, LinearCall):
                yield LinearSite(call)

    def check(self, site: LinearSite, index: GraphIndex) -> Refusal | None:
        """Refuse."""
        return Refusal(site=site.label, reason="Not Supported", message="no", nodes=())

    def rewrite(self, site: LinearSite, edit: Editor) -> None:
        """Never called."""


class RefusesForSecrets(RefusesBadly):
    """Refuses for a reason that it does not declare."""

    def check(self, site: LinearSite, index: GraphIndex) -> Refusal | None:
        """Refuse."""
        return index.refuse(site.label, "secret", f"`{site.label}` is left alone for some reason", *site.nodes)
