"""The topics of the suite measure what they say: models that compute the same, graphs of the size asked for."""

from __future__ import annotations

import gc
import importlib
import json
from pathlib import Path
from time import perf_counter, process_time
from types import ModuleType
from typing import Any

import pytest
import torch
from benchmarks.decoding import TINY, decoder
from benchmarks.merging import Decoder
from benchmarks.models import batch_norm_mlp, from_timm, small_convolutions
from benchmarks.peak_memory import measured
from benchmarks.peers import optimum
from benchmarks.runners import FOLDING, by_fxopt_channels_last, by_hand
from benchmarks.suite import Absent, Measured, Settings, Task, device_clock
from torch import Tensor, nn

from benchmarks import calls, folding, loading, memory, merging, passes
from fxopt_capture import capture
from fxopt_core import CaptureError, history, iter_nodes, registry

HAS_OPTIMUM = not isinstance(optimum(), Absent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merged_decoders_compute_what_the_separate_one_does(dtype: torch.dtype) -> None:
    of, x = Decoder(TINY, 3, dtype), torch.randn(3, 1, TINY.width, dtype=dtype)
    makers = [merging.merged, *([merging.merged_by_optimum] if HAS_OPTIMUM else [])]
    with torch.no_grad():
        expected = merging.separate(of)(x)
        for maker in makers:
            torch.testing.assert_close(maker(of)(x), expected, rtol=2e-2, atol=2e-2)
    sizes = [module.out_features for module in merging.merged(of).modules() if type(module) is nn.Linear]
    assert len(sizes) == 4 * TINY.layers
    assert {TINY.width + 2 * TINY.groups * TINY.width // TINY.heads, 2 * TINY.inner} < set(sizes)


def test_decoding_is_measured_with_separate_products_twice() -> None:
    found = merging.decoding(TINY, 2, torch.float32, "cpu", merging.eager, Settings(rounds=3))
    assert not isinstance(found, Absent)
    assert set(found) == {"separate", "itself", "fxopt", *(["optimum"] if HAS_OPTIMUM else [])}
    assert all(len(seconds) == 3 for seconds in found.values())
    seconds, merged, ratio, theirs, itself = merging.cells(found)
    assert all(isinstance(cell, Measured) for cell in (seconds, merged, ratio, itself))
    assert isinstance(theirs, Measured) == HAS_OPTIMUM


def test_a_mode_that_fails_is_a_row_that_says_so() -> None:
    def failing(graph_module: torch.fx.GraphModule, x: Tensor) -> Task:
        raise RuntimeError("no such device")

    found = merging.decoding(TINY, 1, torch.float32, "cpu", failing, Settings(rounds=3))
    assert merging.cells(found) == (Absent("RuntimeError: no such device"),) * 5


def test_decoders_run_in_every_mode_of_a_gpu() -> None:
    assert list(merging.modes_of("cuda", 32)) == ["eager", "torch.compile", "CUDA graph"]
    assert list(merging.modes_of("cpu", 32)) == ["eager"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_recorded_decoder_gives_what_the_eager_one_does() -> None:
    x = torch.randn(2, 1, TINY.width, device="cuda")
    graph_module = merging.merged(Decoder(TINY, 2, device="cuda"))
    merging.recorded(graph_module, x)()
    torch.cuda.synchronize()


@pytest.mark.parametrize("subject", [small_convolutions, lambda: batch_norm_mlp(8, 2)], ids=["convolutions", "mlp"])
def test_every_way_to_fold_computes_what_the_model_does(subject: Any) -> None:
    model, x = subject()
    with torch.no_grad():
        expected = model(x)
    for name, runner in FOLDING.items():
        if name != "optimum" or HAS_OPTIMUM:
            assert folding.relative_error(expected, runner(model, x)) < 1e-5, name


def test_folding_by_hand_leaves_no_norm_and_the_model_alone() -> None:
    model, x = small_convolutions()
    task: Any = by_hand(model, x)
    (folded,) = (cell.cell_contents for cell in task.__closure__ if isinstance(cell.cell_contents, nn.Module))
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    assert sum(isinstance(module, nn.BatchNorm2d) for module in model.modules()) == 3


def test_channels_last_computes_the_same() -> None:
    model, x = small_convolutions()
    with torch.no_grad():
        assert folding.relative_error(model(x), by_fxopt_channels_last(model, x)) < 1e-5


def test_a_peer_that_fails_is_a_row_and_not_the_end() -> None:
    def failing(model: nn.Module, x: Tensor) -> Task:
        raise ValueError("not this model")

    runners = {"eager": FOLDING["eager"], "peer": failing}
    table = folding.compared("title", small_convolutions(), runners, Settings(rounds=3))
    assert [row.label for row in table.rows] == ["eager", "peer"]
    assert table.rows[1].cells == (Absent("ValueError: not this model"),) * 3


def test_a_model_that_is_missing_is_a_row() -> None:
    table = folding.compared("title", Absent("not installed"), FOLDING, Settings(rounds=3))
    assert table.rows[0].cells == (Absent("not installed"),) * 3


def test_models_of_timm_fold_by_hand(timm: ModuleType) -> None:
    found = from_timm("mobilenetv2_050")
    assert not isinstance(found, Absent)
    model, x = found[0], torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        assert folding.relative_error(model(x), by_hand(model, x)) < 1e-3


@pytest.mark.parametrize("name", passes.PASSES)
def test_drawn_graphs_have_the_sites_that_they_say(name: str) -> None:
    """Many in a graph of each form, and one where one is asked for."""
    for case in passes.drawn_cases(name, quick=True):
        graph_module = case.make()
        assert len(graph_module.graph.nodes) >= int(case.label.split()[0])
        (record,) = history(registry().create(name)(graph_module))
        alone = "one site" in case.label or ("hub" in case.label and name == "merge-linears")
        assert len(record.rewrites) == 1 if alone else len(record.rewrites) >= 5


def test_a_pass_is_measured_beside_its_checks_and_optimum() -> None:
    case = passes.drawn_cases("merge-linears", quick=True)[0]
    row = passes.row_of(case, Settings(rounds=1))
    sites, *times = row.cells
    assert sites == 6
    assert all(isinstance(cell, Measured) for cell in times[:4])
    assert all(isinstance(cell, Measured if HAS_OPTIMUM else Absent) for cell in times[4:])


def test_a_decoder_is_owned_by_its_graph_module_alone() -> None:
    gc.collect()
    graph_module = memory.owned("bfloat16", 0.003)
    gc.collect()
    weights = [graph_module.get_parameter(name) for name, _ in graph_module.named_parameters()]
    owners = [module for module in gc.get_objects() if type(module) is nn.Linear and module.weight is weights[-1]]
    assert len(owners) == 1
    assert all(weight.dtype is torch.bfloat16 for weight in weights)


@pytest.mark.parametrize("way", memory.WAYS)
def test_merging_is_measured_with_the_size_of_the_model(way: str) -> None:
    if way == "optimum" and not HAS_OPTIMUM:
        pytest.skip("optimum is not installed")
    peak = measured(memory.work_of, [way, "float32", 0.003])
    assert memory.size_of(peak) == pytest.approx(0.003e9, rel=0.3)


@pytest.mark.parametrize("way", loading.WAYS)
def test_every_way_to_load_ends_with_a_merged_model_that_has_weights(way: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    loading.write(str(tmp_path), "float32", 2, small=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    graph_module = loading.WAYS[way](tmp_path, lambda: None)
    assert len([record for record in history(graph_module) if record.rewrites]) == 1
    assert all(not parameter.is_meta for parameter in graph_module.parameters())


def test_a_way_to_load_tells_its_seconds_and_the_size(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    loading.write(str(tmp_path), "bfloat16", 1, small=True)
    told = json.loads(loading.way_from("streamed", str(tmp_path))())
    assert told["loading"] > 0
    assert told["size"] == sum(2 * parameter.numel() for parameter in small_llama().parameters())


def small_llama() -> nn.Module:
    """The model that a small checkpoint is of."""
    transformers: Any = importlib.import_module("transformers")
    sizes = {**loading._SMALL, "vocab_size": 50, "num_hidden_layers": 1}
    model: nn.Module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return model


def test_a_busy_machine_is_measured_by_processor_seconds_of_one_thread() -> None:
    busy = Settings(threads=2, busy=True)
    assert busy.clock("cpu") is process_time
    assert busy.clock("cuda") is device_clock
    assert Settings().clock("cpu") is perf_counter
    assert "CPU time of one thread" in busy.note
    assert Settings().note == "2 threads."


def test_tiny_decoders_are_the_same_each_time() -> None:
    one, other = decoder(TINY, 1).state_dict(), decoder(TINY, 1).state_dict()
    assert all(torch.equal(one[key], other[key]) for key in one)


def test_calls_that_compute_nothing() -> None:
    """Graph modules check what they did, and live models give results that are there."""
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval(), torch.ones(2, 4)
    empty = calls.hollow(capture(model, (x,)))
    assert empty(x) is x
    assert [node.op for node in iter_nodes(empty.graph)] == ["placeholder", "call_module", "output"]
    with pytest.raises(CaptureError, match="size 5"):
        empty(torch.ones(3, 5))
    live = calls.Live()
    with torch.no_grad():
        for fxopt in (False, True):
            torch.testing.assert_close(live.task(model, {"input": x}, fxopt=fxopt)(), model(x))
        assert live.alone() is live.alone()
    assert (live.weights, live.inputs) == (2, 3)
