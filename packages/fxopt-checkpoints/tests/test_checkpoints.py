from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import checkpoint_passes
import pytest
import torch
from checkpoint_passes import CallsJoin, Fold, Join, Model, Rename, model, traced
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_checkpoints.load import load_original_state_dict, original_state_dict
from fxopt_checkpoints.trace import key_map
from fxopt_core import NotReversibleError, compose, undo
from fxopt_core.errors import CheckpointError, FxoptError

PASSES: dict[str, Callable[[], Any]] = {
    "nothing": lambda: compose(),
    "join": lambda: Join(),
    "fold": lambda: Fold(),
    "join, fold": lambda: compose(Join(), Fold()),
    "fold, join": lambda: compose(Fold(), Join(sort=True)),
}
every_order = pytest.mark.parametrize("order", list(PASSES))


def rewritten(order: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> GraphModule:
    result: GraphModule = PASSES[order]()(traced(model(seed).to(dtype)))
    return result


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        assert value.dtype == other[key].dtype, key
        assert torch.equal(value, other[key]), key


def values(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


@every_order
def test_loading_is_loading_into_the_original_and_rewriting_then(order: str) -> None:
    graph_module = rewritten(order)
    result = load_original_state_dict(graph_module, model(1).state_dict())
    assert result.missing_keys == [] and result.unexpected_keys == []
    assert_equal(graph_module.state_dict(), rewritten(order, 1).state_dict())


@every_order
def test_saving_gives_the_original_keys_in_order(order: str) -> None:
    graph_module, original = rewritten(order), traced(model())
    saved = original_state_dict(graph_module)
    assert list(saved) == list(original.state_dict())
    if "fold" not in order:
        assert_equal(saved, original.state_dict())
    assert saved["one.weight"].data_ptr() == saved["two.weight"].data_ptr()
    x = torch.randn(5, 4)
    again = Model().eval()
    assert str(again.load_state_dict(saved)) == "<All keys matched successfully>"
    torch.testing.assert_close(again(x), graph_module(x))


OTHER_DTYPES = [("fold, join", torch.bfloat16), ("join, fold", torch.float64)]


@pytest.mark.parametrize(("order", "dtype"), [*((order, torch.float16) for order in PASSES), *OTHER_DTYPES])
def test_values_are_cast_as_the_original_would(order: str, dtype: torch.dtype) -> None:
    """A float32 checkpoint in a model of another dtype, from the beginning or since; and back from there."""
    checkpoint = model(1).state_dict()
    reference = model(0).to(dtype)
    reference.load_state_dict(checkpoint)
    expected = PASSES[order]()(traced(reference)).state_dict()
    for graph_module in (rewritten(order, dtype=dtype), rewritten(order).to(dtype)):
        load_original_state_dict(graph_module, checkpoint)
        assert_equal(graph_module.state_dict(), expected)
        before = values(graph_module)
        load_original_state_dict(graph_module, original_state_dict(graph_module))
        assert_equal(graph_module.state_dict(), before)


def test_statistics_wider_than_weights_are_not_rounded() -> None:
    def mixed(seed: int) -> Model:
        made = model(seed).half()
        made.norm.float()
        return made

    graph_module = Fold()(traced(mixed(0)))
    checkpoint = mixed(1).state_dict()
    checkpoint["norm.running_var"] = checkpoint["norm.running_var"] + 1e-5  # half precision does not hold that
    reference = mixed(0)
    reference.load_state_dict(checkpoint)
    load_original_state_dict(graph_module, checkpoint)
    assert_equal(graph_module.state_dict(), Fold()(traced(reference)).state_dict())


@every_order
def test_everything_wrong_is_named_at_once_and_nothing_is_loaded(order: str) -> None:
    graph_module = rewritten(order)
    before, versions = values(graph_module), {k: p._version for k, p in graph_module.named_parameters()}
    checkpoint: dict[str, Any] = dict(model(1).state_dict())
    del checkpoint["q.bias"], checkpoint["out.weight"], checkpoint["norm.running_var"]
    checkpoint |= {"k.bias": torch.zeros(2), "scratch": torch.zeros(2), "nowhere": torch.zeros(1)}
    checkpoint |= {"v.weight": torch.zeros(3, 4), "out.bias": torch.zeros(4), "v.bias": 3, "offset": "text"}
    checkpoint["two.weight"] = torch.zeros(3, 3)
    with pytest.raises(CheckpointError) as caught:
        load_original_state_dict(graph_module, checkpoint)
    message, error = str(caught.value), caught.value
    assert isinstance(error, RuntimeError)  # as what load_state_dict raises
    assert sorted(error.missing_keys) == ["norm.running_var", "out.weight", "q.bias"]
    assert error.unexpected_keys == ["k.bias", "scratch", "nowhere"]
    assert all(name in message for name in (*error.missing_keys, *error.unexpected_keys, "nothing of it was loaded"))
    assert "`v.weight` has shape (3, 4), expected (2, 4)" in message
    assert "`out.bias` has shape (4,), expected (3,)" in message
    assert "`v.bias` is of type int, expected a tensor of shape (2,)" in message
    assert "`offset` is of type str" in message
    assert "`two.weight` and `one.weight` are one tensor in the model, and differ here" in message
    assert_equal(graph_module.state_dict(), before)
    assert versions == {key: parameter._version for key, parameter in graph_module.named_parameters()}


def test_keys_of_the_rewritten_model_are_told_apart() -> None:
    graph_module = rewritten("join")
    with pytest.raises(CheckpointError, match=r"keys of the rewritten model: load those with graph_module\.load_state"):
        load_original_state_dict(graph_module, graph_module.state_dict())


@pytest.mark.parametrize("given", [None, 3, [("q.weight", torch.zeros(8, 4))]])
def test_a_checkpoint_is_a_mapping(given: Any) -> None:
    with pytest.raises(CheckpointError, match=f"is given an? {type(given).__name__}, expected a state_dict"):
        load_original_state_dict(rewritten("join"), given)


def test_sparse_and_meta_values_are_refused() -> None:
    checkpoint = model(1).state_dict()
    checkpoint["q.weight"] = checkpoint["q.weight"].to_sparse()
    checkpoint["out.weight"] = checkpoint["out.weight"].to("meta")
    checkpoint["k.weight"] = checkpoint["k.weight"].to("meta")
    graph_module = rewritten("join")
    before = values(graph_module)
    with pytest.raises(CheckpointError) as caught:
        load_original_state_dict(graph_module, checkpoint)
    assert "`q.weight` is sparse or quantized" in str(caught.value)
    assert "`out.weight` is on the meta device in the checkpoint" in str(caught.value)
    assert "`joined.weight` is on the meta device in the checkpoint" in str(caught.value)
    assert_equal(graph_module.state_dict(), before)


@pytest.mark.parametrize("value", [-1.0, float("nan")])
def test_folded_weights_that_would_not_be_finite_are_refused(value: float) -> None:
    graph_module = rewritten("join, fold")
    before = values(graph_module)
    checkpoint = model(1).state_dict()
    checkpoint["norm.running_var"][1] = value
    for strict in (True, False):
        with pytest.raises(CheckpointError, match=r"`mid_folded`, computed from .*`norm\.running_var`.*out-of-range"):
            load_original_state_dict(graph_module, checkpoint, strict)
    assert_equal(graph_module.state_dict(), before)


def test_what_is_complete_is_loaded_without_strict() -> None:
    """Of a merged tensor the slices that are given; of a fold nothing while an input is missing."""
    graph_module, new = rewritten("join, fold"), model(1)
    old, checkpoint = rewritten("join, fold").state_dict(), model(1).state_dict()
    for key in ("k.weight", "v.bias", "norm.running_mean"):
        del checkpoint[key]
    checkpoint["nowhere"] = torch.zeros(1)
    result = load_original_state_dict(graph_module, checkpoint, strict=False)
    assert (sorted(result.missing_keys), result.unexpected_keys) == (
        ["k.weight", "norm.running_mean", "v.bias"],
        ["nowhere"],
    )
    now = graph_module.state_dict()
    assert torch.equal(now["joined.weight"][:8], new.q.weight) and torch.equal(now["joined.weight"][10:], new.v.weight)
    assert torch.equal(now["joined.weight"][8:10], old["joined.weight"][8:10])
    assert torch.equal(now["joined.bias"][:8], new.q.bias)
    assert torch.equal(now["joined.bias"][8:], old["joined.bias"][8:])
    assert torch.equal(now["mid_folded.weight"], old["mid_folded.weight"])
    assert torch.equal(now["out.weight"], new.out.weight)


def test_shapes_have_to_fit_without_strict_too() -> None:
    with pytest.raises(CheckpointError, match=r"`q\.bias` has shape \(9,\), expected \(8,\)$"):
        load_original_state_dict(rewritten("join"), {"q.bias": torch.zeros(9)}, strict=False)


def test_parameters_stay_and_are_written_in_place() -> None:
    graph_module = rewritten("join, fold")
    graph_module.get_parameter("joined.bias").requires_grad_(False)
    parameters = dict(graph_module.named_parameters())
    flags = {key: parameter.requires_grad for key, parameter in parameters.items()}
    versions = {key: parameter._version for key, parameter in parameters.items()}
    checkpoint = {key: nn.Parameter(value, value.is_floating_point()) for key, value in model(1).state_dict().items()}
    load_original_state_dict(graph_module, checkpoint)
    for key, parameter in graph_module.named_parameters():
        assert parameter is parameters[key] and parameter.requires_grad == flags[key] and parameter.grad_fn is None
        assert parameter._version > versions[key], key


def test_stand_in_values_are_neutral_again_after_loading() -> None:
    graph_module = rewritten("join")
    with torch.no_grad():
        graph_module.get_parameter("joined.bias").fill_(3.0)
    with pytest.raises(NotReversibleError, match=r"`joined\.bias` \(pass `join`\) holds stand-in values") as caught:
        original_state_dict(graph_module)
    assert caught.value.pass_name == "join"
    load_original_state_dict(graph_module, model(1).state_dict())
    assert_equal(original_state_dict(graph_module), traced(model(1)).state_dict())
    undo(graph_module)
    assert_equal(graph_module.state_dict(), traced(model(1)).state_dict())


class TestTies:
    @pytest.mark.parametrize("absent", ["one.weight", "two.weight"])
    @every_order
    def test_one_of_tied_keys_is_enough(self, absent: str, order: str) -> None:
        graph_module, checkpoint = rewritten(order), model(1).state_dict()
        del checkpoint[absent]
        assert load_original_state_dict(graph_module, checkpoint).missing_keys == []
        assert_equal(graph_module.state_dict(), rewritten(order, 1).state_dict())

    def test_without_any_both_are_missing(self) -> None:
        checkpoint = model(1).state_dict()
        del checkpoint["one.weight"], checkpoint["two.weight"]
        with pytest.raises(CheckpointError, match=r"missing: `two\.weight`, `one\.weight`"):
            load_original_state_dict(rewritten("join"), checkpoint)

    def test_equal_copies_are_fine_nan_too(self) -> None:
        graph_module, checkpoint = rewritten("join"), model(1).state_dict()
        checkpoint["one.weight"][0, 0] = float("nan")
        checkpoint["two.weight"] = checkpoint["one.weight"].clone()
        load_original_state_dict(graph_module, checkpoint)
        assert graph_module.get_parameter("two.weight").isnan().sum() == 1

    def test_a_model_that_is_not_tied_needs_both(self) -> None:
        graph_module, checkpoint = Join()(traced(model(tied=False))), model(1).state_dict()
        del checkpoint["two.weight"]
        with pytest.raises(CheckpointError, match=r"missing: `two\.weight`"):
            load_original_state_dict(graph_module, checkpoint)


def test_a_meta_module_can_be_saved_and_not_be_loaded_into() -> None:
    graph_module = rewritten("join, fold").to("meta")
    saved = original_state_dict(graph_module)
    assert list(saved) == list(traced(model()).state_dict())
    assert saved["q.weight"].is_meta and saved["mid.weight"].is_meta
    with pytest.raises(CheckpointError, match=r"`out\.weight` is on the meta device in the model.*load_checkpoint"):
        load_original_state_dict(graph_module, model(1).state_dict())


class TestTravel:
    @pytest.mark.parametrize("order", ["join", "fold", "join, fold", "fold, join"])
    @pytest.mark.parametrize("copied", [copy.deepcopy, lambda given: pickle.loads(pickle.dumps(given))])
    def test_copies_load_and_save(self, order: str, copied: Callable[[GraphModule], Any]) -> None:
        graph_module = rewritten(order)
        again = copied(graph_module)
        again._non_persistent_buffers_set.add("scratch")  # copy.deepcopy makes it persistent
        load_original_state_dict(again, model(1).state_dict())
        assert_equal(again.state_dict(), rewritten(order, 1).state_dict())
        assert_equal(original_state_dict(again), original_state_dict(rewritten(order, 1)))
        assert_equal(graph_module.state_dict(), rewritten(order).state_dict())


class TestSaved:
    def test_cut_out_tensors_own_their_memory(self) -> None:
        graph_module = rewritten("join, fold")
        saved = original_state_dict(graph_module)
        current = {tensor.untyped_storage().data_ptr() for tensor in graph_module.state_dict().values()}
        for key in ("q.weight", "k.weight", "v.bias", "mid.weight", "norm.running_var"):
            value = saved[key]
            assert value.is_contiguous() and not value.requires_grad
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size()
            assert value.untyped_storage().data_ptr() not in current
        assert saved["out.weight"].data_ptr() == graph_module.get_parameter("out.weight").data_ptr()

    def test_a_counter_that_a_fold_dropped_is_zero(self) -> None:
        counter = original_state_dict(rewritten("fold"))["norm.num_batches_tracked"]
        assert (counter.item(), counter.dtype, counter.shape) == (0, torch.int64, ())

    def test_it_says_of_folds_without_a_way_back(self) -> None:
        graph_module = Fold(back=False)(traced(model()))
        with pytest.raises(NotReversibleError, match=r"`mid_folded\.weight`, `mid_folded\.bias`.*passes:fold`"):
            original_state_dict(graph_module)
        load_original_state_dict(graph_module, model(1).state_dict())
        assert_equal(graph_module.state_dict(), rewritten("fold", 1).state_dict())

    def test_a_function_that_fails_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        graph_module = rewritten("fold")
        before = values(graph_module)

        def broken(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("no")

        monkeypatch.setattr(checkpoint_passes, "fold", broken)
        monkeypatch.setattr(checkpoint_passes, "unfold", broken)
        with pytest.raises(
            NotReversibleError, match=r"`mid_folded\.weight`.*`checkpoint_passes:unfold`.*RuntimeError: no"
        ):
            original_state_dict(graph_module)
        with pytest.raises(CheckpointError, match=r"`checkpoint_passes:fold`.* pass `fold`.*RuntimeError: no"):
            load_original_state_dict(graph_module, model(1).state_dict())
        for name in ("fold", "unfold"):
            monkeypatch.delattr(checkpoint_passes, name)
        for function in (original_state_dict, lambda gm: load_original_state_dict(gm, model(1).state_dict())):
            with pytest.raises(CheckpointError, match=r"no pass that is installed .* lists.*install the package"):
                function(graph_module)
        assert_equal(graph_module.state_dict(), before)

    @pytest.mark.parametrize("wrong", [(), (torch.zeros(1), torch.zeros(1)), torch.zeros(6, 8)])
    def test_a_function_gives_what_it_gave(self, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        graph_module = rewritten("fold")
        monkeypatch.setattr(checkpoint_passes, "fold", lambda *args, **kwargs: wrong)
        with pytest.raises(CheckpointError, match=r"gives tensors of shapes .*, expected \[\(6, 8\), \(6,\)\]"):
            load_original_state_dict(graph_module, model(1).state_dict())

    def test_a_way_back_may_refuse(self) -> None:
        graph_module = rewritten("fold")
        with torch.no_grad():
            graph_module.get_parameter("mid_folded.weight").fill_(-1000.0)
        with pytest.raises(NotReversibleError, match=r"`mid_folded\.weight`.* \(pass `fold`\): a weight is too small"):
            original_state_dict(graph_module)

    def test_metadata_of_what_stayed_is_there(self) -> None:
        saved: Any = original_state_dict(rewritten("join"))
        assert saved._metadata["norm"]["version"] == 2 and "joined" not in saved._metadata


def test_constants_that_tracing_baked_in_are_not_of_the_original_model() -> None:
    graph_module = Join()(torch.fx.symbolic_trace(model()))
    assert "_tensor_constant0" in graph_module.state_dict()
    assert "_tensor_constant0" not in original_state_dict(graph_module)
    load_original_state_dict(graph_module, model(1).state_dict())
    load_original_state_dict(graph_module, torch.fx.symbolic_trace(model(1)).state_dict())


class TestCounters:
    """torch takes a checkpoint without counters of batches if its metadata does not say that there have to be any."""

    @pytest.mark.parametrize("order", ["join", "join, fold"])
    def test_absent_counters(self, order: str) -> None:
        checkpoint = model(1).state_dict()
        del checkpoint["norm.num_batches_tracked"]
        with pytest.raises(CheckpointError, match=r"missing: `norm\.num_batches_tracked`"):
            load_original_state_dict(rewritten(order), checkpoint)
        graph_module = rewritten(order)
        load_original_state_dict(graph_module, dict(checkpoint))
        assert_equal(graph_module.state_dict(), rewritten(order, 1).state_dict())

    def test_a_number_may_be_a_tensor_of_one_element(self) -> None:
        checkpoint = model(1).state_dict()
        checkpoint["norm.num_batches_tracked"] = torch.tensor([7])
        graph_module = rewritten("join")
        load_original_state_dict(graph_module, checkpoint)
        assert graph_module.get_buffer("norm.num_batches_tracked").item() == 7


class Keeper(nn.ReLU):
    """Has extra state."""

    def get_extra_state(self) -> Any:
        return {"note": "noted"}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError


class LoadsItself(nn.ReLU):
    def _load_from_state_dict(self, *args: Any) -> None:
        raise AssertionError


class TestModulesThatLoadThemselves:
    @pytest.mark.parametrize(
        "change",
        [
            lambda gm: gm.add_module("act", Keeper()),
            lambda gm: gm.add_module("act", LoadsItself()),
            lambda gm: gm.register_load_state_dict_pre_hook(lambda *_: None),
            lambda gm: gm.add_module("act", nn.LazyLinear(2)),
            lambda gm: gm.register_buffer("sparse", torch.eye(2).to_sparse()),
        ],
    )
    def test_they_are_refused(self, change: Callable[[GraphModule], object]) -> None:
        graph_module = rewritten("join")
        change(graph_module)
        with pytest.raises(CheckpointError, match=r"module `(act)?` \(.*\) loads its part by its own code"):
            load_original_state_dict(graph_module, model(1).state_dict(), strict=False)
        assert torch.equal(graph_module.get_parameter("out.weight"), model().out.weight)

    def test_extra_state_is_saved(self) -> None:
        graph_module = rewritten("join")
        graph_module.add_module("act", Keeper())
        assert original_state_dict(graph_module)["act._extra_state"] == {"note": "noted"}

    def test_hooks_after_loading_run_and_keys_that_hooks_add_stay(self) -> None:
        graph_module, seen = rewritten("join"), list[Any]()
        layer: Any = graph_module.get_submodule("out")
        layer.register_load_state_dict_post_hook(lambda module, keys: seen.append(keys))
        layer.register_state_dict_post_hook(
            lambda module, state, prefix, metadata: state.update({prefix + "added": torch.ones(1)})
        )
        load_original_state_dict(graph_module, model(1).state_dict())
        assert len(seen) == 1
        assert list(original_state_dict(graph_module))[-1] == "out.added"


class TestChangesByOtherMeans:
    @pytest.mark.parametrize(
        ("change", "found"),
        [
            (lambda gm: gm.delete_submodule("joined"), "module `joined` is gone"),
            (lambda gm: setattr(gm, "joined", nn.Linear(4, 5)), r"`joined` has weight \(5, 4\), bias \(5,\), expected"),
            (lambda gm: setattr(gm.joined, "bias", None), r"`joined` has weight \(12, 4\), expected"),
            (lambda gm: setattr(gm.joined, "more", nn.Parameter(torch.ones(1))), r"`joined` has .*more \(1,\)"),
            (lambda gm: setattr(gm, "q", nn.Linear(4, 8)), "there is another `q`"),
        ],
    )
    def test_they_are_named_and_nothing_is_loaded(self, change: Callable[[GraphModule], object], found: str) -> None:
        graph_module = rewritten("join, fold")
        change(graph_module)
        before = values(graph_module)
        functions: list[Callable[[], object]] = [
            lambda: key_map(graph_module),
            lambda: original_state_dict(graph_module),
            lambda: load_original_state_dict(graph_module, model(1).state_dict()),
        ]
        for function in functions:
            with pytest.raises(FxoptError, match=f"{found}.*`join`"):
                function()
        assert_equal(graph_module.state_dict(), before)

    def test_a_pass_that_does_not_say_what_it_did_is_named(self) -> None:
        graph_module = compose(Join(), Rename())(traced(model()))
        with pytest.raises(CheckpointError, match="pass `rename` changed names or shapes of parameters"):
            key_map(graph_module)
        with pytest.raises(CheckpointError, match="`rename`"):
            load_original_state_dict(graph_module, model(1).state_dict())

    def test_a_pass_that_calls_others_is_fine(self) -> None:
        graph_module = CallsJoin()(traced(model()))
        load_original_state_dict(graph_module, model(1).state_dict())
        assert_equal(original_state_dict(graph_module), traced(model(1)).state_dict())


def test_buffers_that_no_checkpoint_has_cannot_be_folded_again() -> None:
    original = model()
    original.norm._non_persistent_buffers_set.add("running_mean")
    graph_module = Fold()(traced(original))
    with pytest.raises(CheckpointError, match=r"`mid_folded\.weight` is computed by pass `fold` from tensors that no"):
        load_original_state_dict(graph_module, original.state_dict())
    with pytest.raises(NotReversibleError, match=r"computes them from `norm\.running_mean`, which no state_dict has"):
        original_state_dict(graph_module)


class Wide(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.ones, self.others = (nn.ModuleList(nn.Linear(2, 2) for _ in range(layers)) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm1d(2, affine=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for one, other, norm in zip(self.ones, self.others, self.norms, strict=True):
            x = norm(one(x) + other(x))
        return x


def test_time_is_linear_in_the_number_of_keys(steps_of: Callable[[Callable[[], object]], int]) -> None:
    counts = []
    for layers in (15, 60):
        graph_module = compose(Fold(), Join())(traced(Wide(layers).eval()))
        checkpoint = Wide(layers).state_dict()

        def everything(graph_module: GraphModule = graph_module, checkpoint: dict[str, Any] = checkpoint) -> None:
            load_original_state_dict(graph_module, checkpoint)
            original_state_dict(graph_module)
            key_map(graph_module)

        everything()
        counts.append(steps_of(everything))
    assert counts[1] < 4.8 * counts[0]
