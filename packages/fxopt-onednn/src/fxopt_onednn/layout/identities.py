"""``identity(x)`` -> ``x``, and ``dropout(x)`` -> ``x`` in eval mode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_onednn.operators import UNKNOWN, calls_plainly, operation_of, settings_of
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.journal.editor import Editor
from fxopt_rewrite.site_pass import ReversibleSitePass

_DROPOUT_MODULES: tuple[type[nn.Module], ...] = (
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AlphaDropout,
    nn.FeatureAlphaDropout,
)
_MODULES = (nn.Identity, *_DROPOUT_MODULES)
_FUNCTIONS = (
    *("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    *("dropout_", "alpha_dropout_", "feature_alpha_dropout_", "feature_dropout", "feature_dropout_"),
)


@dataclass(frozen=True, eq=False)
class IdentitySite:
    """A call that returns its input.

    Attributes:
        node: the call.
        value: its input.
        module_name: full name of the called module, or "".
        training: whether it drops values because it is in train mode.
    """

    node: Node
    value: Node
    module_name: str
    training: bool

    @property
    def label(self) -> str:
        """The name of the module, or of the node."""
        return self.module_name or self.node.name

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The call."""
        return (self.node,)


class RemoveIdentities(ReversibleSitePass[IdentitySite]):
    """``identity(x)`` -> ``x``, and ``dropout(x)`` -> ``x`` in eval mode.

    Afterwards the graph is for inference only: ``train()`` turns no dropout on. Dropout in train mode is refused.

    Source:
        Dropout in eval mode is the identity: values that it kept in training were scaled then.

    Cost:
        One call fewer for each site. No tensor is touched.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Identity()).eval()
    >>> graph_module = RemoveIdentities()(torch.fx.symbolic_trace(model))
    >>> [name for name, _ in graph_module.named_children()]
    ['0']
    """

    def match(self, index: GraphIndex) -> Iterator[IdentitySite]:
        """Yield the calls of identities and dropouts."""
        yield from (site for site in (_read(index, node) for node in index.nodes) if site is not None)

    def check(self, site: IdentitySite, index: GraphIndex) -> Refusal | None:
        """Refuse dropout in train mode."""
        if not site.training:
            return None
        message = f"dropout `{site.label}` is in train mode and drops values at node `{site.node.name}`"
        return index.refuse(site.label, "training", message, site.node)

    def rewrite(self, site: IdentitySite, edit: Editor) -> None:
        """Let users read the input directly."""
        edit.replace(site.node, edit.current(site.value))
        if site.module_name:
            drop_unused(edit, site.module_name)


def _read(index: GraphIndex, node: Node) -> IdentitySite | None:
    value = node.args[0] if node.args else node.kwargs.get("input")
    if not isinstance(value, Node):
        return None
    module = index.module_of(node)
    if module is not None:
        if type(module) not in _MODULES or not calls_plainly(module, node, value):
            return None
        return IdentitySite(node, value, str(node.target), type(module) is not nn.Identity and module.training)
    return _read_function(node, value)


def _read_function(node: Node, value: Node) -> IdentitySite | None:
    if node.op != "call_function" or operation_of(node) not in _FUNCTIONS:
        return None
    by_default = not str(operation_of(node)).startswith(("alpha", "feature_alpha"))
    parameters = (("p", 0.5), ("training", by_default), ("inplace", False))
    settings = settings_of(node, value, parameters, renamed={"train": "training"})
    if settings is None or settings["training"] is UNKNOWN or settings["p"] is UNKNOWN:
        return None
    return IdentitySite(node, value, "", bool(settings["training"]))


def drop_unused(edit: Editor, module_name: str) -> None:
    """Drop a module without tensors, unless something still calls it or it has another name."""
    module = edit.index.modules.get(module_name)
    if module is not None and len(edit.index.module_names(module)) == 1:
        with suppress(ValueError):  # called elsewhere: blocks often call one ReLU twice
            edit.drop_module(module_name, {})
