"""Fits, assumed profiles, saved bytes and the profile store."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from polyreme.cluster.file import read, write
from polyreme.cluster.parse import parse, parse_preset
from polyreme.errors import ConfigError
from polyreme.graph.layer import LayerGraph
from polyreme.profile.assume import MATMUL_SHARE, assume, group_shapes
from polyreme.profile.fit import Curve, Fit, ring_s
from polyreme.profile.record import CollectiveTimes, LayerTimes, Profile
from polyreme.profile.store import (
    cache_folder,
    cache_path,
    cached,
    inputs_hash,
    load,
    missing,
    save,
    valid,
    versions,
)
from profile_toy import Modules, tiny_graph


def profile_of(**changes) -> Profile:
    """A profile with one kind and no group, changed."""
    times = LayerTimes(
        microbatch=(1, 2, 4),
        forward_s=(1.0, 2.0, 3.0),
        backward_s=(2.0, 3.0, 7.0),
        saved_bytes_per_sample=10,
        recompute_bytes_per_sample=4,
    )
    fields = {
        "layers": {"linear": times},
        "collectives": {},
        "optimizer_s_per_byte": 1e-9,
        "matmul_flops": 1e12,
        "overlap": 0.5,
        "context_bytes": 0,
        "precision": "fp32",
        "assumed": False,
        "date": "2026-01-01T00:00:00+00:00",
        "hardware": "2 x CPU",
        "versions": {"polyreme": "1", "torch": "2"},
        "inputs_hash": "aa",
        "global_batch": 8,
    }
    return Profile(**(fields | changes))


# Fits


def test_a_fit_passes_through_what_was_measured_and_between_it() -> None:
    fit = Fit(profile_of())
    assert [fit.forward_s("linear", n) for n in (1, 2, 4)] == [1.0, 2.0, 3.0]
    assert fit.forward_s("linear", 3) == 2.5
    assert fit.backward_s("linear", 3) == 5.0
    again = fit.asked("linear", 4, recompute=True)
    assert again.backward - fit.backward_s("linear", 4) == 3.0


def test_beyond_the_last_size_the_last_slope_goes_on() -> None:
    assert Fit(profile_of()).backward_s("linear", 10) == 7.0 + 6 * 2.0


def test_noise_never_makes_more_work_cheaper() -> None:
    curve = Curve((1, 2, 4, 8), (3.0, 1.0, 5.0, 4.0))
    seconds = [curve(size / 4) for size in range(1, 200)]
    assert seconds == sorted(seconds)
    assert curve(1000) > curve(8)


@pytest.mark.parametrize("seconds", [(0.0,), (2.0,), (-1.0, -2.0), (0.0, 0.0)])
def test_edges_of_a_curve_are_never_negative(seconds) -> None:
    curve = Curve(tuple(range(1, len(seconds) + 1)), seconds)
    assert curve(0) == 0.0
    assert all(curve(size) >= 0.0 for size in (1, 2, 100))


def test_one_measured_size_scales_in_proportion_above_it() -> None:
    assert Curve((4,), (2.0,))(8) == 4.0
    assert Curve((4,), (2.0,))(1) == 2.0


def _ring_profile(n_devices: int, n_hosts: int = 1, latency_s: float = 1e-4) -> Profile:
    sizes = (1, 10**6, 10**8)
    return profile_of(
        collectives={
            "all_reduce": (
                CollectiveTimes(
                    n_devices=n_devices,
                    n_hosts=n_hosts,
                    size_bytes=sizes,
                    seconds=tuple(
                        ring_s("all_reduce", n_devices, size, latency_s, 1e9) for size in sizes
                    ),
                ),
            )
        }
    )


@pytest.mark.parametrize("n_devices", [2, 3, 8, 64])
def test_unseen_group_sizes_follow_the_ring_formula(n_devices) -> None:
    fit = Fit(_ring_profile(4))
    expected = ring_s("all_reduce", n_devices, 3e7, 1e-4, 1e9)
    assert fit.collective_s("all_reduce", n_devices, 3e7) == pytest.approx(expected, rel=1e-6)


def test_nothing_to_send_or_nobody_to_send_to_is_free() -> None:
    fit = Fit(_ring_profile(4))
    assert fit.collective_s("all_reduce", 1, 10**9) == 0.0
    assert fit.collective_s("all_reduce", 4, 0) == 0.0
    assert Fit(profile_of()).collective_s("all_gather", 1, 5) == 0.0


def test_a_group_over_hosts_is_not_priced_by_one_inside_a_host() -> None:
    inside = _ring_profile(8).collectives["all_reduce"][0]
    across = msgspec.structs.replace(
        inside, n_hosts=2, seconds=tuple(10 * value for value in inside.seconds)
    )
    fit = Fit(profile_of(collectives={"all_reduce": (inside, across)}))
    assert fit.collective_s("all_reduce", 8, 10**6, 2) == across.seconds[1]
    assert fit.collective_s("all_reduce", 8, 10**6) == inside.seconds[1]


# Assumed profiles


def test_an_assumed_profile_says_so_and_names_its_hardware() -> None:
    profile = assume(tiny_graph("linear"), parse_preset("2x8xH100"), "bf16")
    assert profile.assumed
    assert profile.hardware == "16 x H100 on 2 hosts"
    assert profile.matmul_flops == 989.4e12


def test_large_products_take_their_share_of_the_dense_peak() -> None:
    graph = tiny_graph("linear")
    heavy = LayerGraph(
        name="heavy",
        layers=(msgspec.structs.replace(graph.layers[0], flops=1e15),),
        inputs=graph.inputs,
        output=graph.output,
        builder=Modules(),
    )
    fit = Fit(assume(heavy, parse_preset("1xH200"), "bf16"))
    assert fit.forward_s("linear", 4) == pytest.approx(4e15 / (989.5e12 * MATMUL_SHARE))
    assert fit.backward_s("linear", 4) == pytest.approx(2 * fit.forward_s("linear", 4))


def test_an_unknown_peak_is_named_and_never_guessed() -> None:
    with pytest.raises(ConfigError) as caught:
        assume(tiny_graph("linear"), parse_preset("8xV100"), "bf16")
    (violation,) = caught.value.violations
    assert violation.path == "cluster.device_types.V100.peak_flops.bf16"
    assert "fp32" in violation.legal
    assert "fp16" not in violation.legal  # known, and no precision of a run


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_type_without_a_figure_for_any_precision_left_its_user_stuck(
    precision: str, tmp_path: Path
) -> None:
    """The lines that the message gives make a cluster file that can be planned for."""
    cluster = parse_preset("20xAscend-910A")
    with pytest.raises(ConfigError) as caught:
        assume(tiny_graph("linear"), cluster, precision)
    (violation,) = caught.value.violations
    assert "known: fp16 256 Tflops/s, which no run trains in" in violation.rule
    lines = re.search(r"with the lines (device_types = .+) and (hosts = .+?); ", violation.legal)
    assert lines is not None
    given = tmp_path / "cluster.toml"
    given.write_text("\n".join(lines.groups()).replace("NUMBER", "200"))
    with_figure = read(given)
    assert with_figure.n_devices == cluster.n_devices
    assert with_figure.intra == cluster.intra
    assert assume(tiny_graph("linear"), with_figure, precision).assumed


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_a_processor_has_a_stated_default(precision) -> None:
    assert assume(tiny_graph("linear"), parse_preset("2xCPU"), precision).assumed


def test_the_slowest_device_type_counts(tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.toml"
    mixed.write_text(
        '[device_types.fast]\npreset = "H100"\n[device_types.slow]\npreset = "A100"\n'
        '[[hosts]]\ndevice_type = "fast"\ndevices = 8\n'
        '[[hosts]]\ndevice_type = "slow"\ndevices = 8\n'
        '[intra]\nbandwidth = "300 GB/s"\n[inter]\nbandwidth = "200 Gbit/s"\n'
    )
    assert assume(tiny_graph("linear"), read(mixed), "bf16").matmul_flops == 312e12


def test_every_even_group_has_times_and_slow_links_cost_more() -> None:
    cluster = parse_preset("2x4xH100")
    assert group_shapes(cluster) == [(2, 1), (2, 2), (4, 1), (4, 2), (8, 2)]
    fit = Fit(assume(tiny_graph("linear"), cluster, "bf16"))
    inside = fit.collective_s("all_reduce", 2, 10**11)
    across = fit.collective_s("all_reduce", 2, 10**11, 2)
    assert across == pytest.approx(inside * 450 / 50, rel=1e-2)
    assert fit.collective_s("all_gather", 8, 10**9, 2) < fit.collective_s("all_reduce", 8, 10**9, 2)


def test_a_group_larger_than_a_host_is_priced_over_hosts_unasked() -> None:
    fit = Fit(assume(tiny_graph("linear"), parse_preset("2x8xH100"), "bf16"))
    assert fit.collective_s("all_reduce", 16, 10**9) == fit.collective_s("all_reduce", 16, 10**9, 2)
    assert fit.collective_s("all_reduce", 8, 10**9) == fit.collective_s("all_reduce", 8, 10**9, 1)


def test_one_device_needs_no_collectives() -> None:
    profile = assume(tiny_graph("linear"), parse_preset("1xA100"), "fp32")
    assert Fit(profile).collective_s("all_reduce", 1, 10**6) == 0.0


# Store


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    profile = assume(tiny_graph("linear", "relu"), parse_preset("2x2xA100"), "bf16")
    save(profile, tmp_path / "deep" / "profile.json")
    assert load(tmp_path / "deep" / "profile.json") == profile


def test_a_valid_profile_is_reused_and_a_stale_one_says_what_differs(tmp_path: Path) -> None:
    profile = profile_of()
    good = ("aa", 8, "2 x CPU", {"polyreme": "1", "torch": "2"})
    assert valid(profile, *good) == []
    assert valid(profile, "graph:b precision:bf16", *good[1:]) == [
        "graph: made for another model, or other lengths of samples",
        f"precision: made at {profile.precision}, wanted bf16",
    ]
    assert "4 x CPU" in valid(profile, "aa", 8, "4 x CPU", good[3])[0]
    assert valid(profile, "aa", 8, "2 x CPU", {"polyreme": "1", "torch": "3"}) == [
        "torch: made with 2, this is 3"
    ]
    assert len(valid(profile, "cluster:b", 8, "other", {})) == 4
    save(profile, cache_path(tmp_path, "aa", 8))
    assert cached(tmp_path, *good) == profile
    assert cached(tmp_path, "aa", 8, "4 x CPU", good[3]) is None
    assert cached(tmp_path, "graph:b", *good[1:]) is None


def test_the_hash_changes_with_each_input() -> None:
    graph, other = tiny_graph("linear"), tiny_graph("linear", "linear")
    cluster = parse("preset:2xH100")
    hashes = {
        inputs_hash(graph, cluster, "bf16"),
        inputs_hash(other, cluster, "bf16"),
        inputs_hash(graph, parse("preset:4xH100"), "bf16"),
        inputs_hash(graph, cluster, "fp32"),
    }
    assert len(hashes) == 4
    assert inputs_hash(tiny_graph("linear"), parse("preset:2xH100"), "bf16") in hashes


def test_what_differs_between_inputs_is_named() -> None:
    graph, cluster = tiny_graph("linear"), parse("preset:2xH100")
    made = profile_of(inputs_hash=inputs_hash(graph, cluster, "bf16"))
    wanted = inputs_hash(tiny_graph("linear", "linear"), parse("preset:4xH100"), "fp32")
    rest = (8, made.hardware, made.versions)
    named = [reason.split(":")[0] for reason in valid(made, wanted, *rest)]
    assert named == ["graph", "cluster", "precision"]
    assert valid(made, inputs_hash(graph, cluster, "bf16"), *rest) == []


def test_a_profile_for_another_batch_is_refused_whichever_is_larger(tmp_path: Path) -> None:
    """One for a larger batch taken as one for a smaller; of two kept ones, one lost."""
    made = msgspec.structs.replace(profile_of(inputs_hash="graph:a"), global_batch=8)
    rest = (made.hardware, made.versions)
    for wanted in (1, 4, 7, 9, 16):
        (reason,) = valid(made, "graph:a", wanted, *rest)
        assert reason == f"batch: made for a global batch of 8, wanted {wanted}"
    assert valid(made, "graph:a", 8, *rest) == []
    other = msgspec.structs.replace(made, global_batch=4)
    for each in (made, other):
        save(each, cache_path(tmp_path, "graph:a", each.global_batch))
    assert [cached(tmp_path, "graph:a", batch, *rest) for batch in (8, 4)] == [made, other]
    assert cached(tmp_path, "graph:a", 2, *rest) is None
    save(made, cache_path(tmp_path, "graph:a", 2))  # a file that was moved
    assert cached(tmp_path, "graph:a", 2, *rest) is None


def test_of_profiles_of_compiled_layers_and_of_others_both_are_kept(tmp_path: Path) -> None:
    """One that took the other's place, or was taken for it."""
    plain = msgspec.structs.replace(profile_of(inputs_hash="graph:a"), global_batch=8)
    made = msgspec.structs.replace(plain, compiled=True)
    rest = ("graph:a", 8, made.hardware, made.versions)
    for each in (made, plain):
        save(each, cache_path(tmp_path, "graph:a", 8, compiled=each.compiled))
    assert cached(tmp_path, *rest) == plain
    assert cached(tmp_path, *rest, compiled=True) == made
    for each in (made, plain):
        assert valid(each, *rest, compiled=each.compiled) == []
        (reason,) = valid(each, *rest, compiled=not each.compiled)
        assert reason.startswith("compile: ")
    save(plain, cache_path(tmp_path, "graph:a", 8, compiled=True))  # a file that was moved
    assert cached(tmp_path, *rest, compiled=True) is None


def test_an_assumed_profile_that_names_no_batch_holds_for_any_and_a_measured_one_for_none() -> None:
    made = profile_of(inputs_hash="graph:a", assumed=True, global_batch=None)
    assert valid(made, "graph:a", 3, made.hardware, made.versions) == []
    measured = msgspec.structs.replace(made, assumed=False)
    assert valid(measured, "graph:a", 3, made.hardware, made.versions) == [
        "batch: measured for one that it does not name, wanted 3"
    ]


def test_a_missing_entry_is_named() -> None:
    profile = profile_of()
    (kind,) = profile.layers
    alone = msgspec.structs.replace(profile, collectives={})
    assert missing(alone, [kind, "head", "head"], 1) == ["layers.head"]
    assert missing(alone, [kind], 2) == [
        "collectives.all_reduce", "collectives.all_gather", "collectives.reduce_scatter"
    ]  # fmt: skip


def test_a_cluster_from_its_file_hashes_like_the_original(tmp_path: Path) -> None:
    cluster = parse("preset:2x4xTitan Xp")
    write(cluster, tmp_path / "cluster.toml")
    graph = tiny_graph("linear")
    assert inputs_hash(graph, read(tmp_path / "cluster.toml"), "fp32") == inputs_hash(
        graph, cluster, "fp32"
    )


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("{", "profile"),
        ("", "profile"),
        ('{"layers": 3}', "profile.layers"),
        ("\xff", "profile"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, text, place) -> None:
    file = tmp_path / "profile.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert caught.value.violations[0].path == place
    with pytest.raises(ConfigError):
        load(tmp_path / "absent.json")


def test_times_that_are_no_curve_are_refused(tmp_path: Path) -> None:
    times = profile_of().layers["linear"]
    wrong = {
        "short": msgspec.structs.replace(times, forward_s=(1.0,)),
        "unsorted": msgspec.structs.replace(times, microbatch=(1, 4, 2)),
        "negative": msgspec.structs.replace(times, backward_s=(1.0, -1.0, 2.0)),
    }
    file = tmp_path / "profile.json"
    file.write_bytes(msgspec.json.encode(profile_of(layers=wrong)))
    with pytest.raises(ConfigError) as caught:
        load(file)
    assert {violation.path.split(".")[2] for violation in caught.value.violations} == set(wrong)


def test_the_cache_follows_the_users_environment() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/x", "HOME": "/h"}) == Path("/x/polyreme")
    assert cache_folder({"HOME": "/h"}) == Path("/h/.cache/polyreme")
    assert cache_folder({"XDG_CACHE_HOME": "relative", "HOME": "/h"}) == Path("/h/.cache/polyreme")


def test_versions_hold_what_times_depend_on() -> None:
    assert set(versions()) == {"polyreme", "python", "torch"}
