"""`Live`: a graph module on which the edits of a pass are taken back.

Original tensors are cut out of those that the module has now, so that training, `load_state_dict` and changes of dtype
or device since then are kept. Anything that no longer fits raises an `UndoError`.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxopt_core import (
    NodeTag,
    class_path,
    import_class,
    inputs_of,
    iter_nodes,
    names_of,
    release,
    set_tag,
    tag_of,
    type_text,
    undo_error,
)
from fxopt_core.errors import UndoError
from fxopt_rewrite._torch import sentinel
from fxopt_rewrite.journal import edits
from fxopt_rewrite.journal.graph_edits import TargetNodes, by_name, identities, nodes_by_id
from fxopt_rewrite.journal.order import KeyOrders
from fxopt_rewrite.journal.resolve import imported, mapped, module_of, recall_meta
from fxopt_rewrite.journal.rewiring import Rewiring, set_places
from fxopt_rewrite.layers import module_problem
from fxopt_rewrite.ops.names import nodes_in
from fxopt_rewrite.shapes.infer import describe_values, fake_values
from fxopt_rewrite.shapes.meta import VALUE_KEYS, value_entries


class Tables:
    """Lookup tables of a graph module: made once, and kept up to date while journals are taken back."""

    def __init__(self, graph_module: GraphModule) -> None:
        self.graph = graph_module.graph
        self.by_id = nodes_by_id(self.graph)
        self.names = {node.name for node in iter_nodes(self.graph)}
        self.targets = TargetNodes(self.graph)
        self.fakes = fake_values(self.graph)
        self.modules = KeyOrders()

    def __call__(self) -> None:
        """Bring the graph module up to date, after the last journal."""
        names_of(self.graph).counts.clear()  # torch counts on from names that are gone: reapplying makes the same names
        self.modules.apply()

    def settle(self, created: Iterable[Node]) -> None:
        """If another node shares the number of a restored one, keep only the one with the right name."""
        for node in created:
            number = tag_of(node).id
            if number in self.by_id:
                self.by_id[number] = by_name(self.by_id[number])


class Live(edits.EditVisitor):
    """A graph module on which the edits of one pass are taken back."""

    def __init__(self, graph_module: GraphModule, steps: Sequence[edits.Edit], pass_name: str, tables: Tables) -> None:
        self.graph_module, self.graph = graph_module, graph_module.graph
        self.steps, self.pass_name = steps, pass_name
        self.tables, self.by_id, self.names = tables, tables.by_id, tables.names
        self.targets, self.uses = tables.targets, Counter(identities(graph_module))
        self.replacements = {edit.old: edit.new for edit in edits.of_kind(steps, edits.NodeReplaced)}
        self.parts: dict[str, list[tuple[edits.Piece, Tensor]]] = {}  # what was cut out of each new tensor
        self.created: dict[Node, None] = {}
        self.undescribed: dict[Node, None] = {}
        self.erased: set[Node] = set()
        self.touched: dict[Node, None] = {}  # nodes whose users may have another order now
        self.redirected: set[Node] = set()  # users whose inputs are among those
        self._orders, self.rewiring = KeyOrders(), Rewiring()

    def run(self) -> None:
        """Take everything back; after an `UndoError` the graph module is half undone.

        Work that is linear in the size of the graph is left to the call of the tables.
        """
        for edit in reversed(self.steps):
            edit.accept(self)
        self._orders.apply()
        self.rewiring.flush()
        # Users are sorted as the graph is; no value may be read before it is computed.
        for node in self.touched:
            if node in self.erased:
                continue
            users = sorted(node.users)
            if users and users[0] < node:
                raise self.refuse(f"node `{users[0].name}` would read `{node.name}` before it is computed")
            node.users.clear()
            node.users.update(dict.fromkeys(users))
        self.tables.settle(self.created)
        nodes = {**self.created, **self.undescribed}.keys() - self.erased
        describe_values(self.graph_module, nodes, self.tables.fakes)

    def restrided(self, edit: edits.Restrided) -> None:
        """Describe values anew at the end."""
        for node in (each for number in edit.nodes for each in self.by_id.get(number, [])):
            for key in VALUE_KEYS:
                node.meta.pop(key, None)
            self.undescribed[node] = None

    def custom(self, edit: edits.CustomEdit) -> None:
        """Let the edit take itself back."""
        try:
            edit.take_back(self.graph_module)
        except Exception as error:  # third-party code
            found = f"{type(edit).__name__} cannot be taken back ({type(error).__name__}: {error})"
            raise self.refuse(found) from error

    def refuse(self, found: str) -> UndoError:
        """Return the error for something that does not fit."""
        return undo_error(self.pass_name, found, "undo what was done since first, or keep the rewritten graph module")

    def _node(self, number: int, what: str) -> Node:
        found = self.by_id.get(number, [])
        if len(found) != 1:
            raise self.refuse(
                f"the graph has {len(found)} nodes for {what}, expected exactly one, so it was changed since"
            )
        return found[0]

    def node_added(self, edit: edits.NodeAdded) -> None:
        """Erase the node."""
        row, numbered = edit.row, self.by_id.get(edit.row.id, [])
        found = [node for node in numbered if node.name == row.name] or numbered
        if len(found) != 1:
            raise self.refuse(f"node `{row.name}`, which the pass made, was removed or replaced since")
        node = found[0]
        self.rewiring.flush(node)

        def refer(item: Node) -> Any:
            number = tag_of(item).id
            return item if number is None else edits.Ref(number)

        args: Any = map_arg(node.args, refer)
        kwargs: Any = map_arg(node.kwargs, refer)
        same = (node.op, node.target, args, tuple(kwargs.items()))
        if same != (row.op, *self._recall(row, lambda ref: ref)):
            raise self.refuse(f"node `{node.name}`, which the pass made, was changed since")
        if node.users:
            users = ", ".join(f"`{user.name}`" for user in list(node.users)[:3])
            raise self.refuse(f"node `{node.name}`, which the original does not have, is read by {users} now")
        self.touched.update(dict.fromkeys(node.all_input_nodes))
        self.graph.erase_node(node)
        self.erased.add(node)
        self.targets.discard(node)
        self.names.discard(node.name)
        names_of(self.graph).taken.difference_update({node.name, row.name} - self.names)  # so that it may come again
        self.by_id[row.id].remove(node)

    def node_removed(self, edit: edits.NodeRemoved) -> None:
        """Create the node."""
        row = edit.row
        if row.name in self.names:
            raise self.refuse(f"another node is called `{row.name}` now, the name of a node to be restored")
        target, args, kwargs = self._recall(row, lambda ref: self._node(ref.id, f"an input of `{row.name}`"))
        called = (self._module(str(each.target)) for each in nodes_in((args, kwargs)) if each.op == "call_module")
        if any(getattr(module, "only_checks_inputs", False) for module in called):
            raise self.refuse(f"node `{row.name}` would read the checks of the inputs, which give no value")
        if row.op == "call_module" and not _takes(self._module(target), args, dict(kwargs)):
            raise self.refuse(f"node `{row.name}` would be restored with arguments that `{target}` does not take")
        names_of(self.graph).taken.discard(row.name)  # the name is free: no node has it
        with self.graph.inserting_after(self._place(row, args, kwargs)):
            node = self.graph.create_node(row.op, target, args, dict(kwargs), row.name)
        node.type = self._recall(row, lambda ref: ref, row.type_expr)
        node.meta = recall_meta(dict(row.meta))
        set_tag(node, row.tag or NodeTag(row.id, name=row.name))
        self.names.add(node.name)
        self.targets.add(node)
        self.by_id.setdefault(row.id, []).append(node)
        self.touched.update(dict.fromkeys(node.all_input_nodes))
        self.touched[node] = None
        self.created[node] = None

    def _recall(self, row: edits.NodeRow, node_of: Callable[[edits.Ref], Any], *values: Any) -> Any:
        """Return target, arguments and keyword arguments of a row, or other values, with numbers resolved to nodes."""
        try:
            return mapped(values[0] if values else (row.target, row.args, row.kwargs), node_of, imported)
        except (ImportError, AttributeError) as error:
            raise self.refuse(f"node `{row.name}` calls or takes something not found here ({error})") from error

    def _place(self, row: edits.NodeRow, args: Any, kwargs: Any) -> Node:
        """Return the node before a row's place; if that is gone, the row's replacement, or the last of its inputs."""
        for number in (row.previous, self.replacements.get(row.id)):
            found = [] if number is None else self.by_id.get(number, [])
            if found:
                return found[0]
        return max(nodes_in((args, kwargs)), default=sentinel(self.graph))

    def node_replaced(self, edit: edits.NodeReplaced) -> None:
        """Let users read the old node again."""
        old, new = self._node(edit.old, "a restored node"), self._node(edit.new, "its replacement")
        if old not in self.created:
            raise self.refuse(f"node `{old.name}`, which `{new.name}` has replaced, was not removed by this pass")
        for user in new.users:
            if user not in self.redirected:
                self.redirected.add(user)
                self.touched.update(dict.fromkeys(inputs_of(user)))
        if edit.places is None:
            self.rewiring.redirect(new, old)
        else:
            for number, numbers in edit.places:  # the new one had users of its own
                for user in self.by_id.get(number, []):
                    self.rewiring.flush(user)
                    if not set_places(user, numbers, new, old):
                        found = f"the arguments of node `{user.name}`, which read `{new.name}`, were changed since"
                        raise self.refuse(found)
        self.touched[old] = self.touched[new] = None
        old.meta.update(value_entries(new))

    def _module(self, name: str) -> nn.Module:
        try:
            return self.graph_module.get_submodule(name)
        except AttributeError:
            raise self.refuse(f"module `{name}` is gone") from None

    def module_added(self, edit: edits.ModuleAdded) -> None:
        """Delete the module."""
        module, name = self._module(edit.name), edit.name
        if any(type(tensor).__name__ == "DTensor" for tensor in module.parameters()):
            raise self.refuse(
                f"module `{name}`, which the pass made, is sharded over several processes now; undo before sharding, "
                "or load fxopt_checkpoints.distributed_state_dict of it into the original model"
            )
        problem = module_problem(module, (type(module),))
        if class_path(type(module)) != edit.cls or problem is not None:
            found = problem[1] if problem is not None else f"is {type_text(module)} now"
            raise self.refuse(f"module `{name}`, which the pass made, {found}")
        tensors = {**module._parameters, **module._buffers}
        self._check_unused(name, module, tensors)
        shapes = tuple((key, None if tensor is None else tuple(tensor.shape)) for key, tensor in tensors.items())
        if shapes != edit.shapes:
            raise self.refuse(f"the tensors of module `{name}` have other shapes now: {shapes}, made as {edit.shapes}")
        for key, tensor in tensors.items():
            if tensor is not None:
                self._release(f"{name}.{key}", tensor)
        parent_name, _, key = name.rpartition(".")
        self.tables.modules.of(self._module(parent_name)._modules).remove(key)

    def _release(self, name: str, tensor: Tensor) -> None:
        """Free the memory of a tensor that a rollback can join from the parts cut out of it."""
        parts = self.parts.pop(name, [])
        slices = sorted(piece.slices[0] for piece, _ in parts if len(piece.slices) == 1)
        # No pass puts two originals into one place, but an edited ledger may say so.
        for (dim, start, length), (other, following, _) in pairwise(slices):
            if dim == other and following < start + length:
                raise self.refuse(f"two originals would get the same values of `{name}`, from {following}")
        if sum(piece.take(tensor).numel() for piece, _ in parts) == tensor.numel():
            release(self.graph_module, tensor, partial(joined, tensor.shape, tensor.dtype, tensor.device, parts))

    def _check_unused(self, name: str, module: nn.Module, tensors: Mapping[str, Tensor | None]) -> None:
        """Refuse if something else calls or holds a module to be removed, or reads or holds one of its tensors."""
        using = self.targets.of("call_module", name)
        for target in (name, *(f"{name}.{key}" for key in tensors)):
            using += self.targets.of("get_attr", target)
        if using:
            raise self.refuse(f"module `{name}`, which the original does not have, is used by `{using[0].name}` now")
        for item in (module, *tensors.values()):
            if item is not None and self.uses[id(item)] > 1:
                raise self.refuse(f"module `{name}`, which the pass made, or a tensor of it has a second name now")

    def _current(self, row: edits.TensorRow) -> Tensor | None:
        """Return an original tensor with its current values, cut out of the new tensor."""
        if row.piece is None:
            return None
        owner, _, key = row.piece.key.rpartition(".")
        module = self._module(owner)
        parameter = module._parameters.get(key)
        tensor = module._buffers.get(key) if parameter is None else parameter
        if tensor is None:
            raise self.refuse(f"`{row.piece.key}`, which holds the values of `{row.name}`, is gone")
        try:
            values = copied(row.piece.take(tensor.detach()), row.strides)
        except (RuntimeError, IndexError) as error:
            if type(tensor) not in (Tensor, nn.Parameter):  # quantized, or distributed
                raise self.refuse(f"`{row.piece.key}` is {type_text(tensor)} now, which cannot be cut") from error
            raise self.refuse(f"`{row.piece.key}` has shape {tuple(tensor.shape)} now ({error})") from error
        if tuple(values.shape) != row.shape:
            raise self.refuse(f"`{row.piece.key}` holds {tuple(values.shape)} for `{row.name}`, which had {row.shape}")
        self.parts.setdefault(row.piece.key, []).append((row.piece, values))
        return nn.Parameter(values, requires_grad=tensor.requires_grad) if row.is_parameter else values

    def tensor_removed(self, edit: edits.TensorRemoved) -> None:
        """Restore the tensor."""
        row = edit.row
        owner_name, _, key = row.name.rpartition(".")
        owner = self._module(owner_name)
        if key in owner._parameters or key in owner._buffers or key in owner._modules:
            raise self.refuse(f"there is another `{row.name}` now")
        values: dict[str, Any] = owner._parameters if row.is_parameter else owner._buffers
        self._orders.of(values).insert_after(row.previous, key, self._current(row))
        if not row.persistent:
            owner._non_persistent_buffers_set.add(key)

    def module_removed(self, edit: edits.ModuleRemoved) -> None:
        """Build the module."""
        row = edit.row
        try:
            cls = import_class(row.cls)
        except (ImportError, AttributeError) as error:
            raise self.refuse(f"the class {row.cls} of module `{row.name}` cannot be found ({error})") from error
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise self.refuse(f"{row.cls}, recorded for module `{row.name}`, is not a class of modules")
        gone = {tensor.name for tensor in row.tensors if tensor.piece is None and tensor.dtype is not None}
        if gone and any(tensor.piece is not None for tensor in row.tensors):
            raise self.refuse(f"nothing says where the values of {', '.join(sorted(gone))} are now")
        module = module_of(row, cls, self._current)
        # An edited ledger may lack attributes, and the layer would fail only when it is called.
        missing = _missing(module) if cls.__module__.startswith("torch.nn.") else None
        if missing is not None:
            raise self.refuse(f"module `{row.name}` would be restored incomplete: {missing}")
        if row.twin is not None:
            module.training = self._module(row.twin).training
        parent_name, _, key = row.name.rpartition(".")
        parent = self._module(parent_name)
        if hasattr(parent, key):
            raise self.refuse(f"there is another `{row.name}` now")
        self.tables.modules.of(parent._modules).insert_after(row.previous, key, module)

    def neutral(self, edit: edits.Neutral) -> None:
        """Check that the region still holds its constant."""
        owner, _, key = edit.piece.key.rpartition(".")
        tensor = getattr(self._module(owner), key, None)
        if not isinstance(tensor, Tensor):
            raise self.refuse(f"`{edit.piece.key}` is gone")
        region = edit.piece.take(tensor.detach())
        # The region belongs to the parts, too: without it, they would not make up the whole tensor in `_release`.
        self.parts.setdefault(edit.piece.key, []).append((edit.piece, region.clone()))
        if not region.is_meta and not bool((region == edit.value).all()):
            raise self.refuse(
                f"`{edit.piece.key}` holds stand-in values, which the original does not have, and they are no "
                f"longer {edit.value}: they were trained or loaded"
            )


def _missing(module: nn.Module) -> str | None:
    """Return what a layer of torch lacks; None if nothing is missing."""
    declared = [item for cls in type(module).__mro__ for item in vars(cls).get("__annotations__", {}).items()]
    for name, kind in declared:
        if kind in (Tensor, "Tensor") and not hasattr(module, name):
            return f"it has no `{name}`"
    try:
        module.extra_repr()  # which reads other attributes
    except AttributeError as error:
        return str(error)
    return None


@cache
def _signature(cls: Any) -> inspect.Signature:
    return inspect.signature(cls.forward)


def _takes(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a layer of torch takes these arguments, with nodes for parameters annotated as tensors."""
    cls: Any = type(module)
    if not cls.__module__.startswith("torch.nn.") or "forward" in vars(module) or module._forward_pre_hooks:
        return True  # nobody knows
    try:
        given = _signature(cls).bind(module, *args, **kwargs).arguments
    except TypeError:
        return False
    tensors = [name for name, each in _signature(cls).parameters.items() if each.annotation in (Tensor, "Tensor")]
    return all(isinstance(given[name], Node) for name in tensors if name in given)


def copied(piece: Tensor, strides: tuple[int, ...] | None) -> Tensor:
    """Return a dense copy with its dimensions in the order of these strides, of which a file may name any.

    Without strides it is contiguous, unless the tensor has since changed its memory format.
    """
    if strides is not None:
        dense = torch.empty_like(torch.empty_strided(piece.shape, strides, device="meta"))
        return piece.new_empty_strided(piece.shape, dense.stride()).copy_(piece)
    keeps = piece.dim() > 2 and not piece.is_contiguous()
    return piece.clone(memory_format=torch.preserve_format if keeps else torch.contiguous_format)


def joined(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, parts: Iterable[tuple[edits.Piece, Tensor]]
) -> Tensor:
    """Return the tensor from which these parts were cut."""
    whole = torch.empty(shape, dtype=dtype, device=device)
    for piece, values in parts:
        piece.take(whole).copy_(values)
    return whole
