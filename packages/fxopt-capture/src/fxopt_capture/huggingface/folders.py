"""A captured Hugging Face model as a folder: its configuration, and an archive in place of weights.

``config.json`` is that of the model except for a few keys. ``model_type`` is `MODEL_TYPE`, which transformers knows if
fxopt is installed, and `KEY` has the model's own type and the name of the archive.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from torch.fx import GraphModule

from fxopt_capture.archive.files import save
from fxopt_capture.huggingface.clients import NOTE, dtype_of, note_to_write, offer
from fxopt_core.errors import CaptureError

ARCHIVE = "model.fxopt"
KEY = "fxopt"
#: transformers quotes an unknown type in its error, so the message says what to install.
MODEL_TYPE = "fxopt (pip install fxopt)"


def save_pretrained(graph_module: GraphModule, folder: str | Path, *, push_to_hub: bool = False, **_: object) -> None:
    """Save a captured Hugging Face model like ``save_pretrained``; options other than these concern weights.

    Raises:
        CaptureError: The folder cannot be written, or the graph module cannot be saved.
    """
    if push_to_hub:
        raise CaptureError("push_to_hub=True uploads weights, which this folder does not have: save it, and upload it")
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        write_config(graph_module, folder)
    except (OSError, ValueError) as error:
        raise CaptureError(f"the folder {str(folder)!r} cannot be written: {error}") from error
    save(graph_module, Path(folder, ARCHIVE))


def write_config(graph_module: GraphModule, folder: str | Path) -> None:
    """Write the ``config.json`` that lies beside the archive of a captured Hugging Face model."""
    config = note_to_write(graph_module.meta[NOTE])["config"]
    dtype = str(dtype_of(graph_module)).removeprefix("torch.")
    own = {"model_type": config["model_type"], "archive": ARCHIVE, "dtype": dtype}
    changed = {"architectures": [type(graph_module).__name__], "model_type": MODEL_TYPE, "dtype": dtype, KEY: own}
    text = json.dumps(config | changed, indent=2, sort_keys=True)
    Path(folder, "config.json").write_text(text + "\n", encoding="utf-8")


offer("save_pretrained", lambda graph_module: partial(save_pretrained, graph_module))
