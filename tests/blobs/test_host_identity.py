"""Two processes have one host identity exactly if they see the same shared memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from omniq.blobs import host, host_identity

CODE = "from omniq.blobs import host_identity; print(host_identity())"


def identity(*wrapper: str, shell: str = "") -> str:
    argv = [sys.executable, "-c", CODE]
    if wrapper:
        argv = [*wrapper, "sh", "-c", f'{shell}exec "$0" "$@"', *argv]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if wrapper and done.returncode:
        pytest.skip(f"no namespaces can be made here: {done.stderr.strip()[-200:]}")
    return done.stdout.strip()


def test_processes_of_one_machine_agree() -> None:
    assert identity() == host_identity()
    assert len(host_identity()) == 16


def test_a_host_name_does_not_matter() -> None:
    assert identity("unshare", "-u", shell="hostname other && ") == host_identity()


def test_a_mount_namespace_alone_does_not_matter() -> None:
    assert identity("unshare", "-m") == host_identity()


def test_a_container_with_shared_memory_of_its_own_is_another_host() -> None:
    own = "mount -t tmpfs -o size=1M tmpfs /dev/shm && "
    assert identity("unshare", "-m", shell=own) not in ("", host_identity())


def test_folders_of_one_tmpfs_are_different_places(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    assert len({host_identity(tmp_path / name) for name in "ab"}) == 2


def test_there_is_an_identity_without_shared_memory_and_without_linux(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = tmp_path / "missing"
    assert host_identity(missing) == host_identity(missing) != host_identity()
    monkeypatch.setattr(host, "BOOT_ID", missing)
    assert host_identity(missing) == host_identity(missing)
