"""Files that are no archives, archives that were changed, and what an archive must not be able to do."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from padded_linears import Perceptron
from site_passes import Called
from torch import Tensor, nn

from fxopt_capture import capture
from fxopt_capture.archive.files import load, save
from fxopt_core import history
from fxopt_core.errors import CaptureError


def rewritten(path: Path, change: Callable[[str, bytes], bytes | None]) -> Path:
    """Return a copy of an archive in which files have other contents, or are left out."""
    target = path.with_name("changed.fxopt")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            content = change(name, old.read(name))
            if content is not None:
                new.writestr(name, content)
    return target


def with_document(path: Path, change: Callable[[Any], None]) -> Path:
    """Return a copy of an archive whose document was changed; for `change`, it has the ledger in it, as text."""
    with zipfile.ZipFile(path) as archive:
        document = {**json.loads(archive.read("fxopt.json")), "ledger": archive.read("ledger.json").decode()}
    change(document)
    ledger = document.pop("ledger").encode()
    contents = {"fxopt.json": json.dumps(document).encode(), "ledger.json": ledger}
    return rewritten(path, lambda name, content: contents.get(name, content))


# -- files ------------------------------------------------------------------------------------------------------------


def test_what_is_no_archive(tmp_path: Path) -> None:
    (tmp_path / "text.fxopt").write_text("weights")
    torch.save(nn.Linear(1, 1).state_dict(), tmp_path / "state.fxopt")
    for name, found in (
        ("missing.fxopt", r"there is no file '.*missing.fxopt'; expected an archive"),
        ("", "is a directory"),
        ("text.fxopt", "is not an archive"),
        ("state.fxopt", r"is a zip file, but not an archive: it has no fxopt\.json"),
    ):
        with pytest.raises(CaptureError, match=found):
            load(tmp_path / name)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a_file_that_was_cut_off(path: Path, share: float) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(CaptureError, match="is cut off or damaged"):
        load(path)


# -- the document -----------------------------------------------------------------------------------------------------


def test_a_malformed_document(path: Path) -> None:
    def broken_by(content: bytes) -> Path:
        return rewritten(path, lambda name, old: content if name == "fxopt.json" else old)

    for content in (b"", b"[]", b"{}", b'{"format": "x"}', b'{"format": 1}', b"[" * 100_000):
        broken = broken_by(content)
        with pytest.raises(CaptureError, match=r"fxopt\.json in it"):
            load(broken)


MALFORMED: dict[str, Callable[[Any], None]] = {
    "name": lambda document: document.update(name="a b"),
    "mode": lambda document: document["guards"].update(mode="eval"),
    "no modules": lambda document: document.update(modules=[]),
    "no nodes": lambda document: document["graph"].update(rows=[]),
    "no such tensor": lambda document: document["modules"][-1]["parameters"][0].__setitem__(1, "other"),
    "unknown module": lambda document: document["graph"]["rows"][2].update(target="other"),
    "two nodes of one name": lambda document: document["graph"]["rows"][2].update(name="x"),
    "node that comes later": lambda document: document["graph"]["rows"][2].update(args=[{"node": 5}]),
    "node that is none": lambda document: document["graph"]["rows"][2].update(args=[{"node": 500}]),
    "value that is none": lambda document: document["graph"]["rows"][2].update(args=[{"object": 1}]),
    "ledger": lambda document: document.update(ledger='{"fxopt_ledger": 1, "records": [7]}'),
    "tag": lambda document: document["graph"]["rows"][2].update(tag={"marks": 3}),
}


@pytest.mark.parametrize("change", MALFORMED.values(), ids=MALFORMED)
def test_a_document_with_something_wrong(path: Path, change: Callable[[Any], None]) -> None:
    with pytest.raises(CaptureError, match=r"fxopt\.json in it is damaged or hostile|damaged"):
        load(with_document(path, change))


def test_a_document_of_a_newer_version(path: Path) -> None:
    newer = with_document(path, lambda document: document.update(format=2))
    with pytest.raises(CaptureError, match=r"was written in format 2, .* up to 1: upgrade it"):
        load(newer)


def test_a_ledger_of_a_newer_version(path: Path) -> None:
    text = '{"fxopt_ledger": 99, "anything": []}'
    with pytest.raises(CaptureError, match=r"version 99.*install a newer fxopt-core"):
        load(with_document(path, lambda document: document.update(ledger=text)))


def test_what_an_archive_lacks(path: Path) -> None:
    for lost in ("weights.safetensors", "fxopt.json"):
        with pytest.raises(CaptureError, match=r"no entry weights|but not an archive"):
            load(rewritten(path, lambda name, content, lost=lost: None if name == lost else content))  # type: ignore[misc]
    assert history(load(rewritten(path, lambda name, content: None if name == "ledger.json" else content))) == ()


# -- types and writing ------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Known:
    """An output that another process may not know."""

    value: Tensor


def test_types_that_are_there_and_that_are_not(tmp_path: Path) -> None:
    torch.export.register_dataclass(Known, serialized_type_name=f"{Known.__module__}.Known")
    path = tmp_path / "model.fxopt"
    save(capture(Called(lambda x: Known(x)), torch.ones(2)), path)

    def renamed(name: str, content: bytes) -> bytes:
        return content.replace(f"{Known.__module__}.Known".encode(), b"elsewhere.Output")

    found = load(path)(torch.full((2,), 3.0))
    assert isinstance(found, Known)
    assert found.value.tolist() == [3, 3]
    with pytest.raises(CaptureError, match=r"are of type elsewhere\.Output, .* import the module that defines"):
        load(rewritten(path, renamed))


def test_a_program_of_torch_is_refused_with_the_line_that_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(Perceptron(), (torch.randn(2, 4),)), file)
    with pytest.raises(CaptureError, match=r"which may run code .*torch\.export\.load\('.*model\.pt2'\)\.module\(\)"):
        load(file)
