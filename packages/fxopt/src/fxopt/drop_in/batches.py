"""A folder that fxopt wrote as a callable for batches of rows, for the workers of Ray Data, Spark and the like."""

from __future__ import annotations

import importlib
import io
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxopt_capture import load
from fxopt_core import PreconditionError

__all__ = ["BatchEncoder"]


class BatchEncoder:
    """Computes vectors, scores or logits of batches of rows with a model that ``fxopt optimize FOLDER -o OUT`` wrote.

    The model is opened when the object is made. A pickle of it holds only the folder and the options, and opens the
    model where it is unpickled: the folder must be there under the same path.

    What a row is depends on the model:

    - a ``SentenceTransformer``, or an encoder of texts without a head: a text becomes a vector, by default the mean
      over its tokens;
    - a ``CrossEncoder``: two texts become a score, or one for each label;
    - a model ``...ForSequenceClassification``: a text becomes logits;
    - a model ``...ForImageClassification``, or an encoder of images: an image (of PIL, an array of bytes, or an encoded
      file) becomes logits, or the pooled output.

    Args:
        folder: what the command wrote, or ``save`` and ``save_pretrained`` of an optimized model.
        column: the column with the inputs, where batches have columns; a `CrossEncoder` needs two.
        output: the column with the result.
        batch_size: rows in one call of the model; texts of similar length go together.
        threads: how many threads torch uses from now on, **in the whole process**, tokenizers too if it is 1; None
            changes nothing. A worker for each core, with one thread, is faster than several threads in one worker.
        options: for each call of ``encode`` or ``predict``, such as ``normalize_embeddings=True``.

    Raises:
        PreconditionError: fxopt did not write the folder, or its model does not give rows of numbers; in a call, a
            column is missing, or a row is null or of another kind.

    Example:
        >>> encoder = BatchEncoder("minilm-fast")  # doctest: +SKIP
        >>> encoder({"id": ids, "text": texts})["embedding"].shape  # doctest: +SKIP
        (1000, 384)
        >>> dataset.map_batches(BatchEncoder, fn_constructor_args=["minilm-fast"], batch_size=512)  # doctest: +SKIP
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        column: str | Sequence[str] = "text",
        output: str = "embedding",
        *,
        batch_size: int = 32,
        threads: int | None = 1,
        **options: Any,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
            if threads == 1:
                os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.folder = str(Path(folder).absolute())
        self._given = {"column": column, "output": output, "batch_size": batch_size, "threads": threads, **options}
        self._columns, self._output = [column] if isinstance(column, str) else [*column], output
        self._checked, self._example, self._compute = _opened(Path(self.folder), {"batch_size": batch_size, **options})

    def encode(self, inputs: Any, **options: Any) -> Any:
        """Return what ``SentenceTransformer.encode``, or ``predict`` of a `CrossEncoder`, returns for the same inputs.

        Args:
            inputs: a list, an array or another iterable of inputs, for an array with a row for each (of the right
                width also for no inputs); or one input, for its row.
            options: for this call, such as ``prompt_name="query"`` or ``batch_size=8``.

        Raises:
            PreconditionError: The inputs, or a row among them, are something else.
        """
        try:
            one = self._checked(inputs)
        except (TypeError, ValueError, OSError) as error:
            if isinstance(inputs, str | bytes | Mapping) or not isinstance(inputs, Iterable):
                raise PreconditionError(
                    f"encode is given {error}, or a list of such; a batch of columns is given to the object itself"
                ) from error
        else:
            return self._compute([one], **options)[0]
        rows = [self._row(place, each) for place, each in enumerate(inputs)]
        return self._compute(rows, **options) if rows else self._compute([self._checked(self._example)], **options)[:0]

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the columns of a batch, and the result as one more."""
        missing = [name for name in self._columns if name not in batch]
        if missing:
            raise PreconditionError(
                f"the batch has no column {missing[0]!r}, only {', '.join(map(repr, batch))}: name the inputs with "
                f"{type(self).__name__}(folder, column=...)"
            )
        found = [batch[name] for name in self._columns]
        inputs = found[0] if len(found) == 1 else list(zip(*found, strict=True))
        return {**batch, self._output: self.encode(inputs)}

    def __reduce__(self) -> tuple[Callable[[], BatchEncoder], tuple[()]]:
        return partial(type(self), self.folder, **self._given), ()

    def _row(self, place: int, given: Any) -> Any:
        try:
            return self._checked(given)
        except (TypeError, ValueError, OSError) as error:
            raise PreconditionError(
                f"row {place} of the batch (the first is row 0; column {' and '.join(self._columns)}): {error}"
            ) from error


def _opened(folder: Path, options: dict[str, Any]) -> tuple[Callable[[Any], Any], Any, Callable[..., Any]]:
    """Return a function that checks and converts a row, an example of a row, and a function from rows to an array."""
    configs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("config.json"))]
    config = next((config for config in configs if isinstance(config, dict) and "fxopt" in config), None)
    if config is None:
        raise PreconditionError(
            f"{str(folder)!r} is not a folder that fxopt wrote: make one with `fxopt optimize FOLDER -o OUT`, and make "
            "sure that every worker finds it under this path"
        )
    (head,) = config["architectures"]
    has_head, of_images = "For" in head, (folder / "preprocessor_config.json").exists()
    if (folder / "modules.json").exists() or not (has_head or of_images):
        library = importlib.import_module("sentence_transformers")
        about = folder / "config_sentence_transformers.json"
        kind = json.loads(about.read_text(encoding="utf-8")).get("model_type") if about.exists() else None
        if kind == "CrossEncoder":
            predict = library.CrossEncoder(str(folder), device="cpu").predict
            return _pair, ("a", "a"), partial(predict, show_progress_bar=False, **options)
        if kind in (None, "SentenceTransformer"):
            encode = library.SentenceTransformer(str(folder), device="cpu").encode
            return _text, "a", partial(encode, show_progress_bar=False, **options)
    elif head.endswith(("ForSequenceClassification", "ForImageClassification")) or not has_head:
        transformers = importlib.import_module("transformers")
        model = load(folder / Path(config["fxopt"]["archive"]).name)
        if of_images:
            image = importlib.import_module("PIL.Image").new("RGB", (32, 32))
            process = partial(transformers.AutoImageProcessor.from_pretrained(folder), return_tensors="pt")
            return _image, image, partial(_array, model, process, **options)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        process = partial(tokenizer, padding=True, truncation=True, return_tensors="pt")
        return _text, "a", partial(_array, model, process, **options)
    raise PreconditionError(
        f"{str(folder)!r} holds a {kind if (folder / 'modules.json').exists() else head}, which does not give a row of "
        "numbers for each input: open it with its own library"
    )


def _array(
    model: Any, process: Callable[..., Mapping[str, Any]], rows: list[Any], *, batch_size: int, **options: Any
) -> Any:
    """Return the logits or pooled outputs of rows, texts of similar length in one call."""
    order = sorted(range(len(rows)), key=lambda place: len(rows[place]) if isinstance(rows[place], str) else 0)
    found: list[Any] = [None] * len(rows)
    with torch.inference_mode():
        for start in range(0, len(rows), batch_size):
            places = order[start : start + batch_size]
            outputs = model(**process([rows[place] for place in places], **options))
            values = outputs["logits"] if "logits" in outputs else outputs["pooler_output"]
            for place, value in zip(places, values.float().flatten(1), strict=True):
                found[place] = value
    return torch.stack(found).numpy()


def _text(given: Any) -> str:
    given = given.item() if getattr(given, "ndim", None) == 0 else given
    if not isinstance(given, str):
        raise TypeError(f"{_named(given)}, where a text is expected; fill or drop such rows before")
    return str(given)  # NumPy has strings of its own


def _pair(given: Any) -> tuple[str, str]:
    if isinstance(given, str) or not hasattr(given, "__len__") or len(given) != 2:
        raise TypeError(f"{_named(given)}, where two texts are expected: name two columns, column=(...)")
    return _text(given[0]), _text(given[1])


def _image(given: Any) -> Any:
    library = importlib.import_module("PIL.Image")
    if isinstance(given, bytes):
        return library.open(io.BytesIO(given)).convert("RGB")
    if str(getattr(given, "dtype", "")) == "uint8":
        return library.fromarray(given).convert("RGB")
    if not isinstance(given, library.Image):
        raise TypeError(f"{_named(given)}, where a PIL image, an array of bytes or an encoded file is expected")
    return given.convert("RGB")


def _named(given: Any) -> str:
    return (
        "null" if given is None or (not getattr(given, "ndim", 0) and given != given) else f"a {type(given).__name__}"
    )
