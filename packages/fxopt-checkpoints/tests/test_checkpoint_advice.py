"""What users are told of checkpoints whose keys or tensors are unusual."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from checkpoint_passes import Fold, Join, model, traced
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_checkpoints.load import load_original_state_dict, original_state_dict
from fxopt_checkpoints.trace import key_map
from fxopt_core import compose
from fxopt_core.errors import CheckpointError, PreconditionError


def rewritten(seed: int = 0) -> GraphModule:
    return Join()(traced(model(seed)))


def complaint(state_dict: Any) -> str:
    with pytest.raises(CheckpointError, match="nothing of it was loaded") as caught:
        load_original_state_dict(rewritten(), state_dict)
    return str(caught.value)


class Tagged(Tensor):
    """A subclass that computes as others do."""


class TestAdvice:
    @pytest.mark.parametrize("prefix", ["module.", "model.", "_orig_mod.", "module.model."])
    def test_a_prefix_too_many_is_named(self, prefix: str) -> None:
        given = {prefix + key: value for key, value in model(1).state_dict().items()}
        assert f"they fit without the prefix `{prefix}`: load {{key.removeprefix({prefix!r})" in complaint(given)
        load_original_state_dict(rewritten(), {key.removeprefix(prefix): value for key, value in given.items()})

    def test_a_prefix_that_lacks_is_named(self) -> None:
        inner = traced(nn.Sequential(nn.Linear(2, 2)))
        outer = Join()(traced(nn.Sequential(inner)))
        with pytest.raises(CheckpointError, match=r"they fit with the prefix `0\.`: load \{'0\.' \+ key: value"):
            load_original_state_dict(outer, inner.state_dict())
        load_original_state_dict(outer, {"0." + key: value for key, value in inner.state_dict().items()})

    def test_keys_that_lack_besides_do_not_hide_a_prefix(self) -> None:
        given = {f"module.{key}": value for key, value in model(1).state_dict().items() if key != "q.weight"}
        assert "without the prefix `module.`" in complaint(given | {"epoch": 3})

    @pytest.mark.parametrize("name", ["state_dict", "model"])
    def test_a_checkpoint_inside_of_another_is_named(self, name: str) -> None:
        message = complaint({"epoch": 3, name: model(1).state_dict(), "optimizer": {"lr": 0.1}})
        assert f"its entry `{name}` is a mapping with such keys: load that one" in message

    def test_other_keys_have_strict_as_advice(self) -> None:
        given = {**model(1).state_dict(), "other.weight": torch.zeros(1)}
        assert "strict=False loads what is there" in complaint(given)
        assert "strict=False" not in complaint({**given, "out.bias": torch.zeros(7)})

    def test_keys_that_are_no_names_are_unexpected(self) -> None:
        graph_module = rewritten()
        with pytest.raises(CheckpointError, match="not in the original model: `3`, `None`") as caught:
            load_original_state_dict(graph_module, {**model(1).state_dict(), 3: 1, None: 2})  # type: ignore[dict-item]  # on purpose
        assert caught.value.unexpected_keys == ["3", "None"]

    @pytest.mark.parametrize("function", [key_map, original_state_dict])
    def test_errors_name_the_function_that_was_called(self, function: Callable[[Any], object]) -> None:
        with pytest.raises(PreconditionError, match=f"^{function.__name__} is given a Linear, expected"):
            function(nn.Linear(2, 2))


class TestUnusualTensors:
    def test_tensors_of_a_subclass_go_into_regions(self) -> None:
        checkpoint, graph_module = model(1).state_dict(), rewritten()
        load_original_state_dict(graph_module, {key: v.as_subclass(Tagged) for key, v in checkpoint.items()})
        assert all(type(parameter) is nn.Parameter for parameter in graph_module.parameters())
        saved = original_state_dict(graph_module)
        assert all(torch.equal(saved[key], value) for key, value in checkpoint.items())

    def test_a_checkpoint_made_in_inference_mode_can_be_trained(self) -> None:
        with torch.inference_mode():
            checkpoint = {key: value.clone() for key, value in model(1).state_dict().items()}
            checkpoint["two.weight"] = checkpoint["one.weight"]
        graph_module = rewritten()
        load_original_state_dict(graph_module, checkpoint)
        assert graph_module.get_parameter("one.weight") is graph_module.get_parameter("two.weight")
        graph_module(torch.randn(5, 4)).sum().backward()
        assert all(parameter.grad is not None for parameter in graph_module.parameters())

    def test_a_model_made_in_inference_mode_is_written_in_that_mode_alone(self) -> None:
        with torch.inference_mode():
            graph_module = compose(Join(), Fold())(traced(model().requires_grad_(False).double()))
        checkpoint = model(1).double().state_dict()
        before = {key: value.clone() for key, value in graph_module.state_dict().items()}
        with pytest.raises(CheckpointError, match="was made in inference mode in the model"):
            load_original_state_dict(graph_module, checkpoint)
        assert all(torch.equal(value, before[key]) for key, value in graph_module.state_dict().items())
        with torch.inference_mode():
            load_original_state_dict(graph_module, checkpoint)
        expected = compose(Join(), Fold())(traced(model(1).requires_grad_(False).double())).state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in graph_module.state_dict().items())


class TestMaps:
    @pytest.mark.parametrize("ledger", [None, 3, "a ledger"])
    def test_a_lost_ledger_is_told(self, ledger: object) -> None:
        graph_module = rewritten()
        graph_module.meta["fxopt"] = ledger
        for function in (key_map, original_state_dict, lambda gm: load_original_state_dict(gm, {}, strict=False)):
            with pytest.raises(CheckpointError, match="was rewritten, and this graph module has no ledger"):
                function(graph_module)
