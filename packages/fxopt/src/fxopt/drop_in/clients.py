"""Objects with a Hugging Face model in them: models of sentence-transformers, and pipelines of transformers.

A client is copied with a substitute for its model: first a recorder that notes how the client calls the model, on
examples that its own tokenizer or processor prepares, then the optimized graph.
"""

from __future__ import annotations

import copy
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import nn
from torch.export import Dim
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxopt.drop_in.stored_dtype import in_float32, slow_dtype
from fxopt_core import PreconditionError, Transformation, kept
from fxopt_tools import Inputs

_SHORT, _LONG = "A short text.", "Another text, which is somewhat longer than the first one is."
_LONGER = "The old mill by the river has been closed for years, but on quiet evenings people still hear its wheel turn."
# Two texts of different lengths in one call, so that one is padded, and at the end one text alone, which is not.
TEXTS = ([_SHORT, _LONG], [f"{_LONGER} {_LONG}"])
SOUNDS = (1.0, 1.7)  # seconds
_TEXT_TASKS = ("feature-extraction", "fill-mask", "text-classification", "token-classification")
_IMAGE_TASKS = ("image-classification", "image-feature-extraction")
_AUDIO_TASKS = ("audio-classification", "automatic-speech-recognition")
_OTHERWISE = "optimize its model by itself, fxopt.optimize(model, kwargs=inputs), or model.compile(backend='fxopt')"


class Client(Protocol):
    """A model of sentence-transformers or a pipeline, as type checkers see both."""

    def preprocess(self, *args: Any, **kwargs: Any) -> Any:
        """Turn what a user gives into inputs of the model."""


ClientT = TypeVar("ClientT", bound=Client)
#: Makes a graph of a model, example calls, calls to calibrate with, ``dynamic_shapes``, and a pass to run first.
Optimize = Callable[
    [nn.Module, Sequence[Inputs], Sequence[Inputs], Mapping[str, Any] | None, Transformation | None], GraphModule
]


def is_client(found: object) -> bool:
    """Whether an object is a model of sentence-transformers or a pipeline; imports neither library.

    >>> is_client(nn.Linear(1, 1))
    False
    """
    return _is_of_sentence_transformers(found) or _is_a(found, "transformers.pipelines.base", "Pipeline")


def with_models_replaced(
    client: ClientT, optimize: Optimize, pipeline: object, calibrate: Callable[[Any], object] | None = None
) -> ClientT:
    """Return a copy of a client whose models are graphs; the client stays as it is.

    ``pipeline`` is what ``optimize`` runs, and ``calibrate`` calls a client with inputs like those to come.

    Raises:
        PreconditionError: It has no model for which a graph can stand, or one in training mode.
    """
    recording, recorders = _recorded(client)
    examples = [recorder.calls for recorder in recorders]
    if calibrate is not None:
        # `examples` keeps the calls with examples; from here on, recorders collect those to calibrate with.
        for recorder in recorders:
            recorder.calls = []
        with _unchanged(recorders):
            calibrate(recording)
    memo: dict[int, Any] = {}
    for recorder, calls in zip(recorders, examples, strict=True):
        model, noted = recorder.model, recorder.calls
        first = slow_dtype(model, pipeline)
        if first is not None:
            model = copy.deepcopy(model).float()
            calls, noted = ([in_float32(call) for call in each] for each in (calls, noted))
            around: Any = recording
            around = around if isinstance(around, nn.Module) else around.model
            around.float()  # layers after the model, which get its results
        memo[id(recorder)] = optimize(model, calls, noted, varying_sizes(calls[0]), first)
    # The memo gives each graph as the copy of its recorder: wherever the client refers to the recorder, the copy refers
    # to the graph.
    return copy.deepcopy(recording, memo)


def noted_calls(model: nn.Module, calibrate: Callable[[Any], object]) -> list[Inputs]:
    """Return the calls of a model that a function makes."""
    recorder = _Recorder(model)
    with _unchanged([recorder]):
        calibrate(recorder)
    return recorder.calls


@contextmanager
def _unchanged(recorders: Sequence[_Recorder]) -> Iterator[None]:
    """Restore models after a ``with`` block that calls them; the random numbers that it draws stay drawn."""
    with ExitStack() as stack:
        for recorder in recorders:
            stack.enter_context(kept(recorder.model, buffers=True))
        yield
        state = torch.get_rng_state()
    # Otherwise a caller who draws data to calibrate with would get the same numbers again, as data to compare on.
    torch.set_rng_state(state)


def calls_of(client: Client) -> tuple[nn.Module, list[Inputs]]:
    """Return the one model of a client, and the calls that it gets with examples.

    Raises:
        PreconditionError: It has none, or several.
    """
    _, recorders = _recorded(client)
    if len(recorders) > 1:
        kinds = " and ".join(type(recorder.model).__name__ for recorder in recorders)
        raise PreconditionError(
            f"this {type(client).__name__} has several models, {kinds}; optimize it in Python, and save that"
        )
    return recorders[0].model, recorders[0].calls


def _recorded(client: ClientT) -> tuple[ClientT, list[_Recorder]]:
    """Return a copy of a client with recorders in place of its models, which hold the calls with examples."""
    recorders = [_Recorder(model) for model in _models(client)]
    recording = copy.deepcopy(client, {id(recorder.model): recorder for recorder in recorders})
    names = [f"the {type(recorder.model).__name__} of this {type(client).__name__}" for recorder in recorders]
    for name, recorder in zip(names, recorders, strict=True):
        if recorder.model.training:
            raise PreconditionError(f"{name} is in training mode, where it is random: call eval() first")
    with _unchanged(recorders):
        for call in _calls(recording):
            call()
    for name, recorder in zip(names, recorders, strict=True):
        if not recorder.calls:
            raise PreconditionError(f"{name} was not called with the examples; {_OTHERWISE}")
    return recording, recorders


class _Recorder(nn.Module):
    """Stands in for a model, and records the tensors and numbers that it is called with."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._recorded = (model,)  # no submodule: `eval()` and `to()` of a copy are not meant for the caller's model
        self.calls: list[Inputs] = []
        self.eval()

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._recorded[0]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Record a call, and make it."""
        with torch.inference_mode(False):  # clients call in it, and its tensors are of no use outside
            noted = {name: value for name, value in kwargs.items() if _counts(value)}
            args_noted, noted = pytree.tree_map_only(torch.Tensor, torch.clone, (args, noted))
            self.calls.append(Inputs(*args_noted, **noted))
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(vars(self)["_recorded"][0], name)


def _counts(value: object) -> bool:
    """Whether an argument is more than a flag that repeats the model's configuration."""
    return type(value) is int or any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


def _models(client: Any) -> list[nn.Module]:
    """Return the models of a client that graphs can stand for."""
    if _is_of_sentence_transformers(client):
        return _models_of_modules(client)
    model = client.model
    if not model.can_generate():
        return [model]
    # The encoder runs once for each input, so that a graph can stand for it; the decoder has a growing cache.
    if model.config.is_encoder_decoder:
        return [model.get_encoder()]
    raise PreconditionError(
        f"the {type(model).__name__} of this pipeline generates, with a cache that grows in each call: keep it, and "
        "compile it: pipe.model.compile(backend='fxopt')"
    )


def _models_of_modules(client: Any) -> list[nn.Module]:
    holders = [
        module
        for module in client.modules()
        if _is_a(module, "sentence_transformers.base.modules.transformer", "Transformer")
    ]
    if not holders:
        kinds = ", ".join(type(module).__name__ for module in client)
        raise PreconditionError(
            f"this {type(client).__name__} consists of {kinds}, and contains no transformer: there is nothing to "
            "rewrite in table lookups"
        )
    methods = {each["method"] for module in holders for each in module.modality_config.values()} - {"forward"}
    if methods:
        raise PreconditionError(
            f"this {type(client).__name__} calls {' and '.join(sorted(methods))} of its model, and a graph replaces "
            f"only `forward`: compile it, model.compile(backend='fxopt', dynamic=True)"
        )
    return list({id(module.model): module.model for module in holders}.values())


def _calls(client: Any) -> Iterator[Callable[[], object]]:
    """Yield calls of a client with examples."""
    if _is_of_sentence_transformers(client):
        yield from _calls_of_modules(client)
        return
    task, tokenizer = client.task, client.tokenizer
    if task in _TEXT_TASKS:
        mask = f" {tokenizer.mask_token}" if task == "fill-mask" else ""
        for texts in TEXTS:
            # Texts of different lengths form a batch only with padding.
            size = len(texts) if tokenizer.pad_token_id is not None else 1
            yield partial(client, [text + mask for text in texts], batch_size=size)
    elif task == "zero-shot-classification":
        yield from (partial(client, text, candidate_labels=["one", "another label"]) for text in (_SHORT, _LONG))
    elif task in _IMAGE_TASKS:
        yield from (partial(client, images, batch_size=len(images)) for images in images())
    elif task in _AUDIO_TASKS:
        yield from (partial(client, sound(seconds, client.feature_extractor.sampling_rate)) for seconds in SOUNDS)
    else:
        known = ", ".join((*_TEXT_TASKS, "zero-shot-classification", *_IMAGE_TASKS, *_AUDIO_TASKS))
        raise PreconditionError(f"no examples are known for a pipeline of {task!r}, only for {known}; {_OTHERWISE}")


def _calls_of_modules(client: Any) -> Iterator[Callable[[], object]]:
    kinds = client.modalities
    if "text" in kinds:
        batches: Sequence[list[Any]] = TEXTS
    elif "image" in kinds:
        batches = images()
    else:
        raise PreconditionError(f"no examples are known for a {type(client).__name__} of {kinds}; {_OTHERWISE}")
    for batch in batches:
        if hasattr(client, "predict"):
            yield partial(client.predict, [(each, batch[0]) for each in batch], show_progress_bar=False)
            continue
        for task in getattr(client[0], "sub_modules", (None,)):  # the ways of a router
            way = {} if task is None else {"task": task}
            yield partial(client.encode, batch, show_progress_bar=False, **way)


def images() -> Sequence[list[Any]]:
    """Return two images in one call, and one by itself."""
    gradient = importlib.import_module("PIL.Image").linear_gradient("L").convert("RGB")
    return ([gradient, gradient.rotate(90)], [gradient.rotate(180)])


def sound(seconds: float, rate: int) -> Any:
    """Return a rising tone."""
    time = torch.arange(int(seconds * rate)) / rate
    # The frequency is the derivative of (200 + 100 t) t: 200 Hz at first, and 200 Hz more with each second.
    return torch.sin(2 * math.pi * (200 + 100 * time) * time).numpy()


def varying_sizes(call: Inputs) -> Mapping[str, Any] | None:
    """Return the sizes that vary although `capture` cannot tell: the lengths of sounds."""
    if "input_values" not in call.kwargs:
        return None
    return {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in call.kwargs}


def _is_of_sentence_transformers(found: object) -> bool:
    return _is_a(found, "sentence_transformers.base.model", "BaseModel")


def _is_a(found: object, module: str, name: str) -> bool:
    return any((cls.__module__, cls.__name__) == (module, name) for cls in type(found).__mro__)
