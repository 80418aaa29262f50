"""Checkpoints: any layout loads any other, and a kill at any moment leaves a whole one."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from laid import among
from polyreme.cluster.accelerator import HostAccelerator
from polyreme.errors import ConfigError
from polyreme.runlog import CheckpointEvent, Writer, read
from polyreme.runtime import checkpoint, checkpoints, saver, tensorfile
from polyreme.runtime.mesh import World
from polyreme.runtime.parted import Parted
from polyreme.runtime.state import Progress
from tiny import save

GRAPH = SimpleNamespace(name="toy", fingerprint="f00d")
LONE = World(
    rank=0,
    n_ranks=1,
    local_rank=0,
    n_local=1,
    device=torch.device("cpu"),
    accelerator=HostAccelerator(),
)


@dataclass
class FakeState:
    """As much of a State as a checkpoint asks for."""

    world: World
    progress: Progress
    named: dict[str, torch.Tensor] = field(default_factory=dict)

    def parted(self) -> dict[str, Parted]:
        return {name: among(tensor, self.world) for name, tensor in self.named.items()}

    def own(self) -> dict[str, torch.Tensor]:
        return {}

    def lacking(self, _) -> list[str]:
        return []

    def take(self, *_) -> None:
        pass


def _values(step: int = 1) -> dict[str, torch.Tensor]:
    """Shapes that split unevenly, or leave ranks empty, or have no dimension; odd dtypes."""
    draw = torch.Generator().manual_seed(step)
    return {
        "param/weight": torch.randn(5, 3, generator=draw),
        "param/one": torch.randn(1, 2, generator=draw),
        "param/scalar": torch.tensor(float(step)),
        "param/nan": torch.tensor([float("nan"), float("inf"), -0.0]),
        "param/empty": torch.zeros(0, 4),
        "buffer/count": torch.tensor(7 + step),
        "optimizer/weight/exp_avg": torch.randn(5, 3, generator=draw).bfloat16(),
        "optimizer/weight/step": torch.tensor(float(step)),
    }


def _state(world: World, layout: str, values: dict[str, torch.Tensor], step: int = 1) -> FakeState:
    """The values laid out over the ranks: whole, sharded, or sharded inside replicas."""
    named = dict(values)
    if layout != "whole":
        shape = (1, world.n_ranks) if layout == "shard" else (2, world.n_ranks // 2)
        grid = torch.arange(world.n_ranks).reshape(shape)
        mesh = DeviceMesh("cpu", grid, mesh_dim_names=("replica", "shard"))
        named |= {
            name: distribute_tensor(tensor, mesh, [Replicate(), Shard(0)])
            for name, tensor in values.items()
            if tensor.dim()
        }
    return FakeState(world, Progress(step=step, samples=32 * step, tokens=5), named)


def _save(world: World, layout: str, run: Path, step: int = 1, keep: int = 2) -> None:
    save(_state(world, layout, _values(step), step), run, graph=GRAPH, keep=keep)


def _load(world: World, layout: str, run: Path) -> tuple[Progress, dict[str, torch.Tensor]]:
    zeros = {name: torch.zeros_like(tensor) for name, tensor in _values().items()}
    state = _state(world, layout, zeros)
    folder = checkpoints.newest(run)
    assert folder is not None
    progress = checkpoint.load(state, folder, graph=GRAPH)
    whole = {
        name: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        for name, tensor in state.named.items()
    }
    return progress, whole


def _same_bits(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == tensor.dtype
        and torch.equal(
            found[name].reshape(-1).view(torch.uint8), tensor.reshape(-1).view(torch.uint8)
        )
        for name, tensor in expected.items()
        if tensor.numel()
    )


@pytest.mark.parametrize(
    ("written", "read_as"),
    [
        ((1, "whole"), (3, "shard")),
        ((2, "whole"), (1, "whole")),
        ((2, "shard"), (4, "hybrid")),
        ((3, "shard"), (2, "shard")),
        ((4, "hybrid"), (2, "whole")),
    ],
)
def test_any_layout_loads_any_other(pool, tmp_path, written, read_as):
    pool(written[0]).run(_save, written[1], tmp_path)
    for progress, found in pool(read_as[0]).run(_load, read_as[1], tmp_path):
        assert progress == Progress(step=1, samples=32, tokens=5)
        assert _same_bits(found, _values())


def _load_into(world: World, values: dict[str, torch.Tensor], folder: Path) -> None:
    checkpoint.load(_state(world, "whole", values), folder, graph=GRAPH)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"param/weight": torch.zeros(5, 4)},
            r"param/weight is \[5, 3\] there and \[5, 4\] here",
        ),
        ({"param/new": torch.zeros(1)}, "param/new is not in it"),
        ({"param/weight": None}, "param/weight is unknown here"),
        ({f"param/{i}": torch.zeros(1) for i in range(7)}, "and 2 more"),
    ],
)
def test_another_model_is_refused_by_name(tmp_path, change, said):
    _save(LONE, "whole", tmp_path)
    changed = {k: v for k, v in (_values() | change).items() if v is not None}
    with pytest.raises(ConfigError, match=said):
        _load_into(LONE, changed, tmp_path / "checkpoints" / "step-1")


def test_a_wider_dtype_takes_over_the_values(tmp_path):
    _save(LONE, "whole", tmp_path)
    wide = {name: tensor.double() for name, tensor in _values().items()}
    zeros = {name: torch.zeros_like(tensor) for name, tensor in wide.items()}
    _load_into(LONE, zeros, tmp_path / "checkpoints" / "step-1")
    assert torch.equal(zeros["param/weight"], wide["param/weight"])


def test_old_ones_are_pruned_and_the_newest_is_pointed_to(tmp_path):
    home = tmp_path / "checkpoints"
    assert checkpoints.newest(tmp_path) is None
    for step in (1, 2, 3, 10):
        _save(LONE, "whole", tmp_path, step)
    assert sorted(path.name for path in home.iterdir()) == ["latest", "step-10", "step-3"]
    assert (home / "latest").read_text() == "step-10"
    _save(LONE, "whole", tmp_path, 5, keep=1)  # a run that went back
    assert sorted(path.name for path in home.iterdir()) == ["latest", "step-5"]
    assert checkpoints.newest(tmp_path) == home / "step-5"


def test_saving_a_step_again_replaces_it(tmp_path):
    for value in (1.0, 2.0):
        state = FakeState(LONE, Progress(step=4), {"param/x": torch.tensor(value)})
        save(state, tmp_path, graph=GRAPH, keep=1)
    state = FakeState(LONE, Progress(), {"param/x": torch.tensor(0.0)})
    checkpoint.load(state, tmp_path / "checkpoints" / "step-4", graph=GRAPH)
    assert state.named["param/x"] == 2.0
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "latest",
        "step-4",
    ]


def test_without_a_pointer_the_highest_complete_step_counts(tmp_path):
    for step in (9, 10):
        _save(LONE, "whole", tmp_path, step)
    home = tmp_path / "checkpoints"
    (home / "latest").unlink()
    (home / "step-11").mkdir()
    assert checkpoints.newest(tmp_path) == home / "step-10"
    (home / "latest").write_text("step-11")
    assert checkpoints.newest(tmp_path) == home / "step-10"


class _Killed(BaseException):
    pass


def _die(_):
    """A killed process tidies nothing up."""
    raise _Killed


def _stopped_saving(folder: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether step 1, saved anew with other values, was stopped at its call `at` to the system."""
    left = [at]

    def stop_or(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise _Killed
            return function(*args, **kwargs)

        return call

    state = _state(LONE, "whole", _values(2))
    with monkeypatch.context() as patched:
        for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "replace")):
            patched.setattr(owner, name, stop_or(getattr(owner, name)))
        patched.setattr(saver.Saver, "_fail", _die)
        try:
            save(state, folder, graph=GRAPH, keep=1)
        except _Killed:
            return True
    return left[0] < 0


def test_stopping_at_any_rename_or_sync_leaves_a_whole_checkpoint(tmp_path, monkeypatch):
    for at in count():
        folder = tmp_path / str(at)
        _save(LONE, "whole", folder, keep=1)
        stopped = _stopped_saving(folder, at, monkeypatch)
        _, found = _load(LONE, "whole", folder)
        assert _same_bits(found, _values(2)) or (stopped and _same_bits(found, _values(1)))
        _save(LONE, "whole", folder, 3, keep=1)
        names = sorted(path.name for path in (folder / "checkpoints").iterdir())
        assert names == ["latest", "step-3"]
        if not stopped:
            break
    assert at > 7, "files, folders and names are synced and renamed"


def _kill_while_saving(run: Path, seed: int, n_kills: int) -> None:
    """Processes that do nothing but save are killed at random moments; what is left is read."""
    draw = random.Random(seed)
    step = n_halves = 0
    for _ in range(n_kills):
        child = os.fork()
        while not child:
            step += 1
            _save(LONE, "whole", run, step)
        time.sleep(0.03 + 0.1 * draw.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        n_halves += any(path.name.startswith(".") for path in (run / "checkpoints").glob("*"))
        if checkpoints.newest(run) is None and not step:
            continue
        progress, found = _load(LONE, "whole", run)
        assert _same_bits(found, _values(progress.step))
        assert progress.step >= step, "none is lost"
        step = progress.step
    assert n_halves, "no kill came in the midst of a save"
    assert step, "nothing was saved"


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.slice(1)
def test_a_kill_at_any_moment_leaves_the_last_whole_checkpoint(tmp_path, seed):
    """In a process of its own, which has no threads when it forks."""
    done = subprocess.run(
        [sys.executable, __file__, str(tmp_path), str(seed), "12"],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_resume_names_a_run_a_checkpoint_or_nothing(tmp_path):
    assert checkpoints.find("auto", tmp_path) == ()
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        checkpoints.find(str(tmp_path), tmp_path)
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        checkpoints.find(str(tmp_path / "absent"), tmp_path)
    _save(LONE, "whole", tmp_path)
    folder = tmp_path / "checkpoints" / "step-1"
    for text in ("auto", str(tmp_path), str(folder)):
        assert checkpoints.find(text, tmp_path) == (folder,)


def test_a_later_format_or_a_broken_meta_is_refused(tmp_path):
    _save(LONE, "whole", tmp_path)
    meta = tmp_path / "checkpoints" / "step-1" / "meta.json"
    meta.write_text(meta.read_text().replace('"format": 2', '"format": 3'))
    with pytest.raises(ConfigError, match="format 3"):
        _load_into(LONE, _values(), meta.parent)
    meta.write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        _load_into(LONE, _values(), meta.parent)


@pytest.mark.parametrize("index", [b"", b"{}", b"[1]"])
def test_a_damaged_index_is_refused_by_name(tmp_path, index):
    _save(LONE, "whole", tmp_path)
    (tmp_path / "checkpoints" / "step-1" / "index.json").write_bytes(index)
    with pytest.raises(ConfigError, match=r"step-\d+.* is damaged"):
        _load(LONE, "whole", tmp_path)


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "said"),
    [
        (_flip, "rank-00001.safetensors is not what was written"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-1]),
            r"rank-00001.safetensors has .* in",
        ),
        (Path.unlink, "rank-00001.safetensors cannot be read"),
    ],
)
def test_a_damaged_shard_is_named_on_all_ranks(pool, tmp_path, harm, said):
    pool(2).run(_save, "shard", tmp_path)
    folder = tmp_path / "checkpoints" / "step-1"
    checkpoint.verify(folder)
    harm(folder / "rank-00001.safetensors")
    with pytest.raises(ConfigError, match=said):
        checkpoint.verify(folder)
    for failure in pool(2).outcomes(_load, "shard", tmp_path):
        assert isinstance(failure.error, ConfigError)
        assert "rank-00001.safetensors" in str(failure.error)


def test_each_element_is_written_once(pool, tmp_path):
    for number, (n, layout) in enumerate([(3, "whole"), (3, "shard"), (4, "hybrid")]):
        run = tmp_path / str(number)
        pool(n).run(_save, layout, run)
        folder = run / "checkpoints" / "step-1"
        checkpoint.verify(folder)
        content = sum(tensor.nbytes for tensor in _values().values())
        index = checkpoint.read_index(folder)
        sizes = [tensorfile.header(folder / file)[0].values() for file in index.files]
        assert sum(held.n_bytes for each in sizes for held in each) == content


def test_the_log_is_told(tmp_path):
    log = Writer(tmp_path / "log.jsonl")
    state = _state(LONE, "whole", _values())
    save(state, tmp_path, graph=GRAPH, keep=1, log=log)
    log.close()
    (event,) = read(tmp_path / "log.jsonl")
    assert isinstance(event, CheckpointEvent)
    assert (event.step, event.path) == (1, "checkpoints/step-1")
    assert event.seconds > 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    _kill_while_saving(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
