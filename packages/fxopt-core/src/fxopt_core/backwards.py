"""The recorded operations of a pass, backwards.

Original tensors are cut out of the ones that the module has now, so that training, `load_state_dict` and changes of
dtype or device in between are kept. Whatever does not fit any more is an `UndoError`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxopt_core.dead_code import left_out
from fxopt_core.errors import UndoError
from fxopt_core.graph import TargetNodes, identities, iter_nodes
from fxopt_core.key_order import KeyOrders
from fxopt_core.known_classes import class_path
from fxopt_core.ledger import (
    Listed,
    ModuleAdded,
    ModuleRemoved,
    ModuleRow,
    Neutral,
    NodeAdded,
    NodeRemoved,
    NodeReplaced,
    NodeRow,
    Operation,
    Piece,
    Record,
    Ref,
    TensorRemoved,
    TensorRow,
    UsersOrdered,
    ledger_of,
)
from fxopt_core.marks import NodeTag, nodes_by_id, set_tag, tag_of
from fxopt_core.module_state import module_problem
from fxopt_core.recalling import import_class, recall, recall_meta
from fxopt_core.rewiring import Rewiring, set_places
from fxopt_core.runs import release
from fxopt_core.tensor_pieces import copied, joined
from fxopt_core.values import describe_attributes, value_entries


def undo_error(record: Record, found: str, remedy: str) -> UndoError:
    """Return the error that says why a record cannot be undone, and what to do."""
    return UndoError(
        f"cannot undo `{record.pass_name}`: {found}. Nothing was changed; {remedy}", pass_name=record.pass_name
    )


class Backwards:
    """The operations of one record, backwards, on one graph module."""

    def __init__(self, graph_module: GraphModule, record: Record) -> None:
        self.graph_module, self.graph = graph_module, graph_module.graph
        self.by_id = nodes_by_id(self.graph)
        self.record = self._as_read_now(record)
        self.reread = self.record is not record
        self.names = {node.name for node in iter_nodes(self.graph)}
        self.counts: dict[str, int] = dict(self.graph._graph_namespace._base_count)
        self.targets = TargetNodes(self.graph)
        self.uses = Counter(identities(graph_module))
        self.left_out = left_out(record.operations or (), lambda number: bool(self.by_id.get(number)))
        self.stands_for = {op.old: op.new for op in record.operations or () if isinstance(op, NodeReplaced)}
        self._orders = KeyOrders()
        self.parts: dict[str, list[tuple[Piece, Tensor]]] = {}  # what was cut out of each new tensor
        self.touched: dict[Node, None] = {}
        self.attributes: list[Node] = []
        self.changed: set[Node] = set()
        self.ranks: dict[int, dict[int, int]] = {}
        self.rewiring = Rewiring()

    def run(self) -> None:
        """Take everything back.

        Raises:
            UndoError: Something does not fit any more; the graph module is half undone then.
        """
        self._rebuild_containers()
        for operation in reversed(self.record.operations or ()):
            self._step(operation)
        self.graph._graph_namespace._base_count.clear()
        self.graph._graph_namespace._base_count.update(self.counts)
        self._orders.apply()
        self.rewiring.flush()
        self._order_users()
        describe_attributes(self.graph_module, self.attributes)

    def _as_read_now(self, record: Record) -> Record:
        """Return the record with the nodes that its own read now, where later passes have replaced some of these."""
        records = ledger_of(self.graph_module).records
        place = next((place for place, each in enumerate(records) if each is record), len(records))
        later = [op for each in records[place + 1 :] if each.state == "applied" for op in each.operations or ()]
        if not later:
            return record
        from fxopt_core.renumbering import as_read_now  # few need it

        return replace(
            record, operations=as_read_now(record.operations or (), later, lambda n: bool(self.by_id.get(n)))
        )

    def _step(self, operation: Operation) -> None:
        if isinstance(operation, NodeAdded):
            self._erase(operation.row)
            self._count_from(operation.counted)
        elif isinstance(operation, NodeRemoved):
            self._create(operation.row)
        elif isinstance(operation, NodeReplaced):
            self._point_back(operation)
        elif isinstance(operation, UsersOrdered):
            self.ranks[operation.node] = {number: rank for rank, number in enumerate(operation.users)}
        elif isinstance(operation, ModuleAdded):
            self._delete_module(operation)
        elif isinstance(operation, ModuleRemoved):
            self._rebuild_module(operation.row)
        elif isinstance(operation, TensorRemoved):
            self._rebuild_tensor(operation.row)
        else:
            self._check_neutral(operation)

    def _count_from(self, counted: tuple[str, int | None] | None) -> None:
        """Let torch count from where it did before, so that applying the pass again makes the same names."""
        if counted is not None:
            base, number = counted
            self.counts.pop(base, None)
            self.counts.update({} if number is None else {base: number})

    def _order_users(self) -> None:
        """Bring users into the order of the graph, or that which they had; no value may be read before it is there."""
        position = {node: place for place, node in enumerate(iter_nodes(self.graph))}
        for node in self.touched:
            if node not in position:
                continue
            users = sorted(node.users, key=position.__getitem__)
            if users and position[users[0]] < position[node]:
                raise self.refuse(f"node `{users[0].name}` would read `{node.name}` before it is computed")
            ranks = self.ranks.get(_number(node), {})
            if all(_number(user) in ranks for user in users):  # else others have changed them since
                users.sort(key=lambda user: ranks[_number(user)])
            node.users.clear()
            node.users.update(dict.fromkeys(users))

    def refuse(self, found: str) -> UndoError:
        """Return the error that says what does not fit."""
        return undo_error(self.record, found, "undo what was done since first, or keep the rewritten graph module")

    def _node(self, number: int, what: str) -> Node:
        found = self.by_id.get(number, [])
        if len(found) != 1:
            raise self.refuse(
                f"the graph has {len(found)} nodes for {what}, expected exactly one, so it was changed since"
            )
        return found[0]

    def _row_node(self, row: NodeRow) -> Node:
        """Return the node of a row; of several with its number, the one with its name."""
        found = [node for node in self.by_id.get(row.id, []) if node.name == row.name] or self.by_id.get(row.id, [])
        if len(found) != 1:
            raise self.refuse(f"node `{row.name}`, which the pass made, was taken out or replaced since")
        return found[0]

    def _erase(self, row: NodeRow) -> None:
        if row.id in self.left_out.new:
            self.graph._graph_namespace._used_names -= {row.name} - self.names
            return
        node = self._row_node(row)
        self.rewiring.flush(node)

        def refer(item: Node) -> Any:
            number = tag_of(item).id
            return item if number is None else Ref(number)

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
        self.targets.discard(node)
        self.names.discard(node.name)
        self.graph._graph_namespace._used_names -= {node.name, row.name} - self.names  # so that it may come again
        self.by_id[row.id].remove(node)

    def _create(self, row: NodeRow) -> None:
        if row.id in self.left_out.old:
            return
        if row.name in self.names:
            raise self.refuse(f"another node is called `{row.name}` now, the name of a node that is to come back")
        target, args, kwargs = self._recall(row, lambda ref: self._node(ref.id, f"an input of `{row.name}`"))
        self.graph._graph_namespace._used_names.discard(row.name)  # the name is free: no node has it
        with self.graph.inserting_after(self._place(row, args, kwargs)):
            node = self.graph.create_node(row.op, target, args, dict(kwargs), row.name)
        node.type = self._recall(row, lambda ref: ref, row.type_expr)
        node.meta = recall_meta(row.meta)
        set_tag(node, row.tag or NodeTag(row.id, name=row.name))
        self.names.add(node.name)
        self.targets.add(node)
        self.by_id.setdefault(row.id, []).append(node)
        self.touched.update(dict.fromkeys(node.all_input_nodes))
        self.touched[node] = None
        if row.op == "get_attr":
            self.attributes.append(node)

    def _recall(self, row: NodeRow, node_of: Callable[[Ref], Any], *values: Any) -> Any:
        """Return values of a row with nodes for their numbers: target, arguments and keyword arguments, or others."""
        try:
            return recall(values[0] if values else (row.target, row.args, row.kwargs), node_of)
        except (ImportError, AttributeError) as error:
            raise self.refuse(f"node `{row.name}` calls or takes what cannot be found here ({error})") from error

    def _place(self, row: NodeRow, args: Any, kwargs: Any) -> Node:
        """Return the node behind which a node stood, or a place as good where that one is gone."""
        inputs: list[Node] = []
        if self.reread:
            map_arg((args, kwargs), inputs.append)
        for number in (self.left_out.previous(row.previous), self.stands_for.get(row.id)):
            found = [] if number is None else self.by_id.get(number, [])
            if found and not any(found[0] < value for value in inputs):  # a replacement may stand elsewhere
                return found[0]
        map_arg((args, kwargs), inputs.append)
        return max(inputs, default=self.graph._root)

    def _point_back(self, operation: NodeReplaced) -> None:
        if operation.new in self.left_out.new:
            return
        old, new = self._node(operation.old, "a restored node"), self._node(operation.new, "its replacement")
        for user in new.users:
            self._touch_inputs(user)
        if operation.places is None:
            self.rewiring.redirect(new, old)
        else:
            self._set_places(old, new, operation.places)
        self.touched[old] = self.touched[new] = None
        old.meta.update(value_entries(new))

    def _touch_inputs(self, user: Node) -> None:
        if user not in self.changed:
            self.changed.add(user)
            self.touched.update(dict.fromkeys(user._input_nodes))

    def _set_places(self, old: Node, new: Node, places: Iterable[tuple[int, tuple[int, ...]]]) -> None:
        """Let what read a node before it was replaced by one with users of its own, and that alone, read it again."""
        for number, numbers in places:
            for user in self.by_id.get(number, []):
                self.rewiring.flush(user)
                if not set_places(user, numbers, new, old):
                    raise self.refuse(
                        f"the arguments of node `{user.name}`, which read `{new.name}`, were changed since"
                    )

    def _module(self, name: str) -> nn.Module:
        try:
            return self.graph_module.get_submodule(name)
        except AttributeError:
            raise self.refuse(f"module `{name}` is gone") from None

    def _delete_module(self, operation: ModuleAdded) -> None:
        module, name = self._module(operation.name), operation.name
        problem = module_problem(module, (type(module),))
        if class_path(type(module)) != operation.cls or problem is not None:
            found = problem[1] if problem is not None else f"is a {type(module).__name__} now"
            raise self.refuse(f"module `{name}`, which the pass made, {found}")
        tensors = {**module._parameters, **module._buffers}
        self._check_unused(name, module, tensors)
        shapes = tuple((key, None if tensor is None else tuple(tensor.shape)) for key, tensor in tensors.items())
        if shapes != operation.shapes:
            raise self.refuse(
                f"the tensors of module `{name}` have other shapes now: {shapes}, made as {operation.shapes}"
            )
        for key, tensor in tensors.items():
            if tensor is not None:
                self._release(f"{name}.{key}", tensor)
        parent, _, key = name.rpartition(".")
        self._orders.of(self._module(parent)._modules).remove(key)

    def _release(self, name: str, tensor: Tensor) -> None:
        """Release a tensor where a rollback can join it from what was cut out of it."""
        parts = self.parts.pop(name, [])
        if sum(piece.take(tensor).numel() for piece, _ in parts) == tensor.numel():
            rebuild = partial(joined, tensor.shape, tensor.dtype, tensor.device, parts)
            release(self.graph_module, tensor, rebuild)

    def _check_unused(self, name: str, module: nn.Module, tensors: Mapping[str, Tensor | None]) -> None:
        """Refuse where something else calls or holds a module that is to go, or reads or holds one of its tensors."""
        using = self.targets.of("call_module", name)
        for target in (name, *(f"{name}.{key}" for key in tensors)):
            using += self.targets.of("get_attr", target)
        if using:
            raise self.refuse(f"module `{name}`, which the original does not have, is used by `{using[0].name}` now")
        for item in (module, *tensors.values()):
            if item is not None and self.uses[id(item)] > 1:
                raise self.refuse(f"module `{name}`, which the pass made, or a tensor of it has a second name now")

    def _current(self, row: TensorRow) -> Tensor | None:
        """Return the values of an original tensor as they are now, cut out of the new one."""
        if row.piece is None:
            return None
        owner, _, key = row.piece.key.rpartition(".")
        module = self._module(owner)
        parameter = module._parameters.get(key)
        tensor = module._buffers.get(key) if parameter is None else parameter
        if tensor is None:
            raise self.refuse(f"`{row.piece.key}`, which holds the values of `{row.name}`, is gone")
        try:
            piece = row.piece.take(tensor.detach())
            values = copied(piece, row.strides)
        except (RuntimeError, IndexError) as error:
            if (kind := type(tensor)) not in (Tensor, nn.Parameter):  # quantized, or distributed
                raise self.refuse(f"`{row.piece.key}` is a {kind.__name__} now, which cannot be cut") from error
            raise self.refuse(f"`{row.piece.key}` has shape {tuple(tensor.shape)} now ({error})") from error
        if tuple(values.shape) != row.shape:
            raise self.refuse(f"`{row.piece.key}` holds {tuple(values.shape)} for `{row.name}`, which had {row.shape}")
        self.parts.setdefault(row.piece.key, []).append((row.piece, values))
        made = nn.Parameter(values, requires_grad=tensor.requires_grad) if row.is_parameter else values
        vars(made).update(row.attributes)
        return made

    def _rebuild_containers(self) -> None:
        """Make containers again that torch dropped from a copy because they were empty, each behind the one before."""
        removed = [op for op in self.record.operations or () if isinstance(op, TensorRemoved)]
        owners = {op.owner.name: op.owner for op in removed if op.owner is not None}
        parts = {name: name.rpartition(".") for name in owners}
        missing = {
            name: row for name, row in owners.items() if not hasattr(self._module(parts[name][0]), parts[name][2])
        }
        for name in [*missing]:
            chain = []
            while name in missing:
                chain.append(missing.pop(name))
                parent, _, _ = name.rpartition(".")
                name = f"{parent}.{chain[-1].previous}" if parent else str(chain[-1].previous)
            for row in reversed(chain):
                self._rebuild_module(row)

    def _rebuild_tensor(self, row: TensorRow) -> None:
        owner_name, _, key = row.name.rpartition(".")
        owner = self._module(owner_name)
        if key in owner._parameters or key in owner._buffers or key in owner._modules:
            raise self.refuse(f"there is another `{row.name}` now")
        values: dict[str, Any] = owner._parameters if row.is_parameter else owner._buffers
        self._orders.of(values).insert_after(row.previous, key, self._current(row))
        if not row.persistent:
            owner._non_persistent_buffers_set.add(key)

    def _rebuild_module(self, row: ModuleRow) -> None:
        try:
            cls = import_class(row.cls)
        except (ImportError, AttributeError) as error:
            raise self.refuse(f"the class {row.cls} of module `{row.name}` cannot be found ({error})") from error
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise self.refuse(f"{row.cls}, recorded for module `{row.name}`, is no class of modules")
        module: nn.Module = cls.__new__(cls)
        nn.Module.__init__(module)
        vars(module).update((k, list(v.items) if isinstance(v, Listed) else v) for k, v in row.attributes)
        for tensor in row.tensors:
            key = tensor.name.rpartition(".")[2]
            values: dict[str, Any] = module._parameters if tensor.is_parameter else module._buffers
            values[key] = self._current(tensor)
            if not tensor.persistent:
                module._non_persistent_buffers_set.add(key)
        if row.twin is not None:
            module.training = self._module(row.twin).training
        parent_name, _, key = row.name.rpartition(".")
        parent = self._module(parent_name)
        if hasattr(parent, key):
            raise self.refuse(f"there is another `{row.name}` now")
        self._orders.of(parent._modules).insert_after(row.previous, key, module)

    def _check_neutral(self, operation: Neutral) -> None:
        owner, _, key = operation.piece.key.rpartition(".")
        tensor = getattr(self._module(owner), key, None)
        if not isinstance(tensor, Tensor):
            raise self.refuse(f"`{operation.piece.key}` is gone")
        region = operation.piece.take(tensor.detach())
        self.parts.setdefault(operation.piece.key, []).append((operation.piece, region.clone()))
        if not region.is_meta and not bool((region == operation.value).all()):
            raise self.refuse(
                f"`{operation.piece.key}` holds stand-in values, which the original does not have, and they are no "
                f"longer {operation.value}: they were trained or loaded"
            )


def _number(node: Node) -> int:
    number = tag_of(node).id
    return -1 if number is None else number
