"""What several processes do in `test_distributed.py`: one function per case, called by all of them, in order."""

from __future__ import annotations

import datetime
import json
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as distributed
from distributed_models import folded, images, model, rewritten
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save, save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.fx import GraphModule
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fxopt
import fxopt_compile
from fxopt_checkpoints.sharding import local_region
from fxopt_core import NotReversibleError
from fxopt_core.errors import CheckpointError, FxoptError

Case = Callable[[Path], None]
CASES: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def work(rank: int, world: int, names: Iterable[str], folder: Path, store: Path, seconds: int) -> None:
    """Run cases as one of the processes; write for each what went wrong, or nothing, beside the store."""
    torch.set_num_threads(1)
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # which returns a view
    warnings.filterwarnings("ignore", message="The .grad attribute of a Tensor that is not a leaf")  # by dynamo
    warnings.filterwarnings("ignore", message="TypedStorage is deprecated")  # by torch, in its own checkpoints
    timeout = datetime.timedelta(seconds=seconds)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=timeout)
    said = {}
    for name in names:
        try:
            CASES[name](folder)
            said[name] = ""
        except BaseException:
            said[name] = traceback.format_exc()
        Path(f"{store}-{rank}.json").write_text(json.dumps(said))
    distributed.destroy_process_group()


def world() -> int:
    return distributed.get_world_size()


def sharded(graph_module: GraphModule, *, layers: bool = False, **options: Any) -> GraphModule:
    """Shard by FSDP2: its layers, then the rest at its root."""
    mesh = init_device_mesh("cpu", (world(),))
    for name, module in [*graph_module.named_modules()] if layers else []:
        if next(module.parameters(recurse=False), None) is not None:
            fully_shard(graph_module.get_submodule(name), mesh=mesh, **options)
    fully_shard(graph_module, mesh=mesh, **options)
    return graph_module


def same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected)


def inference(graph_module: nn.Module) -> Tensor:
    with torch.no_grad():
        found: Tensor = graph_module(images())
    return found


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def agree(state: dict[str, Tensor], plain: nn.Module) -> None:
    """The same keys in the same order, and the same values bit for bit."""
    expected = plain.state_dict()
    assert list(state) == list(expected), (list(state), list(expected))
    for key, tensor in state.items():
        assert torch.equal(whole(tensor), expected[key]), key


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Notes the largest tensor of numbers that is made, and which collectives run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # nor here
        self.largest, self.collectives = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace in ("c10d", "c10d_functional", "_c10d_functional"):
            sent = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
            self.collectives |= {str(func) for each in sent if each.is_floating_point()}
        for each in tree_leaves(result):
            if type(each) is Tensor and each.is_floating_point():
                self.largest = max(self.largest, each.numel())
        return result


@contextmanager
def without_gathering(graph_module: GraphModule, count: int) -> Iterator[None]:
    """No collective runs on numbers, and no tensor is larger than the largest share of one in ``count`` processes."""
    with Watch() as watch:
        yield
    assert not watch.collectives
    assert watch.largest <= max(-(-len(each) // count) * each[0].numel() for each in model().parameters())


FORMS: dict[str, Callable[[nn.Module], GraphModule]] = {
    "whole": folded,
    "root": lambda plain: sharded(rewritten(plain)),
    "layers": lambda plain: sharded(rewritten(plain), layers=True),
    "folded": lambda plain: sharded(folded(plain)),
}


def forms(plain: nn.Module) -> dict[str, GraphModule]:
    return {name: make(plain) for name, make in FORMS.items()}


# Checkpoints of torch.distributed.checkpoint


@case
def save(folder: Path) -> None:
    """Each form writes its own, under the keys and with the values of the original."""
    for name, graph_module in forms(model()).items():
        if name == "root":
            with without_gathering(graph_module, world()):
                dcp_save(fxopt.distributed_state_dict(graph_module), checkpoint_id=folder / f"{name}-{world()}")
        else:
            state = fxopt.distributed_state_dict(graph_module)
            dcp_save({"model": state, "step": 3}, checkpoint_id=folder / f"{name}-{world()}")
    plain = model(1)
    fully_shard(plain, mesh=init_device_mesh("cpu", (world(),)))
    dcp_save(plain.state_dict(), checkpoint_id=folder / f"plain-{world()}")


@case
def load_into_plain(folder: Path) -> None:
    """What was saved on 2 and on 4 goes into the model as it was written."""
    for count in (2, 4):
        for name in FORMS:
            plain, before = model(2), model()
            state = plain.state_dict() if name == "root" else {"model": plain.state_dict(), "step": 0}
            dcp_load(state, checkpoint_id=folder / f"{name}-{count}")
            if name in ("root", "layers"):
                agree(plain.state_dict(), before)
            same(plain(images()), before(images()))


@case
def load(folder: Path) -> None:
    """What two processes saved of a plain model goes into each form; what they saved of a rewritten one, into one."""
    for source, origin, names in (("plain", model(1), [*FORMS]), ("root", model(), ["folded"])):
        for name in names:
            graph_module = FORMS[name](model(2))
            state = fxopt.distributed_state_dict(graph_module)
            if name == "root":
                with without_gathering(graph_module, min(2, world())):
                    dcp_load(state, checkpoint_id=folder / f"{source}-2")
            else:
                dcp_load(state, checkpoint_id=folder / f"{source}-2")
            same(graph_module(images()), origin(images()))
            if name != "folded":
                same(whole(graph_module.get_parameter("head.weight")), origin.head.weight)


@case
def save_later(folder: Path) -> None:
    """An asynchronous save takes the values of its moment."""
    graph_module = sharded(rewritten(model()))
    work = async_save(fxopt.distributed_state_dict(graph_module), checkpoint_id=folder / "later")
    saving: Any = work
    saving.result()
    plain = model(2)
    dcp_load(plain.state_dict(), checkpoint_id=folder / "later")
    agree(plain.state_dict(), model())


@case
def refuse_trained_stand_ins(folder: Path) -> None:
    """All processes refuse what one of them has trained."""
    graph_module = sharded(rewritten(model()))
    (name,) = (
        key for key, _ in graph_module.named_parameters() if key.startswith("blocks.0.") and "merged.bias" in key
    )
    with torch.no_grad():
        graph_module.get_parameter(name).add_(1.0)
    for function in (fxopt.distributed_state_dict, fxopt.original_state_dict):
        with_error(NotReversibleError, "stand-in values", partial(function, graph_module))


def with_error(kind: type[Exception], text: str, function: Callable[[], object]) -> None:
    try:
        function()
    except kind as error:
        assert text in str(error), error
    else:
        raise AssertionError(f"no {kind.__name__} with {text!r}")


# FSDP2 on rewritten graph modules


@case
def train(folder: Path) -> None:
    """Losses and weights after some steps are those of one process, with the batch split over all."""
    for layers in (False, True):
        plain, rank = rewritten(model(bias=True)), distributed.get_rank()
        shards = sharded(rewritten(model(bias=True)), layers=layers)
        optimizers = [torch.optim.AdamW(each.parameters(), 0.01) for each in (plain, shards)]
        for step in range(3):
            x = images(step)
            plain(x).square().mean().backward()
            shards(x.chunk(world())[rank]).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            same(shards(x), plain(x))  # and leaves what was gathered at the root
        expected = fxopt.original_state_dict(plain)
        for key, tensor in fxopt.original_state_dict(shards).items():
            same(whole(tensor), expected[key])


@case
def states(folder: Path) -> None:
    """The original's checkpoint comes back in every state, and goes in again, also from whole tensors."""
    for name, graph_module in forms(model()).items():
        for state_of in range(1 if name == "whole" else 4):
            prepare = partial(_bring_into, state_of, graph_module)
            prepare()
            state = {key: value.clone() for key, value in fxopt.original_state_dict(graph_module).items()}
            if "folded" not in name and name != "whole":
                agree(state, model())
            same(inference(graph_module), model()(images()))
            prepare()
            other = model(3)
            found = fxopt.load_original_state_dict(graph_module, other.state_dict())
            assert str(found) == "<All keys matched successfully>"
            same(inference(graph_module), other(images()))
            fxopt.load_original_state_dict(graph_module, state)  # sharded tensors
            same(inference(graph_module), model()(images()))


@case
def numbers(folder: Path) -> None:
    """A number without dimensions, such as a counter of batches, is written wherever it is replicated."""
    counter = distribute_tensor(torch.tensor(3), init_device_mesh("cpu", (world(),)), [Replicate()])
    local_region("counter", counter).values.fill_(7)
    assert counter.to_local().item() == 7


def _bring_into(state: int, graph_module: GraphModule) -> None:
    """As it is made, after a call that records gradients, after a step backward, after a call that does not."""
    if state:
        with torch.set_grad_enabled(state < 3):
            result = graph_module(images())
        if state == 2:
            result.sum().backward()


@case
def failures_and_undo(folder: Path) -> None:
    """A checkpoint that does not fit leaves everything as it was; what cannot be undone says so."""
    for layers in (False, True):
        graph_module = rewritten(model())
        if layers:  # and not the root
            fully_shard(graph_module.get_submodule("blocks.0.k_v_q_merged"))
        else:
            sharded(graph_module)
        broken = {**model(3).state_dict(), "head.bias": torch.zeros(6)}
        with_error(CheckpointError, "has shape (6,)", partial(fxopt.load_original_state_dict, graph_module, broken))
        with_error(FxoptError, "is sharded" if layers else "given to fully_shard", partial(fxopt.undo, graph_module))
        agree(fxopt.original_state_dict(graph_module), model())
        if layers:
            fxopt.ChangeTrueDivToMulByInverse()(graph_module, expect=2)
            fxopt.undo(graph_module)
        same(graph_module(images()), model()(images()))


# Live models that are sharded


def follow(live: nn.Module, plain: nn.Module, inputs: Callable[[int], Tensor] = images, *, infers: bool = True) -> None:
    """Outputs, gradients and steps of a compiled model are those of the plain one; no rewritten graph ran."""
    torch._dynamo.reset()
    live.compile(backend="fxopt")
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (live, plain)]
    for step in range(2):
        x = inputs(step)
        if infers:
            with torch.no_grad():
                same(output(live, x), output(plain, x))
        found, expected = output(live, x), output(plain, x)
        same(found, expected)
        for result in (found, expected):
            loss: Any = result.square().mean()
            loss.backward()
        for (name, one), other in zip(live.named_parameters(), plain.parameters(), strict=True):
            assert (one.grad is None) == (other.grad is None), name
            if one.grad is not None and other.grad is not None:
                same(whole(one.grad), other.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.set_grad_enabled(not infers):
        same(output(live, x), output(plain, x))
    left_alone = [graph.reason.reason for graph in fxopt_compile.history() if graph.reason]
    assert "sharded" in left_alone, fxopt_compile.history()
    assert set(left_alone) <= {"sharded", "training"}, left_alone
    assert not sum(graph.calls for graph in fxopt_compile.history())


def output(model: nn.Module, x: Tensor) -> Tensor:
    result = model(x)
    return whole(getattr(result, "logits", result))


@case
def live_fully_sharded(folder: Path) -> None:
    """Block by block, and then the rest."""
    live, plain = model(), model()
    for block in live.blocks:
        fully_shard(block)
    fully_shard(live)
    follow(live, plain)


@case
def live_tensor_parallel(folder: Path) -> None:
    """Columns, then rows; what was not parallelized stays plain."""
    live, plain = model(), model()
    mesh = init_device_mesh("cpu", (world(),))
    for block in live.blocks:
        plan = {"q": ColwiseParallel(output_layouts=Replicate()), "o": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(block, mesh, plan)
    follow(live, plain)


@case
def live_tensor_plan(folder: Path) -> None:
    """A model that transformers loads by the plan of its class; with gradients only, since dynamo takes long for it."""
    import transformers
    from transformers.distributed import DistributedConfig

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=64, use_cache=False)
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).eval()
    if distributed.get_rank() == 0:
        plain.save_pretrained(folder / "llama")
    distributed.barrier()
    plan = DistributedConfig(tp_size=world(), tp_plan="auto")
    live = transformers.LlamaForCausalLM.from_pretrained(folder / "llama", distributed_config=plan)
    assert isinstance(live.model.layers[0].self_attn.q_proj.weight, DTensor)

    def tokens(step: int) -> Tensor:
        return torch.arange(step, step + 20).view(2, 10)

    same(output(live, tokens(0)), output(plain, tokens(0)))
    follow(live, plain, tokens, infers=False)
