"""Files that cannot be written: one sentence that says why, and nothing left beside them."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from fxopt_capture.archive.files import load, save
from fxopt_capture.capture import capture
from fxopt_core.errors import CaptureError

X = torch.ones(2, 64)


@pytest.fixture(scope="module")
def graph_module() -> GraphModule:
    return capture(nn.Linear(64, 512).eval(), X)


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of resources")
def test_a_file_that_is_too_large_for_the_disk(graph_module: GraphModule, tmp_path: Path) -> None:
    """Torch would end the process where a write fails; here it is an error, and the next save works."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for limit in (0, 100, 30_000, 100_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limits[1]))
        try:
            with pytest.raises(
                CaptureError, match="cannot be written: File too large; whatever was there is unch"
            ) as caught:
                save(graph_module, tmp_path / "model.fxopt")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert repr(caught.value.__cause__) == "OSError(27, 'File too large')"
        assert not os.listdir(tmp_path)
    save(graph_module, tmp_path / "model.fxopt")
    torch.testing.assert_close(load(tmp_path / "model.fxopt")(X), graph_module(X))


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="needs /proc")
def test_a_folder_in_which_nothing_can_be_made(graph_module: GraphModule) -> None:
    """The message names the file that was asked for, and not the one beside it."""
    with pytest.raises(CaptureError, match=r"^'/proc/a\.fxopt' cannot be written: ") as caught:
        save(graph_module, "/proc/a.fxopt")
    assert ".part" not in str(caught.value)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs pipes")
def test_what_is_no_file_is_not_replaced(graph_module: GraphModule, tmp_path: Path) -> None:
    """An archive in place of a device or a pipe would take it away from everybody else."""
    pipe = tmp_path / "pipe.fxopt"
    os.mkfifo(pipe)
    for path in (pipe, "/dev/null"):
        with pytest.raises(CaptureError, match=r"cannot be written, as it is a (device|FIFO)"):
            save(graph_module, path)
        assert not stat.S_ISREG(os.stat(path).st_mode)


def test_what_a_killed_process_has_left_is_no_obstacle(graph_module: GraphModule, tmp_path: Path) -> None:
    """Numbers of processes come again, in containers above all."""
    path = tmp_path / "model.fxopt"
    Path(f"{path}.{os.getpid()}.part").write_text("half")
    save(graph_module, path)
    assert os.listdir(tmp_path) == ["model.fxopt"]
    torch.testing.assert_close(load(path)(X), graph_module(X))


def test_an_open_file_that_fails(graph_module: GraphModule) -> None:
    """Its own error is the cause."""

    class Full:
        name = "full"

        def write(self, data: bytes) -> int:
            raise OSError(28, "No space left on device")

    with pytest.raises(CaptureError, match="'full' cannot be written: No space left on device"):
        save(graph_module, Full())  # type: ignore[arg-type]  # what save uses of an open file
