"""`python -m zoo [--quick] [--only NAME ...]`: try models, write JSON and the page, and name what got worse."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import random
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from zoo.page import PAGE, page
from zoo.processes import apart
from zoo.results import FILE, LIMIT, outcome, read, read_known, worse, write
from zoo.trial import Row, Trial

QUICK = (
    *("transformers/bert", "transformers/llama", "transformers/gemma3_text", "transformers/qwen3_moe"),
    *("transformers/qwen3_vl_moe", "transformers/glm_ocr_vision", "transformers/whisper", "transformers/bros"),
    *("timm/convnext", "timm/vision_transformer", "timm/hgnet"),
    *("heads/LlamaForCausalLM+decode", "heads/T5ForConditionalGeneration", "heads/BertForMaskedLM+bf16"),
    *("heads/ResNetForImageClassification+train", "heads/LlavaForConditionalGeneration+images"),
)
"""A sample, with the models that once gave wrong results."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Try the requested models; return the number of models that got worse."""
    options = parse(arguments)
    if options.page:
        PAGE.write_text(page(read(), read_known()), encoding="utf-8")
        return 0
    prepare(quick=options.quick)
    names = chosen(options)
    done = {row["name"]: row for row in lines(options.rows)} if options.rows else {}
    tried: list[Row] = []
    start = time.monotonic()
    for number, name in enumerate(names, 1):
        if name not in done and options.limit is not None and time.monotonic() - start >= options.limit:
            continue
        if name not in done:
            done[name] = attempt(name, options.seconds, thorough=random.Random(name).random() < options.share)
            if options.rows:
                with options.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[name]) + "\n")
        tried.append(done[name])
        print(f"{number}/{len(names)} {time.monotonic() - start:.0f} s {name}: {outcome(done[name])}", flush=True)
    subjects = importlib.import_module("zoo.subjects")
    found = worse(read(), tried)
    for line in found:
        print(f"worse: {line}", file=sys.stderr)
    if options.write:
        write(tried, {kind: len(subjects.names_of(kind)) for kind in subjects.KINDS})
        PAGE.write_text(page(read(), read_known()), encoding="utf-8")
    return len(found)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser("zoo", description="Small models of all architectures of transformers and timm.")
    parser.add_argument("--quick", action="store_true", help="a fixed sample, in a few minutes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these models, such as transformers/bert or timm/vgg")
    parser.add_argument("--seed", type=int, default=0, help="of the order (default: 0)")
    parser.add_argument("--seconds", type=float, default=240, help="for one model (default: 240)")
    parser.add_argument("--rows", type=Path, help="a file of JSON lines: what is in it is not tried again")
    parser.add_argument("--write", action="store_true", help=f"write {FILE.name} and {PAGE.name}")
    parser.add_argument("--share", type=float, default=1, help="of the models that are saved, and exported alone")
    parser.add_argument("--limit", type=float, help="seconds after which no other model is begun; 0: none")
    parser.add_argument("--page", action="store_true", help="write the page from the file, and try nothing")
    return parser.parse_args(arguments)


def prepare(*, quick: bool = False) -> None:
    """Import what children share, and silence it."""
    os.environ.update({"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "critical"})
    if quick:  # in models of two layers, torch's cache of fake tensors costs more than it saves
        os.environ["TORCH_FAKE_TENSOR_DISPATCH_CACHE"] = "0"
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    importlib.import_module("transformers.modeling_utils")
    subjects = importlib.import_module("zoo.subjects")
    subjects.timm()
    warmed = importlib.import_module("zoo.trial").Trial("warm", lambda row: None, thorough=False)
    warmed.run(lambda: subjects.build("transformers/bert"))


def chosen(options: argparse.Namespace) -> list[str]:
    """Return the names of the requested models, in random order."""
    subjects = importlib.import_module("zoo.subjects")
    listed: Iterable[str] = options.only or (QUICK if options.quick else subjects.names())
    names = sorted(listed)
    random.Random(options.seed).shuffle(names)
    return names


def attempt(name: str, seconds: float, *, thorough: bool = True) -> Row:
    """Try one model in a process of its own."""
    build = importlib.import_module("zoo.subjects").build

    def trial(report: Callable[[Row], None]) -> None:
        Trial(name, report, thorough=thorough).run(lambda: build(name))

    return apart(trial, seconds) or {
        "name": name,
        "refused": ["build", LIMIT, LIMIT],
        "seconds": {},
        "problems": {},
    }


def lines(path: Path) -> list[Row]:
    """Read a file of JSON lines; none where there is none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    sys.exit(main())
