"""Several graphs of one model: which is made, which is taken, what they share, and how they travel."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt import CaptureError, GuardedGraphs, Inputs, PreconditionError, optimize

AUTO = torch.export.Dim.AUTO
SHORT, LONG, MASK = torch.randn(2, 8, 64), torch.randn(3, 20, 64), torch.ones(3, 20)


class Branching(nn.Module):
    """Takes another way for texts longer than 16, and for masks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.first(x)
        if x.shape[1] > 16:
            x = self.second(x).relu()
        return x if mask is None else x * mask[..., None]


def seeded() -> Branching:
    torch.manual_seed(0)
    return Branching().eval()


@pytest.fixture
def model() -> Branching:
    return seeded()


@pytest.fixture(scope="module")
def optimized() -> GuardedGraphs:
    shapes = {"x": {0: AUTO, 1: AUTO}, "mask": {0: AUTO, 1: AUTO}}
    also: list[Any] = [(LONG,), {"x": LONG, "mask": MASK}, SHORT[:, :5], Inputs(LONG, mask=MASK)]
    return optimize(seeded(), (SHORT,), also=also, dynamic_shapes=shapes)


@pytest.fixture
def fast(optimized: GuardedGraphs) -> GuardedGraphs:
    """A copy for each test."""
    return copy.deepcopy(optimized)


def numbers(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def check(fast: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for call in ((SHORT,), (LONG,), (LONG, MASK), (LONG[:1, :17],), (SHORT[:, :3],)):
            for _ in range(3):
                torch.testing.assert_close(fast(*call), model(*call))


def test_each_way_is_a_graph_and_what_is_covered_makes_none(fast: GuardedGraphs, model: Branching) -> None:
    assert len(fast.graphs) == 3
    check(fast, model)


def test_the_error_has_the_reason_of_each_graph(fast: GuardedGraphs) -> None:
    with pytest.raises(CaptureError, match=r"none of the 3 graphs.*`also`.*0: .*without `mask`.*1: .*2: .*>= 17 only"):
        fast(SHORT, MASK)


def test_a_layer_of_several_graphs_is_one_module(fast: GuardedGraphs) -> None:
    name = "first" if fxopt.isa() is None else "first_panels"
    assert len({id(graph.get_submodule(name)) for graph in fast.graphs}) == 1
    assert numbers(fast) == numbers(Branching())


@pytest.mark.parametrize("way", [copy.deepcopy, lambda fast: pickle.loads(pickle.dumps(fast))])
def test_copies_and_pickles_keep_the_graphs_and_what_they_share(
    way: Callable[[Any], Any], fast: GuardedGraphs, model: Branching
) -> None:
    copied = way(fast)
    check(copied, model)
    assert numbers(copied) == numbers(fast)
    other = optimize(Branching().eval(), (SHORT,), also=[(LONG,), (LONG, MASK)])
    other.load_state_dict(fast.state_dict())
    torch.testing.assert_close(other(LONG), model(LONG))


def test_each_graph_has_its_history_and_is_undone_by_itself(fast: GuardedGraphs, model: Branching) -> None:
    with pytest.raises(PreconditionError, match="with also=, in `graphs`"):
        fxopt.undo(fast)  # type: ignore[arg-type]
    fast(SHORT)
    graph: Any
    for graph in fast.graphs:
        assert fxopt.history(graph)
        fxopt.undo(graph)
        assert graph.state_dict().keys() == model.state_dict().keys()
        check(fast, model)


def test_archives_hold_one_graph_each_and_share_again(fast: GuardedGraphs, model: Branching) -> None:
    files = [io.BytesIO() for _ in fast.graphs]
    graph: Any
    for graph, file in zip(fast.graphs, files, strict=True):
        fxopt.save(graph, file)
    loaded = GuardedGraphs(fxopt.load(io.BytesIO(file.getvalue())) for file in files)
    check(loaded, model)
    for layer in {name for graph in fast.graphs for name, _ in graph.named_children()} - {"_guards_fn", "second"}:
        found = [graph.get_submodule(layer) for graph in loaded.graphs if hasattr(graph, layer)]
        assert len(set(found)) == 1


def test_new_weights_reach_all_graphs(fast: GuardedGraphs, model: Branching) -> None:
    check(fast, model)
    changed = copy.deepcopy(model)
    nn.init.constant_(changed.first.weight, 0.1)
    graph: Any
    for graph in fast.graphs:
        fxopt.load_original_state_dict(graph, changed.state_dict())
    check(fast, changed)


class Training(nn.Module):
    """Drops elements of long texts alone."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x, training=self.training) if x.shape[1] > 16 else x.to(torch.float64)


def test_modes_and_dtypes_change_for_all_graphs_or_for_none(fast: GuardedGraphs, model: Branching) -> None:
    assert fast.double()(LONG.double()).dtype is torch.float64
    with pytest.raises(CaptureError, match="in evaluation mode"):
        optimize(nn.Sequential(Training(), nn.Dropout()).eval(), (SHORT,), also=[(LONG,)]).train()


def test_a_graph_that_writes_is_not_left_midway() -> None:
    class Noting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor, count: Tensor) -> Tensor:
            self.get_buffer("calls").add_(1)
            number: Any = count.item()
            torch._check(number >= 0)  # type: ignore[no-untyped-call]  # of torch
            return x + torch.ones(number).sum()

    x = torch.arange(6.0)
    fast = GuardedGraphs(fxopt.capture(Noting().eval(), (x, torch.tensor(size))) for size in (2, 3))
    assert fast(x, torch.tensor(4)).tolist() == (x + 4).tolist()
    with pytest.raises(CaptureError, match="not valid for the values"):
        fast(x, torch.tensor(-9))
    assert fast.get_buffer("graphs.1.calls") == 0


def test_calibration_gives_each_graph_its_calls(model: Branching) -> None:
    calls = [(torch.randn(70, 8, 64),), (torch.randn(30, 20, 64),), (LONG,)]
    static = fxopt.FuseLinears(weights="int8", activations="static", min_weights=1)
    fast = optimize(
        model, (SHORT,), also=[(LONG,)], pipeline=static, calibrate=lambda model: [model(*call) for call in calls]
    )
    assert sum(hasattr(module, "rounding") for module in fast.modules()) == 3
    with torch.no_grad():
        assert (fast(LONG) - model(LONG)).abs().max() < 0.1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_outputs_of_each_way_keep_their_dtypes(dtype: torch.dtype) -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Any:
            y = self.linear(x)
            return (y, x.argmax(-1)) if x.shape[1] > 16 else y

    both = Both().to(dtype).eval()
    fast = optimize(both, (SHORT.to(dtype),), also=[(LONG.to(dtype),)])
    with torch.no_grad():
        assert [each.dtype for each in fast(LONG.to(dtype))] == [dtype, torch.int64]
        assert fast(SHORT.to(dtype)).dtype is dtype


def test_what_has_one_way_takes_no_further_examples(model: Branching) -> None:
    graph_module: Any = fxopt.capture(model, SHORT)
    with pytest.raises(PreconditionError, match="holds one path"):
        optimize(graph_module, (SHORT,), also=[(LONG,)])
    with pytest.raises(PreconditionError, match="given nothing"):
        GuardedGraphs([])
    with pytest.raises(PreconditionError, match="is a list"):
        optimize(model, (SHORT,), also=[[LONG]])  # type: ignore[list-item]
    with pytest.raises(PreconditionError, match="expected graph modules that capture made"):
        GuardedGraphs([model])


def test_a_misspelt_dynamic_shape_is_refused(model: Branching) -> None:
    with pytest.raises(CaptureError, match="names 'masks'"):
        optimize(model, (SHORT,), also=[(LONG, MASK)], dynamic_shapes={"x": {0: AUTO}, "masks": {0: AUTO}})


def test_a_model_of_transformers_goes_its_ways() -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
    bird = transformers.BigBirdModel(
        transformers.BigBirdConfig(vocab_size=50, block_size=2, num_random_blocks=1, **sizes)
    ).eval()
    examples = [
        {"input_ids": torch.randint(50, (2, size)), "attention_mask": torch.ones(2, size, dtype=torch.int64)}
        for size in (16, 6)
    ]
    fixed: Any = {}  # other sizes are not the point, and take three times as long
    fast: Any = optimize(bird, kwargs=examples[0], also=examples[1:], dynamic_shapes=fixed)
    assert len(fast.graphs) == 2
    assert (fast.config.hidden_size, fast.main_input_name, fast.device.type) == (32, "input_ids", "cpu")
    for example in examples:  # the model itself stays with full attention once it had a short text
        with torch.no_grad():
            torch.testing.assert_close(fast(**example)[0], bird(**example)[0])


def test_the_images_of_qwen_go_by_their_grids() -> None:
    qwen = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "out_hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "depth": 2}
    config = qwen.Qwen2_5_VLVisionConfig(**sizes, fullatt_block_indexes=[1], window_size=56)
    vision = qwen.Qwen2_5_VisionTransformerPretrainedModel(config).eval()
    width = 3 * config.temporal_patch_size * config.patch_size**2
    grids = [torch.tensor([[1, 4, 4]]), torch.tensor([[1, 8, 4], [1, 4, 4]])]
    examples: list[Any] = [(torch.randn(int(grid.prod(-1).sum()), width), grid) for grid in grids]
    fast: Any = optimize(vision, examples[0], also=examples[1:])
    for patches, grid in examples:
        with torch.no_grad():
            torch.testing.assert_close(fast(patches, grid)[0], vision(patches, grid)[0])
    with pytest.raises(CaptureError, match=r"`grid_thw` holds \[1, 2, 8\], where the graph was captured with"):
        fast(examples[0][0], torch.tensor([[1, 2, 8]]))


def test_it_compiles(fast: GuardedGraphs, model: Branching) -> None:
    compiled: Any = torch.compile(fast, backend="eager")
    check(compiled, model)
