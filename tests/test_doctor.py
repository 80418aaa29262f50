"""`polyreme doctor`: each lack of a machine is found, told with its remedy, and weighed."""

from __future__ import annotations

import dataclasses
import email.message
import errno
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

import polyreme as pr
from polyreme.cluster.accelerator import HostAccelerator
from polyreme.doctor import Row, broken, devices, examine, links, software, system
from polyreme.doctor.readings import UNLIMITED, Interface, Readings, Space, read

ACTIONS = (
    *("bring", "end", "export", "free", "give", "hide", "install", "let", "make", "mount", "name"),
    *("pip", "run", "train", "ulimit", "unset", "use"),
)
ROOMY = Space(path=Path("runs"), total_bytes=2**40, free_bytes=2**39, writable=True)
WELL = Readings(
    limits={
        "open files": 65536,
        "processes": UNLIMITED,
        "file size": UNLIMITED,
        "locked memory": UNLIMITED,
    },
    shared_memory=ROOMY,
    run_space=ROOMY,
    cache_space=ROOMY,
    cores=8,
    affinity_cores=8,
    quota_cores=None,
    memory_bytes=2**35,
    memory_limit_bytes=None,
    clock_resolution_s=1e-9,
    clock_synchronised=True,
    clock_error_s=1e-3,
    interfaces=(),
)


@pytest.fixture
def _asks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the package asks for, as its metadata say."""
    asked = email.message.Message()
    asked["Requires-Python"] = ">=3.11"
    for line in ("torch>=2.11", "numpy>=2.0", "msgspec>=0.20"):
        asked["Requires-Dist"] = line
    for extra in ("tensorboard", "wandb", "datasets"):
        asked["Requires-Dist"] = f'{extra}>=0.1; extra == "{extra}"'
    monkeypatch.setattr("importlib.metadata.metadata", lambda _: asked)


def _judged(n_processes: int = 4, **lacks: Any) -> dict[str, Row]:
    readings = dataclasses.replace(WELL, **lacks)
    return {row.what: row for row in system.rows(readings, n_processes)}


def _limited(**limits: int) -> dict[str, int]:
    return {**WELL.limits, **{name.replace("_", " "): limit for name, limit in limits.items()}}


def _told_apart(rows: Iterable[Row]) -> None:
    """What is not well has a remedy, what is well has none; and no remedy names a host."""
    for row in rows:
        assert bool(row.remedy) == (row.status != "ok"), row
        assert "://" not in row.remedy
        assert not row.remedy or row.remedy.split()[0] in ACTIONS, row


def test_a_machine_without_lacks_has_no_remedies() -> None:
    rows = _judged().values()
    assert {row.status for row in rows} == {"ok"}
    _told_apart(rows)


@pytest.mark.parametrize(
    ("what", "lacks", "status", "needed", "remedy"),
    [
        ("open files", {"limits": _limited(open_files=200)}, "missing", True, "ulimit -n"),
        ("open files", {"limits": _limited(open_files=1024)}, "note", True, "ulimit -n"),
        ("processes", {"limits": _limited(processes=10)}, "missing", True, "ulimit -u"),
        ("file size", {"limits": _limited(file_size=2**20)}, "missing", True, "ulimit -f"),
        ("file size", {"limits": _limited(file_size=2**33)}, "note", True, "ulimit -f"),
        ("locked memory", {"limits": _limited(locked_memory=2**16)}, "note", False, "ulimit -l"),
        (
            "/dev/shm",
            {"shared_memory": dataclasses.replace(ROOMY, free_bytes=2**26)},
            "missing",
            False,
            "--shm-size",
        ),
        ("/dev/shm", {"shared_memory": None}, "note", False, "tmpfs of at least 256 MiB"),
        (
            "space for runs",
            {"run_space": dataclasses.replace(ROOMY, writable=False)},
            "missing",
            True,
            "--out",
        ),
        (
            "space for runs",
            {"run_space": dataclasses.replace(ROOMY, free_bytes=2**20)},
            "missing",
            True,
            "free 10 GiB",
        ),
        (
            "space for profiles",
            {"cache_space": dataclasses.replace(ROOMY, writable=False)},
            "missing",
            False,
            "XDG_CACHE_HOME",
        ),
        ("cores usable", {"quota_cores": 1.5}, "note", False, "--devices 1"),
        ("cores usable", {"affinity_cores": 2}, "note", False, "--devices 2"),
        (
            "OMP_NUM_THREADS",
            {"environment": {"OMP_NUM_THREADS": "8"}},
            "note",
            False,
            "export OMP_NUM_THREADS=2",
        ),
        ("wall clock", {"clock_synchronised": False}, "note", False, "chrony"),
        ("wall clock", {"clock_synchronised": None}, "note", False, "chrony"),
        ("monotonic clock", {"clock_resolution_s": 0.01}, "note", False, "clock source"),
    ],
)
def test_a_lack_is_told_with_its_remedy(
    what: str, lacks: dict[str, Any], status: str, needed: bool, remedy: str
) -> None:
    rows = _judged(**lacks)
    assert (rows[what].status, rows[what].needed) == (status, needed)
    assert remedy in rows[what].remedy
    assert broken(rows.values()) == (status == "missing" and needed)
    _told_apart(rows.values())


def test_threads_that_fit_the_cores_are_well() -> None:
    row = _judged(environment={"OMP_NUM_THREADS": "2"})["OMP_NUM_THREADS"]
    assert row.status == "ok"


def test_a_control_group_s_memory_is_what_there_is() -> None:
    assert _judged(memory_limit_bytes=2**30)["host memory"].value.startswith("1 GiB")


def test_settings_that_change_a_run_are_shown_and_secrets_are_not() -> None:
    given = {"RANK": "0", "MASTER_ADDR": "a", "NCCL_DEBUG": "INFO"}
    others = {"SOME_API_KEY": "x", "HOME": "h", "CUDA_HOME": "/usr"}
    rows = _judged(environment=given | others)
    shown = {row.what for row in rows.values() if row.group == "environment"}
    assert shown == set(given)
    _told_apart(rows.values())


@pytest.mark.usefixtures("_asks")
def test_missing_and_old_packages_are_told_from_missing_extras() -> None:
    there = {"torch": "2.9.1", "msgspec": "0.22.0", "polyreme": "1", "tensorboard": "2.21"}
    rows = {row.what: row for row in software.rows(there.get, which=lambda _: None)}
    assert rows["torch"].status == "missing"
    assert rows["numpy"].value.startswith("not installed")
    assert rows["msgspec"].status == rows["tensorboard"].status == "ok"
    for extra in ("wandb", "datasets"):
        assert (rows[extra].status, rows[extra].needed) == ("missing", False)
        assert rows[extra].remedy == f'pip install "polyreme[{extra}]"'
    assert (rows["chromium"].status, rows["compiler"].status) == ("missing", "missing")
    assert broken(rows.values())
    assert not broken(row for row in rows.values() if row.group == "extras")
    _told_apart(rows.values())


@pytest.mark.usefixtures("_asks")
def test_versions_are_compared_as_numbers() -> None:
    rows = {row.what: row for row in software.rows({"torch": "2.100.0+cpu"}.get)}
    assert rows["torch"].status == "ok"


def test_interfaces_that_are_down_or_local_are_no_links() -> None:
    found = [
        Interface(name="lo", up=True, bit_s=0),
        Interface(name="eth0", up=True, bit_s=1e9),
        Interface(name="eth1", up=False, bit_s=1e11),
    ]
    (row,) = links.interfaces(found)
    assert (row.what, row.value, row.status) == ("interface eth0", "1 Gbit/s", "note")
    (none,) = links.interfaces(found[:1])
    assert none.status == "note"
    _told_apart([row, none])


def test_processes_that_cannot_meet_break_a_machine() -> None:
    row = links.two_processes(HostAccelerator(backend="unheard-of"))
    assert (row.status, row.needed) == ("missing", True)
    assert broken([row])


def test_processes_that_cannot_be_started_break_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_more(*args: Any, **settings: Any) -> None:
        raise OSError(errno.EAGAIN, "no more processes")

    monkeypatch.setattr("polyreme.runtime.launch.Launcher", no_more)
    row = links.two_processes(HostAccelerator())
    assert (row.status, row.needed) == ("missing", True)
    assert "no more processes" in row.value
    _told_apart([row])


@pytest.mark.parametrize("headers", [True, False])
def test_a_compiler_needs_the_headers_of_python_whether_torch_is_there_or_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, headers: bool
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    if headers:
        (tmp_path / "Python.h").touch()
    rows = {row.what: row for row in software.rows(which=lambda name: f"/usr/bin/{name}")}
    assert (rows["compiler"].status == "ok") == headers
    assert headers or f"Python's headers ({tmp_path})" in rows["compiler"].remedy


class _Dead(HostAccelerator):
    """A device that the driver names, and that does nothing."""

    def set(self, index: int) -> None:
        raise RuntimeError("driver is too old")


def test_a_device_that_does_not_work_breaks_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "available", lambda: (_Dead(name="dead"),))
    rows = {row.what: row for row in devices.rows()}
    assert rows["dead works"].value == "driver is too old"
    assert broken(rows.values())


def test_this_machine_is_read(tmp_path: Path) -> None:
    readings = read({}, tmp_path / "not" / "there", tmp_path)
    assert readings.run_space is not None
    assert readings.run_space.writable
    assert readings.cores >= readings.affinity_cores >= 1
    assert 0 < readings.clock_resolution_s < 1


def _doctor(command: str, folder: Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, json.loads(done.stdout)


def test_low_limits_of_this_machine_end_with_1(tmp_path: Path) -> None:
    code, said = _doctor('ulimit -n 200; "$PYTHON" -m polyreme doctor --json', tmp_path)
    rows = {row["what"]: row for row in said["rows"]}
    assert (rows["open files"]["value"], rows["open files"]["status"]) == ("200", "missing")
    assert (code, said["broken"]) == (1, True)


def test_this_machine_can_train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    rows = pr.doctor({"NCCL_DEBUG": "INFO"})
    groups = {row.group for row in rows}
    wanted = {"software", "extras", "devices", "links", "processor", "memory", "limits", "disk"}
    assert wanted | {"clocks", "environment"} == groups
    works = [row for row in rows if row.what.endswith("works") or "all-reduce" in row.what]
    assert len(works) >= 2
    assert {row.status for row in works} <= {"ok", "note"}
    if software.installed("polyreme"):
        assert any(str(torch.__version__).split("+")[0] in row.value for row in rows)
    _told_apart(rows)


def test_a_torch_that_cannot_be_imported_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def torn(name: str) -> None:
        raise ImportError("libgomp.so.1: cannot open shared object file")

    monkeypatch.setattr("importlib.import_module", torn)
    rows = {row.what: row for row in examine({}, runs=tmp_path, cache=tmp_path)}
    found = [row for row in rows.values() if row.value.startswith("cannot be imported: libgomp")]
    assert broken(found)
    assert "open files" in rows


def test_a_package_that_runs_from_its_source_folder_is_no_fault_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.metadata", absent)
    monkeypatch.setattr("importlib.metadata.version", absent)
    rows = {row.what: row for row in software.rows()}
    assert rows["polyreme"].status == "note"
    assert not broken(rows.values())
