"""``dropout(x)`` in eval mode, and ``identity(x)`` -> ``x``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn
from torch.fx import Node

from fxopt_core import Editor, GraphIndex, Refusal, ReversibleSitePass
from fxopt_onednn.arguments import UNKNOWN, calls_plainly, operation_of, settings_of
from fxopt_onednn.dropping import drop_unused

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
    """A call that gives back what it is given.

    Attributes:
        node: the call.
        value: what it is given.
        module_name: full name of the module that is called, or "".
        training: whether it drops values, because it is in train mode.
    """

    node: Node
    value: Node
    module_name: str
    training: bool

    @property
    def label(self) -> str:
        """The name of the module, or else of the node."""
        return self.module_name or self.node.name

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The call."""
        return (self.node,)


class RemoveIdentities(ReversibleSitePass[IdentitySite]):
    """``dropout(x)`` in eval mode, and ``identity(x)`` -> ``x``.

    The graph is one for inference afterwards: ``train()`` switches no dropout on. Dropout in train mode is refused.

    Source:
        Dropout in eval mode is the identity: what it kept while training was scaled then.

    Cost:
        One call less for each site. No tensor is touched.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.Identity()).eval()
    >>> graph_module = RemoveIdentities()(torch.fx.symbolic_trace(model))
    >>> [name for name, _ in graph_module.named_children()]
    ['0']
    """

    def match(self, index: GraphIndex) -> Iterator[IdentitySite]:
        """Yield the calls of identities and dropouts."""
        for node in index.nodes:
            site = _read(index, node)
            if site is not None:
                yield site

    def check(self, site: IdentitySite, index: GraphIndex) -> Refusal | None:
        """Refuse dropout that drops."""
        if not site.training:
            return None
        message = f"dropout `{site.label}` is in train mode and drops values at node `{site.node.name}`"
        return index.refuse(site.label, "training", message, site.node)

    def rewrite(self, site: IdentitySite, edit: Editor) -> None:
        """Let the users read the value itself."""
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
