"""Directories of adapters, and those that killed processes have left."""

from __future__ import annotations

import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

from sync_core import OptionError
from sync_plugin_vllm.adapter_files import AdapterFiles
from sync_plugin_vllm.adapter_model import AdapterDescription

DESCRIPTION = AdapterDescription("default", {"q": 2.0})
TENSORS = {
    f"base_model.model.q.lora_{part}.default.weight": torch.ones(shape)
    for part, shape in (("A", (2, 4)), ("B", (4, 2)))
}


def write(files: AdapterFiles, directory: Path) -> None:
    files.write(directory, TENSORS, DESCRIPTION, {"q": 2})


def _write_and_wait(directory: Path, pipe: Connection) -> None:
    files = AdapterFiles()
    write(files, directory)
    pipe.send("written")
    pipe.recv()


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    left = tmp_path / "a-v1-00000000"
    process = spawn.Process(target=_write_and_wait, args=(left, there))
    process.start()
    assert here.recv() == "written"
    others = {tmp_path / "a-v1-11111111", tmp_path / "mine"}
    for other in others:
        other.mkdir()

    files = AdapterFiles()
    write(files, tmp_path / "b-v1-00000000")
    assert left.exists()
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    process.close()
    for version in (2, 3):
        write(files, tmp_path / f"b-v{version}-00000000")
    mine = {tmp_path / f"b-v{version}-00000000" for version in (1, 2, 3)}
    assert set(tmp_path.iterdir()) == others | mine
    files.remove(tmp_path / "b-v1-00000000")
    files.remove(tmp_path / "a-v1-11111111")
    assert set(tmp_path.iterdir()) == (others | mine) - {tmp_path / "b-v1-00000000"}
    del files
    assert set(tmp_path.iterdir()) == others


def test_one_of_another_machine_stays(tmp_path: Path) -> None:
    directory = tmp_path / "a-v1-00000000"
    directory.mkdir()
    (directory / "lock").write_text("another")
    files = AdapterFiles()
    write(files, tmp_path / "b-v1-00000000")
    assert directory.exists()


def test_a_directory_that_was_removed_is_no_error(tmp_path: Path) -> None:
    files, directory = AdapterFiles(), tmp_path / "a-v1-00000000"
    write(files, directory)
    for path in directory.iterdir():
        path.unlink()
    directory.rmdir()
    files.remove(directory)


@pytest.mark.parametrize("name", ["a", "a-v1", "a-v1-xyz"])
def test_other_directories_are_not_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(OptionError, match="cannot be written"):
        write(AdapterFiles(), tmp_path / name)
    with pytest.raises(OptionError, match="type VllmTarget\\(…, adapter_directory=…"):
        write(AdapterFiles(), tmp_path / "none" / "a-v1-00000000")
    assert not list(tmp_path.iterdir())
