"""What comes after fxopt works on its results: torch.compile, ONNX, weight-only int8."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from cache_names import CACHE
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from fxopt_capture import capture
from fxopt_core import UndoError, faithful_copy, history, registry
from fxopt_linear import FuseBiasInLinear, MergeLinears

Inputs = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """A transformed graph module, the model it was made of, and inputs of any batch and length."""

    graph_module: GraphModule
    model: nn.Module
    inputs: Callable[[int, int], Inputs]
    dynamic: dict[str, Any]

    def copy(self) -> Case:
        """Return one that a test may change."""
        return replace(self, graph_module=faithful_copy(self.graph_module), model=copy.deepcopy(self.model))

    def agrees(self, found: object, batch: Inputs) -> None:
        """Compare results with the model's own."""
        with torch.no_grad():
            expected = self.model(**batch)
        assert type(found) is type(expected)
        for one, other in zip(tensors(found), tensors(expected), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def tensors(result: object) -> list[Tensor]:
    """Return the tensors in a result."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def tokens(batch: int, length: int) -> Inputs:
    """Input of a text model."""
    ids = torch.randint(0, 99, (batch, length), generator=torch.Generator().manual_seed(batch))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}


def bert() -> Case:
    """One layer, whose query, key and value are merged."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()
    graph_module = MergeLinears()(capture(model, kwargs=tokens(2, 10)), expect=1)
    return Case(graph_module, model, tokens, {name: {0: "batch", 1: "length"} for name in tokens(2, 10)})


class Convolutions(nn.Module):
    """Two convolutions with batch norm, and two linear layers on one value."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, bias=False), nn.BatchNorm2d(8)
        self.body, self.body_norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.scores, self.boxes = nn.Linear(8, 5), nn.Linear(8, 4)
        for norm in (self.norm, self.body_norm):
            nn.init.uniform_(norm.running_mean, -1, 1)  # type: ignore[arg-type]  # it has statistics
            nn.init.uniform_(norm.running_var, 0.5, 2)  # type: ignore[arg-type]  # it has statistics

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body_norm(self.body(self.norm(self.stem(images)).relu())).relu().mean((2, 3))
        return self.scores(x), self.boxes(x).sigmoid()


def images(batch: int, size: int) -> Inputs:
    """Input of a model of images, of one size: only their number is dynamic."""
    return {"images": torch.randn(batch, 3, 29, 29, generator=torch.Generator().manual_seed(batch))}


def convolutions() -> Case:
    """Folded and merged, by the pipeline that `optimize` runs."""
    torch.manual_seed(0)
    model = Convolutions().eval()
    graph_module = registry().pipeline("inference")(
        capture(model, kwargs=images(2, 9), dynamic_shapes={"images": {0: Dim.AUTO}})
    )
    return Case(graph_module, model, images, {"images": {0: "batch"}})


Make = Callable[[], Case]


@pytest.fixture(scope="module")
def made() -> Callable[[Make], Case]:
    """Each of the models, captured once."""
    return cache(lambda make: make())


@pytest.fixture(params=[bert, convolutions])
def case(request: pytest.FixtureRequest, made: Callable[[Make], Case]) -> Case:
    """One of them, for a test to change."""
    return made(request.param).copy()


on_bert = pytest.mark.parametrize("case", [bert], indirect=True)
on_convolutions = pytest.mark.parametrize("case", [convolutions], indirect=True)


@pytest.fixture
def compiler() -> Iterator[None]:
    """Forget what was compiled, before and after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("case", [pytest.param(bert, marks=pytest.mark.nightly), convolutions], indirect=True)
def test_one_graph_for_all_sizes_without_a_break(case: Case) -> None:
    """``fullgraph=True`` raises where compiling would have to leave the graph; a Llama is compiled below."""
    compiled = torch.compile(case.graph_module, fullgraph=True, dynamic=True, backend="aot_eager")
    for batch, length in ((2, 10), (3, 7), (5, 12)):
        inputs = case.inputs(batch, length)
        with torch.no_grad():
            case.agrees(compiled(**inputs), inputs)


@pytest.mark.usefixtures("compiler")
def test_a_step_of_decoding_compiles_with_its_cache() -> None:
    """The caller's own cache grows, as it does uncompiled."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2)).eval()

    def step(batch: int, before: int, length: int) -> Inputs:
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(**tokens(batch, before), **{CACHE: cache})
        mask = torch.ones(batch, before + length, dtype=torch.int64)
        return {"input_ids": tokens(batch, length)["input_ids"], "attention_mask": mask, CACHE: cache}

    graph_module = MergeLinears()(capture(model, kwargs=step(2, 5, 3)), expect=2)
    compiled = torch.compile(graph_module, fullgraph=True, dynamic=True, backend="eager")
    for sizes in ((2, 5, 3), (3, 7, 2)):
        inputs, same = step(*sizes), step(*sizes)
        with torch.no_grad():
            found, expected = compiled(**inputs), model(**same)
        assert found.past_key_values is inputs[CACHE]
        assert found.past_key_values.get_seq_length() == sizes[1] + sizes[2]
        for one, other in zip(tensors(found), tensors(expected), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("compiler")
@on_convolutions
def test_what_the_graph_refuses_stays_refused(case: Case) -> None:
    """A compiled graph module checks its inputs, as it does uncompiled."""
    compiled = torch.compile(case.graph_module, fullgraph=True, backend="eager")
    for call in (case.graph_module, compiled):
        with pytest.raises(Exception, match="input `images` has size 4 in dimension 1, where the graph was captured"):
            call(images=torch.randn(2, 4, 30, 29))


@pytest.fixture
def quiet_export() -> Iterator[None]:
    """Torch copies specifications in a way that it deprecates itself, and warns of axis names used twice."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*LeafSpec", category=FutureWarning)
        warnings.filterwarnings("ignore", message="# The axis name", category=UserWarning)
        yield


@pytest.mark.usefixtures("quiet_export")
@pytest.mark.parametrize("case", [bert, pytest.param(convolutions, marks=pytest.mark.nightly)], indirect=True)
def test_onnx_at_other_sizes(case: Case, tmp_path: Path) -> None:
    """The file computes the same in onnxruntime, with dynamic axes."""
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    path = tmp_path / "model.onnx"
    example = case.inputs(2, 10)
    program = torch.onnx.export(
        case.graph_module, (), kwargs=example, dynamo=True, dynamic_shapes=case.dynamic, verbose=False
    )
    assert program is not None
    program.save(path)
    session = runtime.InferenceSession(path)
    for batch, length in ((2, 10), (3, 7), (1, 4)):
        inputs = case.inputs(batch, length)
        found = session.run(None, {name: value.numpy() for name, value in inputs.items()})
        with torch.no_grad():
            expected = tensors(case.model(**inputs))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(torch.from_numpy(one), other, rtol=1e-3, atol=1e-4)


@pytest.fixture
def quantize() -> Callable[[nn.Module], None]:
    """Quantize the linear layers of a module to int8, in place."""
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    return lambda module: quantize_(module, Int8WeightOnlyConfig())


def signal_to_noise(found: Tensor, expected: Tensor) -> float:
    """Return 20 times the decimal logarithm of how much larger the result is than its error."""
    return float(20 * torch.log10(expected.norm() / (found - expected).norm()))


def test_int8_weights_of_merged_layers(case: Case, quantize: Callable[[nn.Module], None]) -> None:
    """Merged layers are ordinary ones, which torchao finds; each row has a scale of its own, as before the merge."""
    quantize(case.graph_module)
    merged = [module for name, module in case.graph_module.named_modules() if name.endswith("merged")]
    assert merged
    assert {type(module.weight).__name__ for module in merged} == {"Int8Tensor"}
    quantize(case.model)
    inputs = case.inputs(3, 7)
    with torch.no_grad():
        found, expected = case.graph_module(**inputs), case.model(**inputs)
    assert signal_to_noise(tensors(found)[0], tensors(expected)[0]) > 60


@on_bert
def test_passes_after_quantizing_refuse(case: Case, quantize: Callable[[nn.Module], None]) -> None:
    """Quantized weights are no plain parameters: nothing is merged, fused or undone, and nothing changes."""
    quantize(case.graph_module)
    code, inputs = case.graph_module.code, case.inputs(2, 10)
    with torch.no_grad():
        expected = case.graph_module(**inputs).last_hidden_state
    with pytest.raises(UndoError, match=r"merged`.* has a `weight` that is an Int8Tensor"):
        MergeLinears()(case.graph_module, reverse=True)
    FuseBiasInLinear()(case.graph_module, expect=0)
    assert {refusal.reason for refusal in history(case.graph_module)[-1].refusals} == {"not-a-parameter"}
    with torch.no_grad():
        assert torch.equal(case.graph_module(**inputs).last_hidden_state, expected)
    assert case.graph_module.code == code


@pytest.fixture(autouse=True)
def quiet_logs(caplog: pytest.LogCaptureFixture) -> None:
    """torchao says which of its kernels do not load on this machine."""
    caplog.set_level(logging.ERROR)
