"""Find out whether a graph is right if a dynamic dimension is 0 or 1.

``torch.export`` assumes dynamic sizes of at least 2, so a model's branch on a batch of one leaves no guard in the usual
export. An export that allows small sizes has the guard, at the price of refusing sizes at which both branches compute
the same (``q_length > 1`` in attention masks). So if such a guard refuses a size, model and graph are run at this size,
on values of the example, and the graph keeps a guard only if they differ or if either fails. At 0 they are run in any
case: a branch on 0 leaves no guard in either export.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxopt_capture.call.arguments import CallForm
from fxopt_capture.call.guards import InputGuards
from fxopt_capture.exporting.compare import difference
from fxopt_capture.exporting.conditions import dynamic_sizes
from fxopt_capture.exporting.inequalities import dependence
from fxopt_capture.weightless import is_weightless

_SMALL = (1, 0)
_MOST_TRIED = 2048  # sounds have hundreds of thousands of samples, of which convolutions leave one for some hundred

Place = tuple[int, int]  # input, dimension
Sizes = Mapping[Place, int]


@dataclass(frozen=True)
class Question:
    """Whether the graph is right where these dimensions of the inputs have these sizes."""

    sizes: Sizes

    def applied(self, leaves: Sequence[object]) -> list[object]:
        """Return the inputs, narrowed to the sizes asked about."""
        result = list(leaves)
        for (index, dim), size in self.sizes.items():
            tensor = result[index]
            if isinstance(tensor, torch.Tensor):
                result[index] = tensor.narrow(dim, 0, size)
        return result

    def refusal(self, unless: Question | None = None) -> list[str]:
        """Return the conditions that refuse exactly these sizes, except together with the further sizes of `unless`.

        >>> alone, both = Question({(1, 0): 0}), Question({(0, 0): 0, (1, 0): 0})
        >>> [*alone.refusal(), *alone.refusal(both)]
        ['i[1].size()[0] != 0', 'not (i[1].size()[0] == 0 and i[0].size()[0] != 0)']
        """
        here = [f"i[{index}].size()[{dim}] == {size}" for (index, dim), size in self.sizes.items()]
        more = {} if unless is None else unless.sizes
        others = [f"i[{place[0]}].size()[{place[1]}] != {more[place]}" for place in more if place not in self.sizes]
        if not others and len(here) == 1:
            return [here[0].replace("==", "!=")]
        return [f"not ({' and '.join([*here, *rest])})" for rest in ([[each] for each in others] or [[]])]


def _groups(values: Sequence[object], guards: InputGuards, example: Sequence[object] | None) -> list[dict[Place, int]]:
    """Group the dynamic dimensions whose sizes differ by a constant, by the guards or in one dimension of `example`.

    Returns for each group how much larger each of its sizes is than the smallest.
    """
    groups: dict[Place, dict[Place, int]] = {}
    by_symbol: dict[object, Place] = {}
    by_size: dict[Place, Place] = {}
    for index, dim, expression in dynamic_sizes(values):
        groups[index, dim] = {(index, dim): 0}
        _join(groups, (index, dim), by_symbol.setdefault(expression, (index, dim)))
        tensor = example[index] if example is not None else None
        if isinstance(tensor, torch.Tensor):
            _join(groups, (index, dim), by_size.setdefault((dim, tensor.size(dim)), (index, dim)))
    for condition in guards.conditions:
        if (found := dependence(condition)) is not None:
            _join(groups, *found)
    distinct = {id(group): group for group in groups.values()}.values()
    return [{place: above - min(group.values()) for place, above in group.items()} for group in distinct]


def _join(groups: dict[Place, dict[Place, int]], place: Place, other: Place, more: int = 0) -> None:
    """Join two groups: the size at `place` is larger by `more` than the size at `other`."""
    if place in groups and other in groups and groups[place] is not groups[other]:
        moved, group = groups[place], groups[other]
        shift = group[other] + more - moved[place]
        for each, above in moved.items():
            group[each] = above + shift
            groups[each] = group


def open_questions(
    values: Sequence[object], guards: InputGuards, leaves: Sequence[object], *, alike: bool = False
) -> list[Question]:
    """Return the small sizes that `guards` accept.

    Asked about is each group of dependent dynamic sizes with its smallest at 1 and 0, then all groups at 1 together.
    With `alike`, sizes that are equal in the example are only asked about together.
    """
    groups = _groups(values, guards, leaves if alike else None)
    asked = [{place: size + more for place, more in group.items()} for group in groups for size in _SMALL]
    if len(groups) > 1:
        asked.append({place: 1 + more for group in groups for place, more in group.items()})
    return [question for question in map(Question, asked) if guards.accepts(question.applied(leaves))]


def sizes_against(
    condition: str, values: Sequence[object], guards: InputGuards, leaves: Sequence[Any]
) -> Question | None:
    """Return sizes, those of the example or smaller ones, that `guards` accept and a condition does not, or None."""
    test = InputGuards(guards.specs, [condition], guards.mode)
    groups = _groups(values, guards, None)
    together = {place: above for group in groups for place, above in group.items()}
    for group in (*groups, *_groups(values, guards, leaves), together) if groups else ():
        smallest = min(int(leaves[index].shape[dim]) - above for (index, dim), above in group.items())
        for size in (smallest, *range(min(smallest, _MOST_TRIED))):
            question = Question({place: size + above for place, above in group.items()})
            narrowed = question.applied(leaves)
            if not test.accepts(narrowed) and guards.accepts(narrowed):
                return question
    return None


def refuted(
    asked: Sequence[Question],
    model: nn.Module,
    form: CallForm,
    graph_module: nn.Module,
    inputs: Mapping[str, object],
    known: Mapping[str, torch.Tensor],
) -> list[Question]:
    """Return the questions at which model and graph differ, or cannot be compared; values that are `known` stay."""
    if is_weightless(model):
        return list(asked)
    leaves, spec = pytree.tree_flatten(dict(inputs))
    staying = [*map(id, known.values())]
    wrong = []
    for question in asked:
        narrowed = question.applied(leaves)
        # In another order, positions run backwards and masks mask elsewhere.
        flipped = [
            leaf.detach().flip(list(range(1, leaf.dim())))
            if isinstance(leaf, torch.Tensor) and id(leaf) not in staying
            else leaf
            for leaf in narrowed
        ]
        plain = pytree.tree_unflatten(narrowed, spec)
        if not is_equal(model, form, graph_module, plain):
            wrong.append(question)
        elif not all(map(_same, narrowed, flipped)):
            other = pytree.tree_unflatten(flipped, spec)
            # The model may not take flipped values at all, which says nothing about the graph.
            if not is_equal(model, form, graph_module, other, lenient=True):
                wrong.append(question)
    return wrong


def _same(left: object, right: object) -> bool:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        return torch.equal(left, right)
    return left is right


def is_equal(
    model: nn.Module, form: CallForm, graph_module: nn.Module, inputs: Mapping[str, object], *, lenient: bool = False
) -> bool:
    """Return whether model and graph give the same; if one of them raises, return ``lenient``."""
    try:
        return difference(model, form, graph_module, inputs) is None
    except Exception:
        return lenient
