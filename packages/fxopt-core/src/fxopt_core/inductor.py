"""A transformation as a custom pass of inductor; importing this module imports inductor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph, GraphModule, Node

from fxopt_core.compose import Composition, check_is_transformation
from fxopt_core.errors import PostconditionError, PreconditionError
from fxopt_core.execution import in_transaction, run_pass
from fxopt_core.graph import iter_nodes
from fxopt_core.ledger import Record
from fxopt_core.marks import META_KEY
from fxopt_core.observing import lint_and_recompile
from fxopt_core.runs import Run
from fxopt_core.transformation import Transformation

_IN_PLACE = "inductor expects its own graph to be edited in place"


class InductorPass(CustomGraphPass):
    """A transformation as inductor's `CustomGraphPass`; made by `as_inductor_pass`.

    Attributes:
        transformation: what it runs.
        records: what each run did and refused, the oldest first. Graphs of inductor keep no ledger and no marks: they
            would enter the key of inductor's cache, and nobody undoes anything in them.
    """

    def __init__(self, transformation: Transformation) -> None:
        check_is_transformation(transformation, "the argument of as_inductor_pass")
        if isinstance(transformation, Composition) and not transformation.inplace:
            raise PreconditionError(f"{transformation!r} works on a copy, and {_IN_PLACE}: leave inplace=False away")
        self.transformation = transformation
        self.records: list[Record] = []

    def __call__(self, graph: Graph) -> None:
        """Run the transformation on a graph of inductor, as the transaction that it is.

        Raises:
            PreconditionError: The graph belongs to no graph module.
            PostconditionError: The result is another graph module, or calls modules where the graph called none.
            PassError: The transformation failed; the graph is as it was.
        """
        owner = graph.owning_module
        if not isinstance(owner, GraphModule) or owner.graph is not graph:
            raise PreconditionError(
                f"pass `{self.transformation.name}` is given a graph that belongs to no graph module, expected one of "
                "inductor's: call the transformation itself with a graph module",
                pass_name=self.transformation.name,
            )
        with _values_lent(graph):
            in_transaction(self.transformation, owner, False, self._run)

    def _run(self, run: Run) -> GraphModule:
        owner, called = run.graph_module, _calls_modules(run.graph_module.graph)
        traces = {node: node.meta.get(META_KEY) for node in iter_nodes(owner.graph)}
        ledger = owner.meta.get(META_KEY)
        result = run_pass(run, self.transformation, owner, reverse=False)
        self._check(result, owner, called)
        lint_and_recompile(owner, self.transformation)
        _put_back(owner.meta, ledger)
        for node in iter_nodes(owner.graph):
            _put_back(node.meta, traces.get(node))
        self.records += run.records
        return owner

    def _check(self, result: GraphModule, owner: GraphModule, called_modules: bool) -> None:
        if result is not owner:
            raise PostconditionError(
                f"pass `{self.transformation.name}` returned another graph module, and {_IN_PLACE}: leave away what "
                "copies (deep-copy, inplace=False)"
            )
        module = None if called_modules else next(iter(owner.graph.find_nodes(op="call_module")), None)
        if module is not None:
            raise PostconditionError(
                f"pass `{self.transformation.name}` left node `{module.name}`, which calls module {module.target}; "
                "inductor's graphs call functions alone. Run this pass before torch.compile"
            )

    def uuid(self) -> str | None:
        """Return a key of class, options, code and version for inductor's cache; None, which turns that cache off,
        for a pass whose options have no stable value.
        """
        try:
            return self.transformation.uuid()
        except TypeError:
            return None

    def __repr__(self) -> str:
        """Return the call that makes an equal one."""
        return f"as_inductor_pass({self.transformation!r})"


def _calls_modules(graph: Graph) -> bool:
    return bool(graph.find_nodes(op="call_module"))


def _put_back(meta: dict[str, object], value: object) -> None:
    if value is None:
        meta.pop(META_KEY, None)
    else:
        meta[META_KEY] = value


@contextmanager
def _values_lent(graph: Graph) -> Iterator[None]:
    """Let passes read, in ``val``, the example values that dynamo leaves; what they make gets one in turn."""
    lent: set[Node] = set()
    for node in iter_nodes(graph):
        if "example_value" in node.meta and "val" not in node.meta:
            node.meta["val"] = node.meta["example_value"]
            lent.add(node)
    before = set(iter_nodes(graph)) if lent else set()
    try:
        yield
    finally:
        for node in iter_nodes(graph) if lent else ():
            if node in lent or node not in before:
                value = node.meta.pop("val", None)
                if node not in lent and value is not None:
                    node.meta.setdefault("example_value", value)
