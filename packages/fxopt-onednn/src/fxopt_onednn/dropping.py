"""Taking modules out that nothing calls any more."""

from __future__ import annotations

from fxopt_core import Editor


def drop_unused(edit: Editor, module_name: str) -> None:
    """Take a module without tensors out, unless something calls it still, or knows it under another name."""
    module = edit.index.modules.get(module_name)
    if module is None or len(edit.index.module_names(module)) > 1:
        return
    try:
        edit.drop_module(module_name, {})
    except ValueError:  # called elsewhere: one ReLU of a block often serves twice
        return
