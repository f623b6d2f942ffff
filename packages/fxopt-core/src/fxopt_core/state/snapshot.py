"""Exact rollback of a graph module, or of any module: structure always, contents of tensors on request.

A snapshot records references and shallow copies, never a deep copy, in time linear in nodes, modules and tensors. It
brings back the same objects: graph, nodes with all their fields and order, modules and their classes, hooks, flags,
attributes, and which tensor with which memory and dtype sits where. It calls no hook and compiles nothing.

In `meta` and in plain attributes, what built-in containers hold comes back at any depth. Of all other objects, only the
reference does: what a pass changes inside of an object of some class of its own stays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from fxopt_core._torch import own_classes
from fxopt_core.errors import FxoptError
from fxopt_core.gc_pause import collector_paused
from fxopt_core.state.containers import Containers
from fxopt_core.state.graph import ClassState, GraphState
from fxopt_core.state.modules import ModuleState, Tree
from fxopt_core.state.tensors import Rebuild, TensorState


@contextmanager
def _raw_tensors() -> Iterator[None]:
    """Read and write tensors as they are: nothing enters autograd, and no subclass intervenes."""
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        yield


class Snapshot:
    """The state of a module at one moment; `take` makes one, `restore` goes back to it, any number of times.

    >>> from fxopt_core import iter_nodes
    >>> import operator
    >>> graph_module = torch.fx.symbolic_trace(torch.nn.Linear(2, 2))
    >>> snapshot = Snapshot.take(graph_module)
    >>> graph_module.graph.erase_node(graph_module.graph.output_node())
    >>> del graph_module.weight
    >>> snapshot.restore()
    ()
    >>> graph_module.graph.lint()
    >>> [node.name for node in iter_nodes(graph_module.graph)], tuple(graph_module.weight.shape)
    (['input_1', 'weight', 'bias', 'linear', 'output'], (2, 2))
    """

    def __init__(self, module: nn.Module) -> None:
        with collector_paused(), _raw_tensors():
            self._containers = Containers()
            self._tree = Tree(module, self._containers)
            self._graphs, self._classes = _graphs_and_classes(self._tree, self._containers)

    @classmethod
    def take(cls, module: nn.Module, *, protect_values: bool | Iterable[Tensor] = False) -> Snapshot:
        """Record a module, with all modules below it, nested graph modules and their graphs included.

        ``protect_values`` copies the contents of all tensors too, or of these, so that `restore` also undoes writes in
        place. It takes as much memory as the tensors do.
        """
        snapshot = cls(module)
        tensors = snapshot._tree.tensors
        if protect_values is True:
            snapshot._protect(tensors.values())
        elif protect_values:
            snapshot._protect(tensors[each] for each in dict.fromkeys(map(id, protect_values)))
        return snapshot

    def _protect(self, tensors: Iterable[TensorState]) -> None:
        storages: dict[int, torch.UntypedStorage] = {}
        with collector_paused(), _raw_tensors():
            for tensor in tensors:
                tensor.protect(storages)

    def release(self, tensor: Tensor, rebuild: Rebuild) -> bool:
        """Let go of one tensor, so that its memory is freed as soon as the caller of this drops it as well.

        From here on the snapshot refers to the tensor, and to the modules that hold it, only weakly. If they are gone
        when restoring, `rebuild` makes the contents again, in the same shape and dtype and on the same device;
        `requires_grad`, attributes, gradient and ties come from the record. A tensor that someone else holds comes back
        itself.

        Returns:
            Whether the snapshot knows the tensor; one that came after it does not concern it.
        """
        state = self._tree.tensors.get(id(tensor))
        if state is None or state.tensor is not tensor:
            return False
        state.release(rebuild)
        return True

    def __del__(self) -> None:
        """Let go of everything at once.

        The records refer to each other, so that without this, what they hold lives until a garbage collection. A run
        that has succeeded cannot fail here any more, nor be interrupted.
        """
        tree = vars(self).get("_tree")  # which is not there where recording failed
        if tree is not None:
            tree.close()

    def restore(self) -> tuple[str, ...]:
        """Put everything back.

        Returns:
            Full names of the tensors whose contents may still differ, because they were written in place since: known
            by their version counters, which writes through `.data` and into inference tensors do not move. Empty where
            the snapshot protects values; they have been copied back then.

        Raises:
            FxoptError: something could not be restored, such as a released tensor that is gone and was not rebuilt; all
                else is.
        """
        written: list[str] = []
        failures: list[tuple[str, Exception]] = []
        with _raw_tensors():
            modules = list(self._tree.modules.values())
            for module in modules:
                module.revive()
            done: set[int] = set()
            for tensor in self._tree.tensors.values():
                with _noting_failures(tensor, failures):
                    written.extend(tensor.restore(done))
            for module in modules:
                with _noting_failures(module, failures):
                    module.restore()
        for cls in self._classes:
            cls.restore()
        for graph in self._graphs:
            graph.restore()
        self._containers.restore()
        if failures:
            names = ", ".join(name for name, _ in failures)
            raise FxoptError(f"rollback restored everything but {names}: {failures[0][1]}") from failures[0][1]
        return tuple(dict.fromkeys(written))


@contextmanager
def kept(module: nn.Module) -> Iterator[None]:
    """Bring a module back at the end of a ``with`` block that runs or traces it, and torch's CPU random numbers.

    That is all that a `Snapshot` restores, and the values of tensors that are neither parameters nor buffers.

    >>> linear = nn.Linear(2, 2)
    >>> linear.seen, linear.total = [], torch.zeros(1)
    >>> with kept(linear):
    ...     linear.seen.append(1)
    ...     linear.total += 1
    ...     linear.extra = nn.ReLU()
    >>> linear.seen, linear.total, hasattr(linear, "extra")
    ([], tensor([0.]), False)
    """
    snapshot = Snapshot.take(module)
    snapshot._protect(snapshot._tree.plain_tensors())
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        try:
            snapshot.restore()
        except KeyboardInterrupt:
            snapshot.restore()  # once more, from the beginning
            raise


@contextmanager
def _noting_failures(state: ModuleState | TensorState, failures: list[tuple[str, Exception]]) -> Iterator[None]:
    """Let one failure not keep the rest from being restored."""
    try:
        yield
    except Exception as error:
        failures.append((state.name or "the graph module", error))


def _graphs_and_classes(tree: Tree, containers: Containers) -> tuple[list[GraphState], list[ClassState]]:
    graphs: dict[int, Graph] = {}
    classes: list[ClassState] = []
    for state in tree.modules.values():
        if isinstance(state.module, GraphModule):
            graph = state.module.graph
            graphs[id(graph)] = graph
            classes.extend(map(ClassState, own_classes(state.module)))
    return [GraphState(graph, containers) for graph in graphs.values()], classes
