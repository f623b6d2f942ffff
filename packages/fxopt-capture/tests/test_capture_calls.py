"""A captured graph module takes its arguments and returns its outputs as the model does."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from fxopt_capture import capture
from fxopt_core.errors import CaptureError


class Masked(nn.Module):
    """A required and three optional arguments."""

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, negate: bool = False) -> Tensor:
        x = x * scale
        if mask is not None:
            x = x * mask
        return -x if negate else x


X, MASK = torch.randn(2, 4), torch.ones(2, 4)


@pytest.mark.parametrize("args", [(X, MASK), (X,)])
def test_positional_and_keyword_calls(args: tuple[Tensor, ...]) -> None:
    captured = capture(Masked().eval(), args)
    x, mask = torch.randn(3, 4), torch.randn(3, 4)
    given = {"x": x, "mask": mask} if len(args) == 2 else {"x": x}
    expected = Masked()(**given)
    assert torch.equal(captured(*given.values()), expected)
    assert torch.equal(captured(**dict(reversed(given.items()))), expected)
    assert torch.equal(captured(x, **{name: value for name, value in given.items() if name != "x"}), expected)


def test_arguments_that_were_not_given() -> None:
    captured = capture(Masked().eval(), X)
    assert torch.equal(captured(X, None), X)
    assert torch.equal(captured(X, mask=None, scale=1.0, negate=False), X)
    with pytest.raises(CaptureError, match="captured without `mask`"):
        captured(X, MASK)
    with pytest.raises(CaptureError, match="captured without `scale`"):
        captured(X, scale=2.0)
    with pytest.raises(CaptureError, match="captured without `other`"):
        captured(X, other=1)


def test_missing_and_surplus_arguments() -> None:
    captured = capture(Masked().eval(), (X, MASK))
    with pytest.raises(CaptureError, match="needs `mask`"):
        captured(X)
    with pytest.raises(CaptureError, match="needs `x`, `mask`"):
        captured()
    with pytest.raises(CaptureError, match="`x` was given to the captured Masked twice"):
        captured(X, x=X)
    with pytest.raises(CaptureError, match="3 positional arguments, and 4 were given"):
        captured(X, MASK, 1.0, True)


def test_constants_are_baked_in() -> None:
    captured = capture(Masked().eval(), (X,), {"scale": 3.0, "negate": True})
    assert torch.equal(captured(X, scale=3.0, negate=True), -3 * X)
    with pytest.raises(CaptureError, match=r"has scale=3\.0 baked in, and was called with scale=1\.0"):
        captured(X, negate=True)
    with pytest.raises(CaptureError, match="negate=True baked in"):
        captured(X, scale=3.0, negate=False)


class Crowded(nn.Module):
    """Arguments under names that those of a ``*args`` would have."""

    def forward(self, args_0: Tensor, *args: Tensor, **options: Tensor) -> Tensor:
        return args_0 - 2 * args[0] + options["args_1"] * args[1]


def test_variadic_arguments_beside_names_like_theirs() -> None:
    captured, x = capture(Crowded().eval(), (X, X, X), {"args_1": X}), torch.randn(5, 3, 4)
    found = captured(x[0], x[1], x[2], args_1=x[3])
    assert torch.equal(found, Crowded()(x[0], x[1], x[2], args_1=x[3]))


class Weighted(nn.Module):
    """Arguments under names that the export gives to the layer's call and its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, linear: Tensor, lin_weight: Tensor, p_lin_weight: Tensor) -> Tensor:
        return torch.sub(self.lin(linear) * lin_weight, p_lin_weight)


def test_arguments_with_names_like_those_of_parameters() -> None:
    model = Weighted().eval()
    captured, x = capture(model, (X, MASK, X.clone())), torch.randn(3, 3, 4)
    assert torch.equal(captured(*x), model(*x))


class PositionalOnly(nn.Module):
    """Takes its first argument by position only, and one in between has a default."""

    def forward(self, x: Tensor, weight: Tensor | None = None, /, bias: Tensor | None = None) -> Tensor:
        return x if bias is None else x + bias


def test_positional_only_arguments() -> None:
    captured = capture(PositionalOnly().eval(), (X,), {"bias": MASK})
    assert torch.equal(captured(X, None, MASK), X + 1)
    assert torch.equal(captured(X, bias=MASK), X + 1)


class Difference(nn.Module):
    """Takes arguments that may be one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor, others: list[Tensor]) -> Tensor:
        return torch.sub(self.lin(x), 2 * y) + 3 * others[0]


def test_an_example_with_one_tensor_for_several_arguments() -> None:
    """Which may be a parameter of the model, too."""
    model = Difference().eval()
    x, y, z = torch.randn(3, 3, 4)
    for example in ((X, X, [X]), (X.new_zeros(4, 4), model.lin.weight, [model.lin.weight])):
        captured = capture(model, example)
        assert torch.equal(captured(x, y, [z]), model(x, y, [z]))
        assert torch.equal(captured(x, x, [x]), model(x, x, [x]))


class Hooked:
    """Hooks of a model itself, which scale its first argument and its output."""

    @staticmethod
    def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return args[0] * 3, *args[1:]

    @staticmethod
    def before_with_names(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {**kwargs, "negate": not kwargs["negate"]}

    @staticmethod
    def one(module: nn.Module, args: tuple[Any, ...]) -> Any:
        return args[0] + 1

    @staticmethod
    def after(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        return output.add(args[0])

    @staticmethod
    def after_with_names(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> Any:
        return None if not kwargs["negate"] else output * len(args)


def test_hooks_of_the_model_see_the_call_as_it_was_made() -> None:
    model = Masked().eval()
    model.register_forward_pre_hook(Hooked.before)
    model.register_forward_pre_hook(Hooked.before_with_names, with_kwargs=True)
    model.register_forward_hook(Hooked.after)
    model.register_forward_hook(Hooked.after_with_names, with_kwargs=True)
    hooks = [dict(model._forward_pre_hooks), dict(model._forward_hooks)]
    captured = capture(model, (X, MASK), {"negate": False})
    assert [dict(model._forward_pre_hooks), dict(model._forward_hooks)] == hooks
    x, mask = torch.randn(3, 4), torch.randn(3, 4)
    assert torch.equal(captured(x, mask, negate=False), model(x, mask, negate=False))


def test_a_hook_that_returns_one_argument() -> None:
    model = nn.Linear(4, 4)
    model.register_forward_pre_hook(Hooked.one)
    x = torch.randn(3, 4)
    assert torch.equal(capture(model, torch.randn(2, 4))(x), model(x))


def test_backward_hooks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model[1].register_full_backward_hook(lambda *_: None)
    with pytest.raises(CaptureError, match="`1` of Sequential has backward hooks, which do not run where a graph has"):
        capture(model, X)


class Tripled(nn.Linear):
    def __call__(self, input: Tensor) -> Tensor:  # the name in torch
        return cast("Tensor", super().__call__(input)) * 3


class Renamed(nn.Linear):
    def __call__(self, x: Tensor) -> Tensor:
        return cast("Tensor", super().__call__(x))


def test_a_call_of_the_models_own() -> None:
    model = Tripled(4, 4)
    x = torch.randn(3, 4)
    assert torch.equal(capture(model, X)(x), model(x))
    with pytest.raises(CaptureError, match=r"Renamed cannot be captured: TypeError: .*keyword argument"):
        capture(Renamed(4, 4), X)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"x": {2: Dim.AUTO}}, "names dimension 2 of `x`, which has 2 dimensions"),
        ({"x": {-1: Dim.AUTO}}, "names dimension -1 of `x`"),
        ({"x": {"batch": Dim.AUTO}}, "names dimension 'batch' of `x`"),
        ({"x": {0: Dim.AUTO}, "mask": {3: None}}, "names dimension 3 of `mask`"),
    ],
)
def test_dimensions_that_an_input_does_not_have(shapes: dict[str, Any], message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        capture(Masked().eval(), (X, MASK), dynamic_shapes=shapes)
