"""The backend as torch.compile sees it: options, gradients, what is reported, and the way back."""

from __future__ import annotations

import copy
import io
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from live_models import EVERYTHING, Attention, agrees, compiled, images, network, rewrites, running, same
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

import fxopt_compile
from fxopt_compile.settings import Settings
from fxopt_core import LintAndRecompile, PassOptionError, PreconditionError, Registry, Transformation, VerificationError


def test_torch_finds_the_backend_by_its_name() -> None:
    """By the entry point, without an import."""
    (found,) = entry_points(group="torch_dynamo_backends", name="fxopt")
    assert found.load() is fxopt_compile.fxopt
    assert "fxopt" in torch._dynamo.list_backends()


# --- Options


def packed(net: nn.Module) -> int:
    """Return how many layers were packed, by the kernels where they are installed."""
    found = rewrites(net)
    return found.get("fuse-linears", 0)


def test_without_options_the_pipeline_fits_the_device() -> None:
    """``cpu-inference`` on CPUs, if fxopt-cpu is there."""
    net, x = network(), images()
    agrees(torch.compile(net, backend="fxopt"), net, x)
    (graph,) = fxopt_compile.history(net)
    assert graph.pipeline == "cpu-inference"
    assert packed(net) >= 2
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Registry, "pipelines", lambda self: {"inference": "merge-linears"})
        patch.setattr(Registry, "pipeline", lambda self, text: LintAndRecompile())
        assert Settings().passes([torch.empty(1, device="meta")])[0] == "inference"
        patch.setattr(Registry, "pipelines", lambda self: {})
        assert Settings().passes([x])[0] == "inference"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pipelin": "merge-linears"}, "no option 'pipelin' of 'merge-linears'; expected \"pipeline\""),
        ({"pipeline": 3}, "no option 'pipeline' of 3"),
        ({"then": "aot"}, "no option 'then' of 'aot'"),
        ({"verify": "yes"}, "no option 'verify' of 'yes'"),
        ({"pipeline": "merge-liners"}, "'merge-liners'.*merge-linears"),
        ({"pipeline": "merge-linears{group=2}"}, "group"),
    ],
)
def test_what_is_no_option_is_one_clear_error(options: dict[str, Any], message: str) -> None:
    """At the first call, which is when torch asks a backend."""
    fast = torch.compile(Attention(), backend="fxopt", options=options)
    with pytest.raises(BackendCompilerFailed, match=message) as caught:
        fast(torch.randn(2, 3, 8))
    assert isinstance(caught.value.inner_exception, PassOptionError)


@pytest.mark.parametrize("keywords", [{"fullgraph": True}, {"dynamic": True}])
def test_torch_compiles_own_arguments(keywords: dict[str, Any]) -> None:
    """They are dynamo's."""
    net = network()
    fast = compiled(net, **keywords)
    for size in (6, 7, 9):
        agrees(fast, net, images(size=size))
    assert len(fxopt_compile.history(net)) == (1 if keywords.get("dynamic") else 2)


def test_a_mode_is_for_inductor_alone() -> None:
    """It changes nothing."""
    net, x = network(), images()
    agrees(torch.compile(net, backend="fxopt", mode="reduce-overhead"), net, x)
    assert packed(net) >= 2


def test_model_compile_and_undo() -> None:
    """``model.compile`` changes how the model is called, and undo changes it back."""
    net, x = network(), images()
    net.compile(backend="fxopt", options={"pipeline": EVERYTHING})
    agrees(net, copy.deepcopy(net), x)
    assert fxopt_compile.history(net)[0].rewritten
    assert fxopt_compile.undo(net) is net
    assert net._compiled_call_impl is None
    calls = fxopt_compile.history()[0].calls
    agrees(net, net, x)
    assert fxopt_compile.history()[0].calls == calls
    for function in (fxopt_compile.undo, fxopt_compile.history):
        with pytest.raises(PreconditionError, match=f"{function.__name__} is given a str, expected a model"):
            function("model")  # type: ignore[arg-type]  # on purpose


def test_undo_of_a_compiled_model_is_the_model() -> None:
    """Nothing that was made of its weights is kept."""
    net, fast, x = running(network(), images())
    assert fxopt_compile.undo(fast) is net
    assert not [binding for graph in fxopt_compile.backend.GRAPHS for binding in graph._bindings]
    agrees(fast, net, x)


def test_copies_and_pickles_of_a_compiled_model() -> None:
    """A copy has weights of its own, and dynamo's graph serves both."""
    net, fast, x = running(network(), images())
    other = copy.deepcopy(fast)
    with torch.no_grad():
        other.attention.q.weight.add_(1)
    agrees(other, other._orig_mod, x)
    agrees(fast, net, x)
    file = io.BytesIO()
    torch.save(fast.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    agrees(other, net, x)


# --- Gradients


def gradients(model: Any, net: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """The gradients of all parameters, and of the input."""
    net.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    return {"x": x.grad, **{name: each.grad for name, each in net.named_parameters()}}


def test_gradients_are_those_of_eager() -> None:
    """Of every parameter, bit for bit; between calls without gradients, which take the fast way."""
    net, x = network(), images()
    fast = compiled(net)
    for _ in range(2):
        agrees(fast, net, x)
        same(gradients(fast, net, x), gradients(net, net, x))
        net.train()
        same(gradients(fast, net, x), gradients(net, net, x))
        net.eval()
    reasons = [graph.reason.reason for graph in fxopt_compile.history(net) if graph.reason]
    assert reasons == ["training", "training"]


def test_frozen_models_are_fast_without_no_grad() -> None:
    """Nothing asks for gradients; once something does, they are eager's."""
    net, x = network().requires_grad_(False), images()
    fast = compiled(net)
    for _ in range(3):
        same(fast(x), net(x))
    assert fxopt_compile.history(net)[0].calls == 3
    net.attention.q.requires_grad_(True)
    fast(x).sum().backward()
    assert net.attention.q.weight.grad is not None
    assert net.attention.k.weight.grad is None


def test_gradients_that_the_model_turns_on_itself() -> None:
    """Inside of no_grad."""

    class Inner(Attention):
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return torch.add(self.q(x), self.k(x))

    net, x = Inner(), torch.randn(2, 3, 8)
    fast = compiled(net)
    with torch.no_grad():
        for _ in range(3):
            found = fast(x)
            assert found.requires_grad == net(x).requires_grad
            same(found, net(x))


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    """Around a compiled block, which first runs without gradients if it is reentrant."""
    from torch.utils.checkpoint import checkpoint

    net, x = Attention().eval(), torch.randn(2, 3, 8)
    fast = compiled(net)
    same(gradients(lambda y: checkpoint(fast, y, use_reentrant=reentrant), net, x), gradients(net, net, x))


# --- Reports and verification


def test_the_history_says_what_was_rewritten_and_what_refused() -> None:
    """Graph by graph, also for a model that is not given as the compiled one."""
    net, x = network(), images()
    assert str(fxopt_compile.history(net)).startswith("dynamo has made no graphs with backend fxopt in this process: ")
    agrees(compiled(net, "fold-batch-norm,merge-linears"), net, x)
    history = fxopt_compile.history(net)
    (graph,) = history
    assert (graph.name, graph.reason, graph.calls, graph.plain_calls) == ("0/0", None, 3, 0)
    assert [rewrite.site for record in graph.records for rewrite in record.rewrites][-1] == "attention: q + k + v"
    heading, line, *details = str(history).splitlines()
    assert heading.split() == ["graph", "rewritten", "refused", "calls", "plain", "calls", "refreshes"]
    assert line.split()[0] == "0/0"
    assert "    merge-linears: 1 rewritten" in details
    assert not fxopt_compile.history(network())


def test_a_break_in_the_middle_makes_two_graphs() -> None:
    """Each with its passes."""

    class Broken(Attention):
        def forward(self, x: Tensor) -> Any:
            q, k = self.q(x), self.k(x)
            torch._dynamo.graph_break()
            v, o = self.v(x), self.o(x)
            return torch.softmax(q @ k.mT, -1) @ v + o

    net, fast, x = running(Broken().eval(), torch.randn(2, 5, 8))
    with torch.no_grad():
        net.q.weight.add_(1), net.v.weight.mul_(2)
    agrees(fast, net, x)
    assert [graph.rewritten > 0 for graph in fxopt_compile.history(net)] == [True, True]
    assert rewrites(net)["merge-linears"] == 2


def test_verify_compares_each_graph_once() -> None:
    """Without changing what it computes, also where it draws random numbers and writes its input."""

    class Noisy(Attention):
        def forward(self, x: Tensor) -> Any:
            x.add_(1)
            return self.q(x) + self.k(x) + torch.rand_like(x)

    net = Noisy().eval()
    fast = compiled(net, verify=True)
    for _ in range(2):
        one, two = torch.ones(2, 3, 8), torch.ones(2, 3, 8)
        with torch.no_grad():
            torch.manual_seed(1)
            found = fast(one)
            torch.manual_seed(1)
            same((found, one), (net(two), two))
    assert fxopt_compile.history(net)[0].calls == 2


class Wrong(Transformation):
    """Negates the result."""

    def transform(self, graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
        (output,) = graph_module.graph.find_nodes(op="output")
        value = output.args[0][0]
        with graph_module.graph.inserting_before(output):
            output.args = ((graph_module.graph.call_function(torch.neg, (value,)),),)
        return graph_module


def test_verify_finds_a_wrong_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the graph runs as dynamo made it from then on."""
    monkeypatch.setattr(Settings, "passes", lambda self, tensors: ("wrong", Wrong()))
    net, x = Attention().eval(), torch.randn(2, 3, 8)
    fast = compiled(net, verify=True)
    with (
        torch.no_grad(),
        pytest.raises(VerificationError, match=r"graph 0/0: result 0 of the rewritten graph differs in"),
    ):
        fast(x)
    agrees(fast, net, x)


# C++ is compiled in a third of the time without vectors, precompiled headers and a look at what the compiler can do.
QUICK = {"cpp.simdlen": 1, "cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # by inductor itself
def test_inductor_runs_the_rewritten_graph() -> None:
    """With weights as live as by eager."""
    from torch._inductor import config

    net, x = Attention().eval(), torch.randn(2, 3, 8)
    fast = compiled(net, "merge-linears", then="inductor")
    graphs = counters["stats"]["unique_graphs"]
    try:
        with config.patch(QUICK):
            agrees(fast, net, x)
    except torch._inductor.exc.InductorError as error:  # no compiler for C++
        pytest.skip(str(error).partition("\n")[0])
    assert counters["stats"]["unique_graphs"] == graphs + 2  # the rewritten one is compiled, too
    for change in (lambda: net.q.weight.add_(1), lambda: setattr(net.q.weight, "data", torch.randn(8, 8))):
        with torch.no_grad():
            change()
        agrees(fast, net, x)
    assert fxopt_compile.history(net)[0].refreshes == 2


@pytest.mark.nightly  # C++ for both directions is compiled for as long as all of this file's tests take
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # by inductor itself
def test_inductor_computes_gradients() -> None:
    net, x = Attention().eval(), torch.randn(2, 3, 8)
    try:
        same(gradients(compiled(net, "merge-linears", then="inductor"), net, x), gradients(net, net, x))
    except torch._inductor.exc.InductorError as error:  # no compiler for C++
        pytest.skip(str(error).partition("\n")[0])


class Numbers(nn.Module):
    """Attention with its numbers in attributes, and one that is an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.parts, self.scale, self.eps, self.rate = nn.Linear(16, 48), 0.3, 1e-3, 0.1

    def forward(self, x: Tensor, factor: float) -> Tensor:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.parts(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, scale=self.scale).transpose(1, 2).flatten(2)
        return F.dropout(F.layer_norm(y, (16,), eps=self.eps), self.rate, self.training) * factor


def test_numbers_that_modules_hold_are_constants_of_dynamic_graphs() -> None:
    model = Numbers().eval()
    live: Any = torch.compile(model, backend="fxopt", dynamic=True)
    with torch.inference_mode():
        for rows, factor in ((2, 1.5), (3, 0.5), (5, 2.5)):
            x = torch.randn(4, rows, 16)
            torch.testing.assert_close(live(x, factor), model(x, factor))
        (graph,) = fxopt_compile.history(live)
        (record,) = [record for record in graph.records if record.pass_name == "fuse-attention"]
        assert record.rewrites and not record.refusals
        model.scale = 0.7
        torch.testing.assert_close(live(x, 0.5), model(x, 0.5))
    assert len(fxopt_compile.history(live)) == 2
