"""The example that serves vectors over HTTP, and the image that it is put into."""

from __future__ import annotations

import re
import runpy
import shlex
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from published_weights import stored_bert

import fxopt

pytest.importorskip("httpx2")
testclient = pytest.importorskip("fastapi.testclient")
library = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "serve"
TEXTS = ["A man eats pasta.", "The train is late, and nobody knows why."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An optimized encoder."""
    made = tmp_path_factory.mktemp("served") / "fast"
    plain = stored_bert(made.with_name("plain"))
    fxopt.optimize(library.SentenceTransformer(plain, device="cpu")).save(str(made))
    return made


def test_requests_are_answered_with_the_encoders_vectors(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several at once, too."""
    expected: Any = library.SentenceTransformer(str(folder), device="cpu").encode(TEXTS)
    monkeypatch.setenv("FXOPT_FOLDER", str(folder))
    client = testclient.TestClient(runpy.run_path(str(EXAMPLE / "app.py"))["app"])
    assert client.get("/health").json() == "ok"
    assert client.post("/embed", json={"texts": [1]}).status_code == 422
    assert client.post("/embed", json={"texts": []}).json() == []
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: client.post("/embed", json={"texts": TEXTS}), range(12)))
    for answer in answers:
        assert answer.status_code == 200
        assert abs(expected - answer.json()).max() < 1e-6


def test_the_image_is_made_of_what_there_is() -> None:
    """Without Docker: each instruction is compared with packages, pins, the command and the application."""
    text = (EXAMPLE / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    instructions = [line.partition(" ")[::2] for line in text.splitlines() if line[:1] not in "#"]
    assert instructions[0][0] == "FROM"
    python = re.fullmatch(r"python:(3\.\d+)-slim", instructions[0][1])
    assert python
    assert {name for name, _ in instructions} <= {"FROM", "RUN", "ENV", "COPY", "CMD"}
    pins = (ROOT / f".ci/constraints-{python[1]}.txt").read_text(encoding="utf-8")
    commands = [shlex.split(each) for name, text in instructions if name == "RUN" for each in text.split("&&")]
    installed = [word for words in commands if words[:2] == ["pip", "install"] for word in words[2:]]
    requirements = [Requirement(word) for word in installed if not word.startswith(("-", "https://"))]
    for each in requirements:
        if (ROOT / "packages" / each.name).is_dir():
            extras = (ROOT / "packages" / each.name / "pyproject.toml").read_text(encoding="utf-8")
            assert all(f"\n{extra} = [" in extras for extra in each.extras)
        else:
            assert f"\n{each.name}==" in pins, f"{each.name} is not among what sessions install"
            assert not each.specifier or f"\n{each}\n" in pins
    (made,) = (words[words.index("-o") + 1] for words in commands if words[0] == "fxopt")
    said = dict(instructions)
    assert f"FXOPT_FOLDER={made}" in said["ENV"].split()
    assert (EXAMPLE / said["COPY"].split()[0]).is_file()
    assert said["CMD"].startswith('["uvicorn", "app:app"')
