"""Profile files, what makes one stale, and where they are kept between runs."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from .. import __version__
from ..cluster import detect
from ..cluster.types import Cluster
from ..errors import ConfigError, Violation
from ..graph.layer import LayerGraph
from .facts import Facts, differences, facts_of
from .record import Collective, Profile

_ANOTHER = {
    "graph": "another model, or other lengths of samples",
    "cluster": "another cluster (hosts, devices or links)",
}

_LAYERS = {
    True: "layers that are compiled (train.compile = true)",
    False: "layers that are not compiled (train.compile = false)",
}


def inputs_hash(graph: LayerGraph, cluster: Cluster, precision: str) -> str:
    """What a profile depends on, in words: ``graph:.. cluster:.. precision:..``."""
    links = hashlib.sha256(msgspec.json.encode(cluster)).hexdigest()[:16]
    return f"graph:{graph.fingerprint} cluster:{links} precision:{precision}"


def versions() -> dict[str, str]:
    """Versions whose change makes times stale."""
    import torch

    return {
        "polyreme": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
    }


def made_now(graph: LayerGraph, cluster: Cluster, precision: str) -> dict[str, Any]:
    """The fields of a profile that say for what, on what and when it was made."""
    return {
        "precision": precision,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "hardware": detect.hardware(cluster),
        "versions": versions(),
        "inputs_hash": inputs_hash(graph, cluster, precision),
        "made_for": facts_of(graph, cluster),
    }


def save(profile: Profile, path: Path) -> None:
    """Write a profile as JSON, replacing the file at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n"
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(data)
    partial.replace(path)


def load(path: Path) -> Profile:
    """Read a profile file.

    Raises:
        ConfigError: the file is missing, is no JSON or breaks the format; names the place.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError([_broken(path, None, f"cannot be read ({reason})")]) from error
    try:
        profile = msgspec.json.decode(data, type=Profile)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at ")
        where = place.strip("`").removeprefix("$.")
        raise ConfigError([_broken(path, where or None, f"breaks the format: {rule}")]) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError([_broken(path, None, f"is no profile: {error}")]) from error
    violations = [_broken(path, where, rule) for where, rule in _faults(profile)]
    if violations:
        raise ConfigError(violations)
    return profile


def valid(
    profile: Profile,
    inputs: str,
    global_batch: int,
    hardware: str,
    versions: Mapping[str, str],
    facts: Facts | None = None,
    *,
    compiled: bool = False,
) -> list[str]:
    """Why a profile must not be used here, one reason an input that differs; empty: it may.

    `inputs` is the `inputs_hash` wanted. A profile is for the batch that it was measured for: how
    large microbatches were, and how often they were run, follow from that. An assumed one that
    names none holds for any. `compiled` says whether layers are to be compiled; a measured profile
    is for layers that are, or for ones that are not, an assumed one for either. Of an assumed
    profile only polyreme's own version counts. `facts` of graph and cluster wanted say what differs
    from those of the profile, where it has some.
    """
    made_for, wanted = _inputs(profile.inputs_hash), _inputs(inputs)
    changed = [name for name in wanted if made_for.get(name) != wanted[name]]
    reasons = []
    for name in (each for each in changed if each in _ANOTHER):
        what = differences(profile.made_for.get(name, {}), (facts or {}).get(name, {}))
        reasons.append(f"{name}: made for {_ANOTHER[name]}" + (f" ({what})" if what else ""))
    if "precision" in changed:
        reasons.append(f"precision: made at {profile.precision}, wanted {wanted['precision']}")
    if profile.global_batch is None and not profile.assumed:
        reasons.append(f"batch: measured for one that it does not name, wanted {global_batch}")
    elif profile.global_batch not in (None, global_batch):
        reasons.append(
            f"batch: made for a global batch of {profile.global_batch}, wanted {global_batch}"
        )
    if profile.compiled != compiled and not profile.assumed:
        reasons.append(f"compile: made of {_LAYERS[profile.compiled]}, wanted {_LAYERS[compiled]}")
    if profile.hardware != hardware:
        reasons.append(f"hardware: made on {profile.hardware}, this is {hardware}")
    for name in sorted({*profile.versions, *versions}):
        before, now = profile.versions.get(name, "absent"), versions.get(name, "absent")
        if before != now and (name == "polyreme" or not profile.assumed):
            reasons.append(f"{name}: made with {before}, this is {now}")
    return reasons


def missing(profile: Profile, kinds: Iterable[str], n_devices: int) -> list[str]:
    """Entries that plans over so many devices need and the profile lacks, as paths in its file."""
    lacking = [f"layers.{kind}" for kind in dict.fromkeys(kinds) if kind not in profile.layers]
    needed: tuple[Collective, ...] = ("all_reduce", "all_gather", "reduce_scatter")
    absent = [op for op in needed if n_devices > 1 and not profile.collectives.get(op)]
    return [*lacking, *(f"collectives.{op}" for op in absent)]


def missing_parts(profile: Profile, graph: LayerGraph, n_devices: int, tp: int | None) -> list[str]:
    """Entries of tensor parts (`tp` of them, or as many as may be) that nothing stands in for.

    Bytes are taken from the next fewer parts; a measured profile has times of every number that
    divides the devices.
    """
    degrees = [n for n in graph.tensor_degrees(n_devices) if n > 1 and tp in (None, n)]
    lacking = []
    for kind, layer in {layer.kind: layer for layer in graph.layers}.items():
        times, plan = profile.layers.get(kind), graph.tensor_plan(layer.name)
        if times is None or plan is None or not degrees:
            continue
        if min(times.part_bytes, default=n_devices + 1) > degrees[0]:
            lacking.append(f"layers.{kind}.part_bytes.{degrees[0]}")
        if plan.cuttings and not profile.assumed:
            timed = [n for n in degrees if n_devices % n == 0 and n not in times.parts]
            lacking += [f"layers.{kind}.parts.{n}" for n in timed]
    return lacking


def _inputs(text: str) -> dict[str, str]:
    return dict(part.partition(":")[::2] for part in text.split())


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where profiles are kept between runs, from the user's environment."""
    base = environment.get("XDG_CACHE_HOME", "")
    if not Path(base).is_absolute():
        base = str(Path(environment.get("HOME") or Path.home()) / ".cache")
    return Path(base) / "polyreme"


def cache_path(
    folder: Path, inputs: str, global_batch: int | None, *, compiled: bool = False
) -> Path:
    """The kept profile for an `inputs_hash`, a batch and a kind of layers; it need not exist."""
    key = f"{inputs} batch:{global_batch}{' compiled' * compiled}"
    return folder / f"profile-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"


def cached(
    folder: Path,
    inputs: str,
    global_batch: int,
    hardware: str,
    versions: Mapping[str, str],
    *,
    compiled: bool = False,
) -> Profile | None:
    """The kept profile if it may still be used; None if there is none, or it is stale or broken."""
    try:
        profile = load(cache_path(folder, inputs, global_batch, compiled=compiled))
    except ConfigError:
        return None
    stale = valid(profile, inputs, global_batch, hardware, versions, compiled=compiled)
    return None if stale else profile


def _faults(profile: Profile) -> list[tuple[str, str]]:
    """What the format allows and no profile holds."""
    curves = [
        (f"layers.{kind}.{name}", times.microbatch, seconds)
        for kind, times in profile.layers.items()
        for name, seconds in (("forward_s", times.forward_s), ("backward_s", times.backward_s))
    ]
    curves += [
        (f"collectives.{op}[{index}].seconds", entry.size_bytes, entry.seconds)
        for op, entries in profile.collectives.items()
        for index, entry in enumerate(entries)
    ]
    curves += [
        (f"layers.{kind}.parts.{n}.{name}", part.microbatch, seconds)
        for kind, times in profile.layers.items()
        for n, part in times.parts.items()
        for name, seconds in (("forward_s", part.forward_s), ("backward_s", part.backward_s))
    ]
    faults = [*_negative(profile)]
    for path, sizes, seconds in curves:
        if not sizes or len(sizes) != len(seconds):
            faults.append((path, "does not have one time for each size"))
        elif list(sizes) != sorted(set(sizes)) or sizes[0] < 1:
            faults.append((path, "has sizes that do not rise from 1"))
        elif not all(0 <= value < float("inf") for value in seconds):
            faults.append((path, "has times that are no seconds"))
    shares = {"overlap": profile.overlap, "sharded_overlap": profile.sharded_overlap}
    for name, share in shares.items():
        if share is not None and not 0 <= share <= 1:
            faults.append((name, "is no share of 0 to 1"))
    rates = ("optimizer_s_per_byte", "gradient_s_per_byte", "more_gradient_s_per_byte")
    amounts = (*rates, "matmul_flops", "context_bytes")
    wrong = [name for name in amounts if not 0 <= getattr(profile, name) < float("inf")]
    wrong += [
        f"{where}.host_s"
        for kind, times in profile.layers.items()
        for where, host in (
            (f"layers.{kind}", times.host_s),
            *((f"layers.{kind}.parts.{n}", part.host_s) for n, part in times.parts.items()),
        )
        if host is not None
        and not all(0 <= each < float("inf") for each in msgspec.structs.astuple(host))
    ]
    return [*faults, *((name, "is no amount from 0") for name in wrong)]


def _negative(profile: Profile) -> Iterator[tuple[str, str]]:
    """Bytes that are none. Those of a single sample alone may be fewer than of one among others."""
    rule = "is no number of bytes from 0"
    for kind, times in profile.layers.items():
        path = f"layers.{kind}"
        for name in ("saved", "recompute", "again"):
            field = f"{name}_bytes_per_sample"
            if (getattr(times, field) or 0) < 0:
                yield f"{path}.{field}", rule
        if (times.loss_bytes or 0) < 0:
            yield f"{path}.loss_bytes", rule
        passing = times.passing_bytes
        if passing is not None and min(passing.sample, passing.fixed) < 0:
            yield f"{path}.passing_bytes", rule
        amounts = {f"{path}.fixed_bytes": times.fixed_bytes}
        alone = {f"{path}.alone_bytes": times.kept_bytes(1)}
        for n, part in times.part_bytes.items():
            own = f"{path}.part_bytes.{n}"
            amounts |= {
                f"{own}.{name}": getattr(part, name) for name in ("whole", "split", "fixed")
            }
            if n > 1:
                alone[f"{own}.alone"] = times.kept_bytes(1, tp=n)
        for where, kept in (*amounts.items(), *alone.items()):
            for name in ("saved", "recompute", "again"):
                if getattr(kept, name) < 0:
                    said = "makes less than 0 bytes of a single sample" if where in alone else rule
                    yield f"{where}.{name}", said


def _broken(path: Path, where: str | None, rule: str) -> Violation:
    return Violation(
        path="profile" if where is None else f"profile.{where}",
        value=str(path),
        rule=rule,
        legal="a profile.json as `polyreme profile` writes it",
    )
