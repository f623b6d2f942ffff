"""The options of ``torch.compile(model, backend="fxopt", options=...)``, and the default pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch

from fxopt_core import FxoptError, PassOptionError, Transformation, registry

_EXPECTED = 'expected "pipeline" (text), "then" ("eager" or "inductor") and "verify" (a bool)'


@dataclass(frozen=True)
class Settings:
    """The options of one ``torch.compile``.

    Attributes:
        pipeline: text or name of the passes; None for the default.
        then: what runs the rewritten graphs: eager torch, or inductor.
        verify: whether each rewritten graph is compared with dynamo's own on its first inputs.
    """

    pipeline: str | None = None
    then: Literal["eager", "inductor"] = "eager"
    verify: bool = False

    @classmethod
    def read(cls, options: Mapping[str, object] | None) -> Settings:
        """Return the settings that a dictionary of options holds.

        Raises:
            PassOptionError: There is no such option, or it does not take this value.

        >>> Settings.read({"pipeline": "merge-linears"})
        Settings(pipeline='merge-linears', then='eager', verify=False)
        """
        taken: dict[str, Any] = {"pipeline": str | None, "then": str, "verify": bool}
        for name, value in (options or {}).items():
            wrong = name not in taken or not isinstance(value, taken[name])
            if wrong or (name == "then" and value not in ("eager", "inductor")):
                raise PassOptionError(f'backend "fxopt" takes no option {name!r} of {value!r}; {_EXPECTED}')
        return cls(**cast("dict[str, Any]", options or {}))

    def passes(self, tensors: Iterable[torch.Tensor]) -> tuple[str, Transformation]:
        """Return the pipeline for a graph with these tensors, as text and to be called.

        Raises:
            PassOptionError: The pipeline cannot be read, or a name in it is unknown.
        """
        text = self.pipeline
        if text is None:
            on_cpu = all(each.device.type == "cpu" for each in tensors)
            text = "cpu-inference" if on_cpu and "cpu-inference" in registry().pipelines() else "inference"
        try:
            return text, registry().pipeline(text)
        except FxoptError as error:
            raise PassOptionError(f'option "pipeline" of backend "fxopt" is {text!r}: {error}') from error
