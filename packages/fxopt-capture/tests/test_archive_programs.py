"""Programs as ``torch.export`` makes them, in every way it can: loaded, rewritten, saved, loaded again, undone."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from archive_models import Layers, PadOutputs, layout, modules
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.utils import _pytree as pytree

from fxopt_capture import capture
from fxopt_capture.archive.files import load, save
from fxopt_core import history, undo
from fxopt_core.errors import CaptureError

pytestmark = [  # torch warns of what it does itself: copying trees, looking for gradients in `torch.cond`
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Pair(nn.Module):
    """Two linear layers for models to make something of."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3, bias=False), nn.Linear(4, 3)


class Plain(Pair):
    """Nothing but layers."""

    def forward(self, x: Tensor) -> Any:
        return self.a(x) + self.b(x)


class Turned(Pair):
    """Gives its layers what is not contiguous, and reads all that they give more than once."""

    def forward(self, x: Tensor) -> Any:
        y = x.transpose(1, -1)
        a, b = self.a(y), self.b(y)
        return a * b + a - b


class Unread(Plain):
    """A tied layer, called by its other name, and parameters that nothing reads."""

    def __init__(self) -> None:
        super().__init__()
        self.c, self.unused = self.a, nn.Linear(2, 2)
        self.register_buffer("spare", torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        return self.a(x) + self.b(x) + self.c(x)


class Counting(Pair):
    """Changes a persistent and a non-persistent buffer."""

    total: Tensor
    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(4))
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor) -> Any:
        self.total.add_(x.detach().sum(0))
        self.calls.add_(1)
        return self.a(x) + self.b(x) + self.calls + self.total[:3]


class Writing(Pair):
    """Changes an input."""

    def forward(self, x: Tensor, y: Tensor) -> Any:
        y.add_(1)
        return self.a(x) + self.b(y)


class Constant(Pair):
    """Tensors that are no buffers: an attribute, and literals that the export lifts."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.arange(3.0)

    def forward(self, x: Tensor) -> Any:
        return (self.a(x) + self.b(x)) * torch.tensor([1.0, 2.0, 3.0]) + self.offset + torch.tensor(3.0)


class Numbers(Pair):
    """Takes numbers, a flag, a text and None, which are part of the program."""

    def forward(
        self, x: Tensor, n: int, f: float = 2.0, flag: bool = True, name: str = "a", none: Tensor | None = None
    ) -> Any:
        y = (self.a(x) + self.b(x)) * n * f
        y = y if flag else -y
        return (y, n, name == "a", f) if none is None else y


class Nested(Pair):
    """Containers in containers, in and out."""

    def forward(self, d: dict[str, Any], rows: list[Tensor], *, k: Tensor | None = None) -> Any:
        y = self.a(d["x"][0]) + self.b(rows[0] * rows[1])
        return {"o": (y, [y * 2 if k is None else y * k, None]), "none": None, "number": 3}


class Variadic(Pair):
    """Takes any arguments."""

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return self.a(args[0]) + self.b(args[1]) + kwargs["u"]


class Branching(Pair):
    """Decides by a value, so that there are graphs in the graph."""

    def forward(self, x: Tensor) -> Any:
        y = self.a(x) + self.b(x)
        return torch.cond(y.sum() > 0, lambda z: z + 1, lambda z: z - 1, (y,))


class Training(Pair):
    """Batch norm and dropout, which train."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.train()

    def forward(self, x: Tensor) -> Any:
        return self.dropout(self.norm(self.a(x) + self.b(x)))


class Alone(Pair):
    """Takes nothing."""

    def forward(self) -> Any:
        return self.a(torch.ones(2, 4)) + self.b(torch.ones(2, 4))


def rows(count: int, *rest: int) -> Tensor:
    return torch.randn(count, *(rest or (4,)), generator=torch.Generator().manual_seed(count))


Inputs = Callable[[int], tuple[tuple[Any, ...], dict[str, Any]]]


@dataclass
class Case:
    """A model, how it is exported, and what it is called with for so many rows."""

    model: type[nn.Module]
    inputs: Inputs
    shapes: Any = None
    sizes: tuple[int, ...] = (4,)
    strict: tuple[bool, ...] = (False,)
    wrong: tuple[int, ...] = field(default=())


AUTO = {0: Dim.AUTO}
ROWS = {0: Dim("rows", max=16)}
BOTH = (False, True)


def one(size: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return (rows(size),), {}


CASES = {
    "static": Case(Plain, one, strict=BOTH, wrong=(5,)),
    "dynamic": Case(Plain, one, {"x": AUTO}, (4, 2, 7, 1), BOTH),
    "bounded": Case(Plain, one, {"x": ROWS}, (4, 2, 16), wrong=(17,)),
    "derived": Case(Plain, one, {"x": {0: 2 * Dim("half", max=8)}}, (4, 2, 16), wrong=(5, 18)),
    "more dimensions": Case(
        Plain, lambda n: ((rows(n, n + 1, 3, 4),), {}), {"x": {0: Dim.AUTO, 1: Dim.AUTO}}, (4, 2, 7), BOTH
    ),
    "turned": Case(Turned, lambda n: ((rows(n, 4, n + 1),), {}), {"x": {0: Dim.AUTO, 2: Dim.AUTO}}, (4, 2, 7)),
    "turned, batches": Case(Turned, lambda n: ((rows(n, 4, 3, 2),), {}), {"x": AUTO}, (4, 2, 7)),
    "unread": Case(Unread, one, {"x": AUTO}, (4, 2), BOTH),
    "buffers": Case(Counting, one, {"x": AUTO}, (4, 2), BOTH),
    "input": Case(Writing, lambda n: ((rows(n), rows(n)), {}), {"x": ROWS, "y": ROWS}, (4, 2), BOTH),
    "constants": Case(Constant, one, {"x": AUTO}, (4, 2), BOTH),
    "numbers": Case(Numbers, lambda n: ((rows(n), 3), {}), {"x": AUTO, "n": None}, (4, 2)),
    "numbers by name": Case(
        Numbers,
        lambda n: ((rows(n),), {"n": 3, "f": 1.5, "flag": False, "name": "q", "none": None}),
        {"x": AUTO, "n": None, "f": None, "flag": None, "name": None, "none": None},
        (4, 2),
    ),
    "containers": Case(
        Nested,
        lambda n: (({"x": (rows(n),)}, [rows(n), rows(n)]), {"k": rows(n, 3)}),
        {"d": {"x": (AUTO,)}, "rows": [AUTO, AUTO], "k": AUTO},
        (4, 2),
    ),
    "containers and None": Case(Nested, lambda n: (({"x": (rows(n),)}, [rows(n), rows(n)]), {"k": None})),
    "variadic": Case(Variadic, lambda n: ((rows(n), rows(n)), {"u": rows(n, 3)})),
    "regions": Case(Branching, one, {"x": AUTO}, (4, 2), BOTH),
    "training": Case(Training, one, {"x": AUTO}, (4, 2)),
    "no inputs": Case(Alone, lambda n: ((), {})),
}
FORMS: dict[str, Callable[[ExportedProgram], ExportedProgram]] = {
    "exported": lambda program: program,
    "functional": lambda program: program.run_decompositions({}),
    "decomposed": lambda program: program.run_decompositions(),
}


def named() -> Iterator[Any]:
    for name, case in CASES.items():
        for strict in case.strict:
            for form in FORMS:
                yield pytest.param(name, strict, form, id=f"{name}-{'strict' if strict else 'plain'}-{form}")


Result = tuple[list[Any], dict[str, Tensor]]


def called(module: nn.Module, case: Case, size: int) -> Result:
    """Return what a call gives and changes, and the buffers after it, and take their changes back."""
    args, kwargs = copy.deepcopy(case.inputs(size))
    before = {name: buffer.clone() for name, buffer in module.named_buffers()}
    torch.manual_seed(size)
    output = module(*args, **kwargs)
    after = {name: buffer.clone() for name, buffer in module.named_buffers()}
    with torch.no_grad():
        for name, buffer in module.named_buffers():
            buffer.copy_(before[name])
    return [leaf for leaf in pytree.tree_leaves((output, args, kwargs)) if not isinstance(leaf, str)], after


def alike(one: Result, other: Result) -> None:
    torch.testing.assert_close(one[0], other[0])
    both = one[1].keys() & other[1].keys()
    torch.testing.assert_close([one[1][name] for name in both], [other[1][name] for name in both])


@pytest.mark.parametrize(("name", "strict", "form"), list(named()))
def test_a_program_of_torch(name: str, strict: bool, form: str, tmp_path: Path) -> None:
    """Loaded, it computes the same with the model's keys; rewritten and saved it does too, and undoing is exact."""
    torch.manual_seed(0)
    case = CASES[name]
    model = case.model() if name == "training" else case.model().eval()
    keys = list(model.state_dict())
    args, kwargs = case.inputs(4)
    program = FORMS[form](torch.export.export(model, args, kwargs, dynamic_shapes=case.shapes, strict=strict))
    torch.export.save(program, tmp_path / "plain.pt2")
    loaded, reference = load(tmp_path / "plain.pt2"), torch.export.load(tmp_path / "plain.pt2").module()
    assert list(loaded.state_dict()) == keys
    for size in case.sizes:
        alike(called(loaded, case, size), called(reference, case, size))
    for size in case.wrong:
        with pytest.raises(CaptureError, match="size"):
            called(loaded, case, size)
    before = layout(loaded), modules(loaded)
    rewritten = PadOutputs()(loaded)
    assert len(history(rewritten)[-1].rewrites) == (name != "unread")
    save(rewritten, tmp_path / "rewritten.pt2")
    again, alone = load(tmp_path / "rewritten.pt2"), torch.export.load(tmp_path / "rewritten.pt2").module()
    for size in case.sizes:
        alike(called(again, case, size), called(rewritten, case, size))
        alike(called(alone, case, size), called(rewritten, case, size))
    undone = undo(again)
    assert (layout(undone), modules(undone)) == before
    assert list(undone.state_dict()) == keys
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in undone.state_dict().items())


@pytest.mark.parametrize("form", FORMS)
def test_decomposed_layers_are_layers_again(form: str, tmp_path: Path) -> None:
    """All layers are modules, also of a program that is decomposed to the core operators."""
    model = Layers().eval()
    args = (torch.randint(0, 5, (3, 6)), torch.randn(3, 1, 8, 8))
    program = torch.export.export(model, args, dynamic_shapes={"ids": AUTO, "image": AUTO})
    torch.export.save(FORMS[form](program), tmp_path / "model.pt2")
    loaded = load(tmp_path / "model.pt2")
    expected = {name for name, module in model.named_modules() if name and not isinstance(module, nn.BatchNorm2d)}
    called_modules = {str(node.target) for node in loaded.graph.nodes if node.op == "call_module"}
    assert expected <= called_modules
    inputs = torch.randint(0, 5, (5, 6)), torch.randn(5, 1, 8, 8)
    torch.testing.assert_close(loaded(*inputs), model(*inputs))


def test_a_text_among_the_outputs_is_refused(tmp_path: Path) -> None:
    """Torch writes such a program, and cannot read it."""

    class Named(Pair):
        def forward(self, x: Tensor) -> Any:
            return {"y": self.a(x), "name": "pair"}

    graph_module = capture(Named().eval(), rows(4))
    with pytest.raises(CaptureError, match="returns the text 'pair'"):
        save(graph_module, tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())
