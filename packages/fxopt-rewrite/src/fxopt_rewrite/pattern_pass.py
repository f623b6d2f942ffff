"""`PatternPass`: a pass that is written as a pattern and its replacement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.fx import Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from fxopt_core import Refusal
from fxopt_rewrite.calls.records import TensorRef
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.journal.editor import Editor
from fxopt_rewrite.legality import replacement_refusal
from fxopt_rewrite.patterns import Match, Pattern
from fxopt_rewrite.shapes.facts import is_python_number, tensor_facts
from fxopt_rewrite.site_pass import ReversibleSitePass


class PatternPass(ReversibleSitePass[Match]):
    """A pass that replaces calls that match `pattern` by the calls of `replacement`; undo restores them.

    Both are functions of torch calls with the same parameters, as `Pattern` reads them. The replacement is called with
    a stand-in for each value of the graph, with tensors of the model and numbers as they are, and has to compute a new
    tensor.

    Refused: intermediate values with other readers, in-place writes between the calls, and dtypes other than `dtypes`
    in the graph's description, which is that of an example after `infer_shapes`.
    `check` may refuse more.

    >>> from fxopt_rewrite import infer_shapes
    >>> class FuseHypotenuse(PatternPass):
    ...     def pattern(self, x, y):
    ...         return torch.sqrt(x * x + y * y)
    ...     def replacement(self, x, y):
    ...         return torch.hypot(x, y)
    >>> graph = infer_shapes(torch.fx.symbolic_trace(lambda x, y: (y.square() + x**2).sqrt()), *torch.ones(2, 3))
    >>> print(FuseHypotenuse()(graph, expect=1).code.strip())
    def forward(self, x, y):
        hypot = torch.hypot(y, x);  y = x = None
        return hypot
    """

    #: The dtypes that values may have; empty for any, as long as all floating-point values have the same one.
    dtypes: ClassVar[Sequence[torch.dtype]] = (torch.float32, torch.float64)
    reasons: ClassVar[Mapping[str, str]] = {
        "unsupported-dtype": "The layer has a dtype that the operators do not take. Convert it: `model.float()`.",
    }

    def pattern(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the value that the pass looks for."""
        raise NotImplementedError

    def replacement(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the same value in the new way."""
        raise NotImplementedError

    def patterns(self) -> Iterable[Pattern]:
        """Return the patterns, each with its replacement; the first that matches a node counts."""
        return (Pattern(self.pattern, self.replacement),)

    def accepts(self, match: Match, index: GraphIndex) -> bool:
        """Return whether a match counts, by conditions that a pattern cannot express; others are skipped silently."""
        return True

    def match(self, index: GraphIndex) -> Iterator[Match | Refusal]:
        """Yield the matches, the largest where several overlap."""
        patterns, found, taken = [*self.patterns()], list[Match](), set[Node]()
        read: dict[Node, Any] = {}
        # From the end, where a large match ends after the smaller ones within it.
        for node in (each for each in reversed(index.nodes) if each not in taken):
            matches = (match for pattern in patterns for match in pattern.matches(index, node, read))
            accepted = [match for match in matches if self.accepts(match, index) and not is_python_number(node)]
            whole = next((match for match in accepted if match.other_reader() is None), None)
            if whole is not None:
                taken.update(whole.nodes)
            found += accepted[:1] if whole is None else [whole]
        yield from (each for each in reversed(found) if each.other_reader() is None or taken.isdisjoint(each.nodes))

    def check(self, site: Match, index: GraphIndex) -> Refusal | None:
        """Refuse intermediate values with other readers, in-place writes, and other dtypes."""
        for reason, message in self._obstacles(site, index):
            return index.refuse(site.label, reason, message, *site.nodes)
        if not index.effects.aliases(site.root):
            return None
        return replacement_refusal(site.label, site.root, index, *site.inputs)  # the replacement is a new tensor

    def _obstacles(self, site: Match, index: GraphIndex) -> Iterator[tuple[str, str]]:
        if (other := site.other_reader()) is not None:
            yield "several-users", f"`{other[0].name}`, a part of `{site.label}`, is read by `{other[1].name}`, too"
        # Tensors that a called module holds: no node reads them, so they are not among the inputs.
        called = [each.tensor for each in site.values.values() if isinstance(each, TensorRef) and each.node is None]
        written = [value for value in site.inputs if index.effects.written_between(value, site.nodes[0], site.root)]
        if written or any(map(index.effects.tensor_written, called)):
            name = written[0].name if written else site.label
            yield "mutated", f"`{name}` is written in place, or a mode changes, before node `{site.label}`"
        if not self.dtypes and len(site.nodes) == 1:
            return
        floats: dict[torch.dtype, Node] = {}
        for node in (*site.inputs, *(each for each in site.nodes if each.users)):  # checks have no users
            described = index.tensor_of(node) if node.op == "get_attr" else tensor_facts(node)
            if described is None:
                yield "shape-unknown", f"the dtype of `{node.name}` is unknown; call infer_shapes first"
            elif self.dtypes and described.dtype not in self.dtypes:
                expected = ", or ".join(map(str, self.dtypes))
                yield "unsupported-dtype", f"`{node.name}` is {described.dtype}; expected {expected}"
            elif described.dtype.is_floating_point:
                floats.setdefault(described.dtype, node)
        if len(floats) > 1:
            (one, first), (other_dtype, second), *_ = floats.items()
            yield "dtype-mismatch", f"`{first.name}` is {one}, and `{second.name}` {other_dtype}; expected one dtype"

    def rewrite(self, site: Match, edit: Editor) -> None:
        """Insert the calls of the replacement, and remove those of the match."""
        assert site.pattern.replacement is not None
        # The inputs are collected before the edits: an erased node has none.
        inserting, inputs = _Inserting(site, edit), [*site.inputs]
        result = site.pattern.replacement(*map(inserting.stand_in, site.values.values()))
        if not inserting.made or getattr(result, "node", None) is not inserting.made[-1]:
            raise ValueError(f"the replacement of `{self.name}` has to return the tensor that its last call computes")
        *inner, last = inserting.made
        for node in inner:
            edit.undescribed(node)
        edit.replace(site.root, last)
        for node in inserting.place["like"][1:]:
            edit.erase(node)
            edit.drop_unused(node)
        edit.drop_unused(site.root)
        while inputs:  # views and reads of tensors that nothing uses any more
            effect = edit.index.effects.effect(node := inputs.pop())
            reads = node.op == "get_attr" or (effect.aliases and not effect.writes and not effect.opaque)
            if reads and not node.users and not edit.is_stale([node]):
                inputs += node.all_input_nodes
                edit.erase(node)


class _Inserting(GraphAppendingTracer):
    """Inserts the calls of a replacement in place of a match."""

    def __init__(self, site: Match, edit: Editor) -> None:
        super().__init__(edit.graph)
        others = [node for node in reversed(site.nodes) if node is not site.root]
        self.place: dict[str, Any] = {"before": site.root, "like": [site.root, *others]}
        self.made: list[Node] = []
        self._edit = edit
        self._tensors = {id(each.tensor): each for each in site.values.values() if isinstance(each, TensorRef)}

    def stand_in(self, value: Any) -> Any:
        """Return the argument of a replacement for a value: a proxy for a node, else the tensor or number itself."""
        if isinstance(value, Node):
            return Proxy(self._edit.current(value), self)
        return value.tensor if isinstance(value, TensorRef) else value

    def create_node(self, kind: str, target: Any, args: Any, kwargs: Any, *_: Any, **__: Any) -> Node:
        """Insert a call."""
        insert = self._edit.call_method if kind == "call_method" else self._edit.call_function
        self.made.append(insert(target, *args, **self.place, **kwargs))
        return self.made[-1]

    def create_arg(self, a: Any) -> Any:
        """Return an argument as graphs hold it."""
        if isinstance(a, Tensor):
            if id(a) not in self._tensors:
                raise ValueError("a replacement may pass tensors of the model on, but not compute new ones from them")
            ref = self._tensors[id(a)]
            return ref.node or self._edit.undescribed(self._edit.get_attr(ref.name, **self.place))
        return super().create_arg(tuple(a) if isinstance(a, torch.Size) else a)
