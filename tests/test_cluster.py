"""Presets, cluster texts and files, accelerators and detection."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import polyreme
from polyreme.cluster.file import encode, read, write
from polyreme.cluster.options import ClusterOptions
from polyreme.cluster.parse import first, parse, parse_preset
from polyreme.cluster.presets import PRESETS, preset, recognise
from polyreme.errors import ConfigError

SOURCE = Path(polyreme.__file__).parent
# Tensor rates that datasheets print with sparsity: no peak of ours may be one of these.
SPARSE = {1979e12, 1671e12, 1513e12, 989e12, 835e12, 756e12 * 2, 624e12, 3958e12}


# Presets


def test_h200_has_the_dense_peak_not_the_sparse_one() -> None:
    known = recognise("NVIDIA H200")
    assert known is not None
    assert known.device.peak_flops["bf16"] == 989.5e12


def test_no_preset_holds_a_sparse_peak() -> None:
    for entry in PRESETS:
        for dtype in ("bf16", "fp16"):
            assert entry.device.peak_flops.get(dtype) not in SPARSE
        tf32 = entry.device.peak_flops.get("tf32")
        assert tf32 is None or tf32 == pytest.approx(entry.device.peak_flops["bf16"] / 2, rel=1e-3)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA H20",
        "NVIDIA GH200 480GB",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H2000",
        "Ascend910B1",
        "A card from nowhere",
        "",
    ],
)
def test_an_unknown_device_name_is_not_taken_for_a_known_one(name) -> None:
    assert recognise(name) is None


@pytest.mark.parametrize(
    ("reported", "bf16"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835.5e12),
        ("NVIDIA H200 NVL", 835.5e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("Tesla V100-SXM2-32GB", None),
        ("BW1000", 480e12),
    ],
)
def test_form_factors_have_their_own_peaks(reported, bf16) -> None:
    known = recognise(reported)
    assert known is not None
    assert known.device.peak_flops.get("bf16") == bf16


def test_every_figure_names_a_source() -> None:
    for entry in PRESETS:
        assert len(entry.device.source) > 10, entry.device.name
        assert len(entry.intra.source) > 10
        assert len(entry.inter.source) > 10


def test_no_reported_name_belongs_to_two_presets() -> None:
    names = [name.lower() for entry in PRESETS for name in entry.reported]
    assert len(names) == len(set(names))
    assert len({entry.device.name for entry in PRESETS}) == len(PRESETS)


@pytest.mark.parametrize(
    "name", ["H100", "H200", "A100", "V100", "Titan Xp", "Ascend 910A", "DCU BW1000", "CPU"]
)
def test_presets_go_by_their_everyday_names(name) -> None:
    assert preset(name) is preset(name.lower().replace(" ", "-"))


# Texts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("1xH100", [1]),
        ("8xH100", [8]),
        ("32xH100", [8, 8, 8, 8]),
        ("12xA100", [8, 4]),
        ("2x16xH100", [16, 16]),
        ("3x1xV100", [1, 1, 1]),
        ("8xTitan Xp", [4, 4]),
        ("20xCPU", [20]),
    ],
)
def test_shapes_fill_hosts(text, hosts) -> None:
    assert [host.n_devices for host in parse_preset(text).hosts] == hosts


@pytest.mark.parametrize(
    "text",
    ["", "H100", "x8xH100", "0xH100", "-1xH100", "8x", "8xH1000", "2x0xH100", "9999999x9xH100"],
)
def test_a_wrong_shape_is_a_violation(text) -> None:
    (violation,) = ClusterOptions(preset=text).check()
    assert violation.path == "cluster.preset"
    assert violation.legal


def test_a_text_is_a_preset_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    write(parse("preset:2x2xH100"), file)
    assert parse(str(file)) == parse("preset:2x2xH100")


# Options


def test_options_exclude_one_another_and_default_to_detection() -> None:
    assert ClusterOptions().cluster() is None
    assert ClusterOptions(devices=4).cluster() is None
    assert len(ClusterOptions(preset="8xH100", file="cluster.toml").check()) == 1


def test_devices_takes_the_first_ones_and_no_more_than_there_are() -> None:
    cut = ClusterOptions(preset="2x8xH100", devices=12).cluster()
    assert cut is not None
    assert [host.n_devices for host in cut.hosts] == [8, 4]
    (violation,) = ClusterOptions(preset="2x8xH100", devices=17).check()
    assert violation.path == "cluster.devices"
    assert "16" in violation.legal


def test_cutting_a_cluster_drops_types_that_are_not_used(tmp_path: Path) -> None:
    mixed = tmp_path / "mixed.toml"
    mixed.write_text(MIXED)
    cluster = read(mixed)
    assert set(first(cluster, 4).device_types) == {"fast"}
    assert first(cluster, cluster.n_devices) is cluster


def test_options_are_read_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from polyreme.cluster.options import ClusterOptions\n"
        "assert ClusterOptions(preset='2x8xH100').cluster().n_devices == 16\n"
        "import polyreme.cluster.accelerator, polyreme.cluster.detect"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Files

MIXED = """
name = "two kinds"

[device_types.fast]
preset = "H100"
memory = "40 GiB"

[device_types.slow]
memory = "16 GB"
peak_flops = { fp32 = "15.7 Tflops", fp16 = 1.25e14 }
source = "the rack's label"

[[hosts]]
name = "new"
device_type = "fast"
devices = 4

[[hosts]]
device_type = "slow"
devices = 8
count = 2

[intra]
bandwidth = "150 GB/s"
latency = "5 us"

[inter]
bandwidth = "100 Gbit/s"
"""


def test_a_file_reads_units_presets_and_counts(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(MIXED)
    cluster = read(file)
    assert cluster.n_devices == 20
    assert [host.name for host in cluster.hosts] == ["new", "host-1", "host-2"]
    assert cluster.type_of(3).memory_bytes == 40 * 2**30
    assert cluster.type_of(3).peak_flops["bf16"] == 989.4e12
    assert cluster.type_of(19).peak_flops == {"fp32": 15.7e12, "fp16": 1.25e14}
    assert cluster.type_of(19).memory_bandwidth_bytes_s is None
    assert cluster.intra.latency_s == 5e-6
    assert cluster.inter.bandwidth_bytes_s == 12.5e9


def test_every_violation_of_a_file_comes_at_once(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(
        "speed = 1\n"
        "[device_types.a]\nmemory = '80 XB'\npeak_flops = { bf16 = -1, int4 = 5 }\n"
        "[device_types.b]\n[device_types.c]\npreset = 'H1000'\n"
        "[[hosts]]\nname = 'x'\ndevice_type = 'a'\ndevices = 0\n"
        "[[hosts]]\nname = 'x'\ndevice_type = 'z'\ndevices = true\n"
        "[intra]\nlatency = -1\n[inter]\nbandwidth = 0\n"
    )
    violations = ClusterOptions(file=str(file)).check()
    paths = [violation.path.removeprefix("cluster.file.") for violation in violations]
    assert set(paths) >= {
        "speed",
        "device_types.a.memory",
        "device_types.a.peak_flops.bf16",
        "device_types.a.peak_flops.int4",
        "device_types.b.memory",
        "device_types.c.preset",
        "hosts[0].devices",
        "hosts[1].device_type",
        "hosts[1].devices",
        "hosts",
        "intra.bandwidth",
        "intra.latency",
        "inter.bandwidth",
    }
    assert all(violation.rule and violation.legal for violation in violations)


@pytest.mark.parametrize("text", ["", "hosts = 3", "= 3", "[hosts]\na = 1", "device_types = 1"])
def test_a_broken_file_is_a_violation_not_a_crash(tmp_path: Path, text) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    assert ClusterOptions(file=str(file)).check()
    assert ClusterOptions(file=str(tmp_path)).check()
    file.write_bytes(b"\xff\xfe")
    assert ClusterOptions(file=str(file)).check()


@pytest.mark.parametrize("name", [entry.device.name for entry in PRESETS])
def test_a_cluster_survives_its_file(tmp_path: Path, name) -> None:
    cluster = parse_preset(f"2x3x{name}")
    write(cluster, tmp_path / "cluster.toml")
    assert read(tmp_path / "cluster.toml") == cluster
    roomy = msgspec.structs.replace(cluster.hosts[0], memory_bytes=2**40)
    cluster = msgspec.structs.replace(cluster, hosts=(roomy, *cluster.hosts[1:]))
    write(cluster, tmp_path / "cluster.toml")
    assert read(tmp_path / "cluster.toml") == cluster
    odd = encode(cluster).replace("host-0", 'a \\"quoted\\" \\\\ name')
    (tmp_path / "odd.toml").write_text(odd)
    assert read(tmp_path / "odd.toml").hosts[0].name == 'a "quoted" \\ name'


# The page


def _row(entry) -> str:
    """A preset as a row of the page's table, read off the structs."""
    device = entry.device
    peaks = [device.peak_flops.get(dtype) for dtype in ("fp64", "fp32", "tf32", "bf16", "fp16")]
    cells = [f"{peak / 1e12:g}" if peak else "" for peak in peaks]
    bandwidth = device.memory_bandwidth_bytes_s
    both = (bandwidth, device.host_bandwidth_bytes_s)
    cells += [f"{each / 1e9:g}" if each else "" for each in both]
    cells += [f"{link.bandwidth_bytes_s / 1e9:g}" for link in (entry.intra, entry.inter)]
    memory = f"{device.memory_bytes / 1e9:.3g}"
    return " | ".join(["|", device.name, memory, *cells, str(entry.per_host or "any"), "|"])


def test_the_page_shows_every_preset_as_it_is_with_its_sources() -> None:
    page = (SOURCE.parents[1] / "docs" / "cluster.md").read_text()
    rows = {" ".join(line.split()) for line in page.splitlines()}
    for entry in PRESETS:
        row = " ".join(_row(entry).removeprefix("| ").removesuffix(" |").split())
        assert row in rows, entry.device.name
        assert entry.device.source in page
        assert entry.intra.source in page


def test_the_pages_cluster_file_is_read(tmp_path: Path) -> None:
    page = (SOURCE.parents[1] / "docs" / "cluster.md").read_text()
    blocks = [part.partition("```")[0] for part in page.split("```toml\n")[1:]]
    file = tmp_path / "cluster.toml"
    file.write_text(next(block for block in blocks if "[[hosts]]" in block))
    assert read(file).n_devices == 16


def test_a_preset_without_its_prefix_is_not_taken_for_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse("4xH100") == parse("preset:4xH100")
    (tmp_path / "4xH100").write_text("")
    with pytest.raises(ConfigError):
        parse("4xH100")
