"""Call a model by a forward that stands for its own, so that its hooks see the arguments that the caller gives."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn


def root_call(model: nn.Module) -> Callable[..., object]:
    """Return what calls the model's ``forward`` and hooks, and take the hooks off the model.

    ``torch.export`` calls the model with the inputs of the graph, by name. Hooks are to see the call as it was made, by
    position and with the arguments that are no inputs. (`preserved` gives the hooks back.)
    """
    return RootCall(model) if model._forward_pre_hooks or model._forward_hooks else model.forward


class RootCall:
    """A model's ``forward`` with the forward hooks of the model itself, which are taken off it.

    Args:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.forward: Callable[..., object] = model.forward
        self.before = [
            (hook, key in model._forward_pre_hooks_with_kwargs) for key, hook in model._forward_pre_hooks.items()
        ]
        self.after = [(hook, key in model._forward_hooks_with_kwargs) for key, hook in model._forward_hooks.items()]
        model._forward_pre_hooks.clear()
        model._forward_hooks.clear()

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call the hooks and the forward, as ``torch.nn.Module.__call__`` does."""
        for hook, with_kwargs in self.before:
            if with_kwargs:
                changed = hook(self.model, args, kwargs)
                args, kwargs = (args, kwargs) if changed is None else changed
            else:
                changed = hook(self.model, args)
                args = args if changed is None else changed if isinstance(changed, tuple) else (changed,)
        output = self.forward(*args, **kwargs)
        for hook, with_kwargs in self.after:
            changed = hook(self.model, args, kwargs, output) if with_kwargs else hook(self.model, args, output)
            output = output if changed is None else changed
        return output
