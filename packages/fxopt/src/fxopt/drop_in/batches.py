"""A folder that fxopt wrote as a callable for batches of rows, for the workers of Ray Data, Spark and the like."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fxopt_core import PreconditionError, type_text

__all__ = ["BatchEncoder"]


class BatchEncoder:
    """Computes vectors or scores of batches of texts with a model that ``fxopt optimize FOLDER -o OUT`` wrote.

    The model is opened when the object is made. A pickle of it holds only the folder and the options, and opens the
    model where it is unpickled: the folder must be there under the same path.

    What a row is depends on the model:

    - a ``SentenceTransformer``, or an encoder of texts without a head: a text becomes a vector, by default the mean
      over its tokens;
    - a ``CrossEncoder``, or a model ``...ForSequenceClassification``: two texts become a score, or one for each label.

    Args:
        folder: what the command wrote, or ``save`` and ``save_pretrained`` of an optimized model.
        column: the column with the inputs, where batches have columns; a `CrossEncoder` needs two.
        output: the column with the result.
        batch_size: rows in one call of the model; texts of similar length go together.
        threads: how many threads torch uses from now on, **in the whole process**, tokenizers too if it is 1; None
            changes nothing. A worker for each core, with one thread, is faster than several threads in one worker.
        options: for each call of ``encode`` or ``predict``, such as ``normalize_embeddings=True``.

    Raises:
        PreconditionError: fxopt did not write the folder, or its model gives neither vectors nor scores of texts; in a
            call, a column is missing, or a row is null or of another kind.

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
        self._checked, compute = _opened(Path(self.folder))
        self._compute = partial(compute, show_progress_bar=False, batch_size=batch_size, **options)

    def encode(self, inputs: Iterable[Any], **options: Any) -> Any:
        """Return what ``SentenceTransformer.encode``, or ``predict`` of a `CrossEncoder`, returns for these inputs.

        Args:
            inputs: a list, an array or another iterable of inputs, for an array with a row for each, of the right width
                also for no inputs.
            options: for this call, such as ``prompt_name="query"`` or ``batch_size=8``.

        Raises:
            PreconditionError: The inputs, or a row among them, are something else.
        """
        if isinstance(inputs, str | bytes | Mapping) or not isinstance(inputs, Iterable):
            raise PreconditionError(
                f"encode is given {type_text(inputs)}, expected a list or an array of inputs: [text] for one text; a "
                "batch of columns is given to the object itself"
            )
        rows = [self._row(place, each) for place, each in enumerate(inputs)]
        # Without rows, a stand-in gives the result its width and dtype, and none of it is returned.
        return self._compute(rows or [("a", "a") if self._checked is _pair else "a"], **options)[: len(rows)]

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
        except TypeError as error:
            raise PreconditionError(
                f"row {place} of the batch (the first is row 0; column {' and '.join(self._columns)}): {error}"
            ) from error


def _opened(folder: Path) -> tuple[Callable[[Any], Any], Callable[..., Any]]:
    """Return a function that checks and converts a row, and a function from rows to an array."""
    # In folders of sentence-transformers each module may have a config.json; the one of fxopt has the entry "fxopt".
    configs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("config.json"))]
    config = next((config for config in configs if isinstance(config, dict) and "fxopt" in config), None)
    if config is None:
        raise PreconditionError(
            f"{str(folder)!r} is not a folder that fxopt wrote: make one with `fxopt optimize FOLDER -o OUT`, and make "
            "sure that every worker finds it under this path"
        )
    library = importlib.import_module("sentence_transformers")
    (head,), about = config["architectures"], folder / "config_sentence_transformers.json"
    if about.exists():
        kind = json.loads(about.read_text(encoding="utf-8")).get("model_type", "SentenceTransformer")
    elif head.endswith("ForSequenceClassification"):
        kind = "CrossEncoder"
    else:
        is_encoder = "For" not in head and not (folder / "preprocessor_config.json").exists()
        kind = "SentenceTransformer" if is_encoder or (folder / "modules.json").exists() else head
    if kind == "CrossEncoder":
        return _pair, library.CrossEncoder(str(folder), device="cpu").predict
    if kind == "SentenceTransformer":
        return _text, library.SentenceTransformer(str(folder), device="cpu").encode
    raise PreconditionError(
        f"{str(folder)!r} holds a {kind}, which gives neither a vector for a text nor a score for two: open it with "
        "its own library"
    )


def _text(given: Any) -> str:
    if not isinstance(given, str):
        raise TypeError(f"{type_text(given)}, where a text is expected; fill or drop such rows before")
    return str(given)  # NumPy has strings of its own


def _pair(given: Any) -> tuple[str, str]:
    if isinstance(given, str) or not hasattr(given, "__len__") or len(given) != 2:
        raise TypeError(f"{type_text(given)}, where two texts are expected: name two columns, column=(...)")
    return _text(given[0]), _text(given[1])
