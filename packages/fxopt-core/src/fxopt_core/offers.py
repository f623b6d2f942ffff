"""What several plugins offer together: which names are clear, and which of them more than one plugin claims."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from fxopt_core.errors import DuplicatePassError, PluginLoadError, UnknownPassError
from fxopt_core.naming import close_names
from fxopt_core.plugins import PassInfo, PluginOffer, PluginSource

ALLOW_LIST = "FXOPT_PLUGINS"
"""Environment variable: entry-point names to load, separated by commas. Unset: all; empty: none."""

_OFFERED_BY = {
    "change-true-div-to-mul-by-inverse": "fxopt-arith",
    "convert-to-channels-last": "fxopt-onednn",
    "cpu-inference": "fxopt-onednn",
    "fuse-batch-norm-in-conv-transpose": "fxopt-norm",
    "fuse-batch-norm1d-in-conv1d": "fxopt-norm",
    "fuse-batch-norm1d-in-linear": "fxopt-norm",
    "fuse-batch-norm2d-in-conv2d": "fxopt-norm",
    "fuse-batch-norm3d-in-conv3d": "fxopt-norm",
    "fuse-bias-in-linear": "fxopt-linear",
    "fuse-regions": "fxopt-onednn",
    "merge-linears": "fxopt-linear",
    "pack-convolutions": "fxopt-onednn",
    "pack-linears": "fxopt-onednn",
    "remove-identities": "fxopt-onednn",
}


class Offers:
    """What plugins offer at one time, the names that several of them claim set aside; never changed."""

    def __init__(
        self,
        offers: tuple[PluginOffer, ...],
        broken: Mapping[str, PluginLoadError],
        clashes: Mapping[str, tuple[PluginSource, ...]],
        left_out: tuple[str, ...],
        missing: tuple[str, ...] = (),
    ) -> None:
        self.offers = offers
        self.broken = broken  # plugins that could not be read
        self.clashes = clashes  # plugin names that several distributions claim
        self.left_out = left_out  # plugins that the allow-list leaves out
        self.plugins = frozenset({*(offer.source.name for offer in offers), *broken, *clashes, *left_out})
        self.missing = tuple(name for name in missing if name not in self.plugins)  # on the allow-list, and no plugin's
        claims = _claims(offers)
        self.names = {name: claims[name][0].item for name in sorted(claims) if len(claims[name]) == 1}
        self._contested = {name: claimed for name, claimed in claims.items() if len(claimed) > 1}
        self.failed = MappingProxyType(self._failures())

    def lookup(self, name: str) -> PassInfo | str:
        """Return the pass of this name, or the text of the pipeline of this name, or raise."""
        found = self.names.get(name)
        if found is None:
            self.check_is_unique(name)
            raise UnknownPassError(self._unknown(name))
        return found

    def check_is_unique(self, name: str) -> None:
        """Raise if several plugins claim a name, or if it is the name of several plugins."""
        if name in self._contested:
            raise DuplicatePassError(_contest_text(name, self._contested[name]))
        if name in self.clashes and name not in self.names:
            raise DuplicatePassError(_clash_text(name, self.clashes[name]))

    def check_plugin_is_new(self, source: PluginSource) -> None:
        """Raise if a plugin of this name is there already, be it broken."""
        taken = [offer.source for offer in self.offers if offer.source.name == source.name]
        taken += self.clashes.get(source.name, ())
        if taken or source.name in self.broken:
            claimants = (*(taken or [PluginSource(source.name, "a distribution that failed to load")]), source)
            raise DuplicatePassError(_clash_text(source.name, claimants))

    def _failures(self) -> dict[str, PluginLoadError]:
        messages: defaultdict[str, list[str]] = defaultdict(list)
        for name, sources in self.clashes.items():
            messages[name].append(_clash_text(name, sources))
        for name, claims in self._contested.items():
            for plugin in dict.fromkeys(claim.source.name for claim in claims):
                messages[plugin].append(_contest_text(name, claims))
        failures = dict(self.broken)
        for plugin, lines in messages.items():
            failures[plugin] = PluginLoadError("; ".join(lines))
            failures[plugin].__cause__ = DuplicatePassError(lines[0])
        return dict(sorted(failures.items()))

    def _unknown(self, name: str) -> str:
        hints = [f"registered are: {', '.join(self.names) or 'none'}"]
        if name in _OFFERED_BY:
            hints.append(f"{name} comes with {_OFFERED_BY[name]}: pip install {_OFFERED_BY[name]}")
        if self.failed:
            hints.append(f"these plugins failed, see registry().failed: {', '.join(self.failed)}")
        if self.left_out:
            hints.append(f"{ALLOW_LIST} leaves out these plugins: {', '.join(self.left_out)}")
        if self.missing:
            hints.append(f"{ALLOW_LIST} names plugins that are not installed: {', '.join(self.missing)}")
        return f"no pass or pipeline is named {name!r}{close_names(name, self.names)}\n  " + "\n  ".join(hints)


@dataclass(frozen=True)
class _Claim:
    kind: str
    source: PluginSource
    item: PassInfo | str


def _claims(offers: Iterable[PluginOffer]) -> dict[str, list[_Claim]]:
    claims: defaultdict[str, list[_Claim]] = defaultdict(list)
    for offer in offers:
        for info in offer.passes:
            claims[info.name].append(_Claim("pass", offer.source, info))
        for name, text in offer.pipelines.items():
            claims[name].append(_Claim("pipeline", offer.source, text))
    return claims


def _contest_text(name: str, claims: Iterable[_Claim]) -> str:
    claimants = " and ".join(f"as a {claim.kind} by plugin {claim.source}" for claim in claims)
    return f"{name!r} is claimed {claimants}, so that nobody gets it; uninstall one, or leave it out of {ALLOW_LIST}"


def _clash_text(name: str, sources: Iterable[PluginSource]) -> str:
    claimants = " and ".join(map(str, sources))
    return f"several plugins are named {name!r}: {claimants}; uninstall one, or register it under another name"
