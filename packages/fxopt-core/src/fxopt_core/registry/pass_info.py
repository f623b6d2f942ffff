"""`PassInfo`: the registry's description of a pass."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fxopt_core.errors import PassOptionError
from fxopt_core.naming import close_names, option_text
from fxopt_core.passes.options import OptionInfo
from fxopt_core.passes.transformation import Transformation


@dataclass(frozen=True)
class PassInfo:
    """The description of a pass that a plugin offers.

    Attributes:
        name: its name in kebab-case.
        summary: the first line of its docstring, with single backquotes.
        family: the entry-point name of the plugin that offers it.
        distribution: the distribution of that plugin; empty for one that was registered by hand.
        version: the version of that distribution.
        reversible: whether it can be undone.
        preserves_computation: whether its result computes what the input did.
        options: its options by parameter name, with types and defaults.
        transformation: its class.
    """

    name: str
    summary: str
    family: str
    distribution: str
    version: str
    reversible: bool
    preserves_computation: bool
    options: Mapping[str, OptionInfo] = field(hash=False)
    transformation: type[Transformation]

    def option(self, name: str) -> OptionInfo:
        """Return the option of this name, in snake_case or kebab-case.

        Raises:
            PassOptionError: the pass has no such option.
        """
        known = {option_text(parameter): option for parameter, option in self.options.items()}
        if option_text(name) not in known:
            has = f"it has {', '.join(known) or 'none'}{close_names(name, known)}"
            raise PassOptionError(f"pass {self.name!r} has no option {name!r}; {has}")
        return known[option_text(name)]

    def create(self, options: Mapping[str, object]) -> Transformation:
        """Return a pass with these options, named in snake_case or kebab-case.

        Raises:
            PassOptionError: the pass has no such option, or does not accept the value.
        """
        given = [(self.option(name), value) for name, value in options.items()]
        checked = {option.name: option.checked(value, pass_name=self.name) for option, value in given}
        try:
            return self.transformation(**checked)
        except Exception as error:
            raise PassOptionError(f"pass {self.name!r} refused its options: {type(error).__name__}: {error}") from error
