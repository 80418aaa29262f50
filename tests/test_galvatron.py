"""A peer's profiles and plans: read as they were written, refused where they are not of this."""

from __future__ import annotations

import json
import math
from collections import Counter

import msgspec
import pytest

from drawn import graph_of
from planner_toy import cluster, workload
from polyreme.errors import ConfigError
from polyreme.planner.cost.data import DataCost
from polyreme.planner.cost.memory import Memory
from polyreme.planner.cost.pipeline import StepCost
from polyreme.planner.cost.unlike import UnlikeCost
from polyreme.planner.draft import Strategy
from polyreme.planner.galvatron import read_galvatron_draft
from polyreme.planner.given import price_draft
from polyreme.planner.prices import Prices
from polyreme.profile.fit import Fit
from polyreme.profile.galvatron import read_galvatron

GRAPH = graph_of("llama")
TOKENS = GRAPH.inputs["input_ids"].shape[0]
USUAL = Counter(layer.kind for layer in GRAPH.layers).most_common(1)[0][0]
N_USUAL = sum(layer.kind == USUAL for layer in GRAPH.layers)
MIB = 2**20
replace = msgspec.structs.replace


def _files(hosts: int = 1) -> dict[str, dict]:
    """Files of the peer's profiler for the tiny model, by name."""
    layer = next(layer for layer in GRAPH.layers if layer.kind == USUAL)
    place = f"{hosts}nodes_4gpus_per_node"
    other = {"activation": {"1": 8.0}, "model_states": {"1": 1.0}}
    return {
        "computation_profiling_fp32_tiny_all.json": {
            f"layernum[2]_bsz1_seq{TOKENS}": 5.0,
            f"layertype_0_bsz4_seq{TOKENS}": 3.0,
            f"layertype_0_bsz1_seq{TOKENS}": 4.0,
            f"layertype_other_bsz1_seq{TOKENS}": 2.0,
        },
        "memory_profiling_fp32_tiny_all.json": {
            "layertype_0_sp": {
                f"{TOKENS}": {
                    "parameter_size": layer.param_count * 4 / MIB,
                    "tp_activation_per_bsz_dict": {"1": 6.0, "2": 3.0, "checkpoint": 0.5},
                }
            },
            "other_memory_pp_on_first_sp": {f"{TOKENS}": other},
            "other_memory_pp_on_last_sp": {f"{TOKENS}": other},
        },
        f"sp_time_{place}.json": {
            "allreduce_size_4_1MB_time": 0.5,
            "allreduce_size_4_2MB_time": 0.8,
            "all2all_size_4_1MB_time": 0.1,
        },
        f"allreduce_bandwidth_{place}.json": {
            "allreduce_size_4_consec_1": 10.0,
            "allreduce_size_2_consec_1": 8.0,
            "allreduce_size_2_consec_0": 2.0,
        },
        f"p2p_bandwidth_{place}.json": {"pp_size_2": 4.0, "pp_size_4": 2.0},
        "overlap_coefficient.json": {"overlap_coe": 1.25},
    }


def _write(folder, files) -> str:
    for name, entries in files.items():
        (folder / name).write_text(json.dumps(entries))
    return f"galvatron:{folder}"


def _read(folder, files=None, hosts=(4,), precision="fp32"):
    text = _write(folder, files or _files(len(hosts)))
    return read_galvatron(text, GRAPH, cluster(*hosts), precision)


def test_milliseconds_a_sample_are_seconds_a_microbatch(tmp_path):
    profile = _read(tmp_path)
    times = profile.layers[USUAL]
    assert times.microbatch == (1, 4)
    assert times.forward_s == (0.004, 0.012)
    assert times.backward_s == (0.008, 0.024)
    assert times.saved_bytes_per_sample == 6 * MIB
    assert times.recompute_bytes_per_sample == MIB // 2
    others = [profile.layers[layer.kind] for layer in GRAPH.layers if layer.kind != USUAL]
    assert sum(each.forward_s[0] for each in others) == 0.002
    assert profile.overlap == 0.75
    assert profile.assumed


def test_bandwidths_become_times_of_their_groups(tmp_path):
    fit = Fit(_read(tmp_path, hosts=(4, 4)))
    assert fit.collective_s("all_reduce", 4, 2 * MIB, 1) == pytest.approx(0.8e-3)
    assert fit.collective_s("all_gather", 4, 2 * MIB, 1) == pytest.approx(0.4e-3)
    # Two neighbours at 8 GB/s send and get half of it twice; two on two hosts at 2 GB/s.
    assert fit.collective_s("all_reduce", 2, 8 * MIB, 1) == pytest.approx(8 * MIB / 8e9)
    assert fit.collective_s("all_reduce", 2, 8 * MIB, 2) == pytest.approx(8 * MIB / 2e9)
    assert fit.send_s(2, 8 * MIB, 2) == pytest.approx(8 * MIB / 4e9)
    assert fit.send_s(4, 8 * MIB, 2) == pytest.approx(8 * MIB / 2e9)


def _without(name, *keys):
    def change(files):
        entries = files[name]
        for key in keys[:-1]:
            entries = entries[key]
        del entries[keys[-1]]

    return change


def _grown(files):
    held = files["memory_profiling_fp32_tiny_all.json"]["layertype_0_sp"][f"{TOKENS}"]
    held["parameter_size"] *= 1.2


def _longer(files):
    entries = files["memory_profiling_fp32_tiny_all.json"]
    for name in entries:
        entries[name] = {f"{2 * TOKENS}": entries[name][f"{TOKENS}"]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda files: files.pop("overlap_coefficient.json"), "no overlap_coefficient"),
        (_without("computation_profiling_fp32_tiny_all.json", f"layertype_other_bsz1_seq{TOKENS}"),
         f"no layertype_other_bsz\\*_seq{TOKENS}"),
        (_without("memory_profiling_fp32_tiny_all.json", "other_memory_pp_on_last_sp"),
         "no other_memory_pp_on_last"),
        (lambda files: files.pop("sp_time_1nodes_4gpus_per_node.json"), "sp_time_1nodes_4gpus"),
        (_grown, "layers of .* MiB"),
        (_longer, f"made for {2 * TOKENS} tokens, not {TOKENS}"),
    ],
)  # fmt: skip
def test_what_is_missing_or_of_another_model_is_named(tmp_path, change, said):
    files = _files()
    change(files)
    with pytest.raises(ConfigError, match=said):
        _read(tmp_path, files)


def test_a_profile_at_another_precision_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no computation_profiling_bf16_"):
        _read(tmp_path, precision="bf16")


@pytest.mark.parametrize("text", ["galvatron:nowhere", "galvatron:", "galvatron:{folder}/a.json"])
def test_files_that_are_none_are_refused(tmp_path, text):
    (tmp_path / "a.json").write_text("[1")
    with pytest.raises(ConfigError):
        read_galvatron(text.format(folder=tmp_path), GRAPH, cluster(4), "fp32")


def _plan(**more):
    tps = ["1", *["2"] * (N_USUAL - 1)]
    return {
        "pp_deg": 1,
        "tp_sizes_enc": ",".join(tps),
        "tp_consecutive_flags": ",".join("1" * N_USUAL),
        "dp_types_enc": ",".join("1" + "0" * (N_USUAL - 1)),
        "checkpoint": ",".join("0" * (N_USUAL - 1) + "1"),
        "world_size": 4,
        "global_bsz": 16,
        "chunks": 2,
        "pp_division": str(N_USUAL),
        "pipeline_type": "pipedream_flush",
        "default_dp_type": "zero2",
        "vtp": 2,
        "embed_sdp": 1,
    } | more


def _draft(folder, **more):
    (folder / "plan.json").write_text(json.dumps(_plan(**more)))
    return read_galvatron_draft(f"galvatron:{folder / 'plan.json'}", GRAPH)


def test_a_peers_plan_runs_each_layer_as_it_says(tmp_path):
    draft = _draft(tmp_path)
    usual = [draft.strategies[layer.name] for layer in GRAPH.layers if layer.kind == USUAL]
    assert usual[0] == Strategy(shard=4, level="params")
    assert usual[-1] == Strategy(shard=2, tp=2, sp=True, level="grads", recompute=True)
    first = draft.strategies[GRAPH.layers[0].name]
    assert first == Strategy(shard=2, tp=2, sp=True, level="params")
    assert (draft.microbatches, draft.global_batch, draft.n_devices) == (2, 16, 4)


def test_layers_before_and_after_the_repeated_go_with_the_nearest_stage(tmp_path):
    sizes = (1, N_USUAL - 1)
    draft = _draft(tmp_path, pp_deg=2, pp_division=",".join(map(str, sizes)), vtp=1)
    names = [layer.name for layer in GRAPH.layers]
    assert [name for stage in draft.stages for name in stage] == names
    counts = [sum(GRAPH.layer(name).kind == USUAL for name in stage) for stage in draft.stages]
    assert counts == list(sizes)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"tp_sizes_enc": "1"}, "has 1 tp_sizes_enc"),
        ({"checkpoint": "a" + ",0" * (N_USUAL - 1)}, "no numbers"),
        ({"default_dp_type": "zero9"}, "zero9"),
        ({"pipeline_type": "other"}, "other"),
        ({"chunks": "2"}, "no plan of Galvatron"),
    ],
)
def test_a_peers_plan_that_is_none_is_refused(tmp_path, more, said):
    with pytest.raises(ConfigError, match=said):
        _draft(tmp_path, **more)


def test_a_peers_plan_for_another_batch_or_more_devices_is_refused(tmp_path):
    profile = _read(tmp_path)
    with pytest.raises(ConfigError, match="batch of 16, not 8"):
        price_draft(GRAPH, cluster(4), profile, workload(8), _draft(tmp_path))
    with pytest.raises(ConfigError, match="for 4 devices, there are 2"):
        price_draft(GRAPH, cluster(2), profile, workload(16), _draft(tmp_path))


@pytest.mark.parametrize("strategy", [Strategy(), Strategy(tp=2), Strategy(tp=2, recompute=True)])
@pytest.mark.parametrize("pp", [1, 2])
def test_layers_that_are_laid_out_alike_cost_what_they_do_in_a_plan_of_ours(tmp_path, strategy, pp):
    """Of one data rank nothing is exchanged but what both accounts play."""
    profile = _read(tmp_path)
    draft = _alike(tmp_path, strategy, pp)
    given = GRAPH, cluster(4), profile, workload(16)
    found = UnlikeCost(GRAPH, profile, Prices(*given).of)(draft)
    memory = Memory(GRAPH, workload(16), strategy.tp)
    whole = StepCost(DataCost(memory, profile, cluster(4)))(replace(draft, bucket_bytes=1))
    assert found.step_s == pytest.approx(whole.step_s, rel=1e-9)


def _alike(folder, strategy, pp):
    sizes = [N_USUAL] if pp == 1 else [1, N_USUAL - 1]
    draft = _draft(folder, pp_deg=pp, pp_division=",".join(map(str, sizes)), vtp=1)
    return replace(draft, strategies=dict.fromkeys(draft.strategies, strategy))


def test_states_are_those_of_each_layers_own_layout(tmp_path):
    profile, draft = _read(tmp_path), _draft(tmp_path)
    prices = Prices(GRAPH, cluster(4), profile, workload(16))
    causes = UnlikeCost(GRAPH, profile, prices.of).causes(draft, 0)
    wanted = sum(
        Memory(GRAPH, workload(16), strategy.tp).layer_storage(name, strategy, 0).parameters
        for name, strategy in draft.strategies.items()
    )
    assert causes["parameters"] == wanted


def test_what_moves_between_unlike_layouts_takes_time(tmp_path):
    """Of 16 samples in 2 microbatches, four devices with 2 each become two pairs with 4."""
    profile = _read(tmp_path)
    cost = UnlikeCost(GRAPH, profile, Prices(GRAPH, cluster(4), profile, workload(16)).of)
    whole = math.prod(GRAPH.layers[0].outputs["hidden"].shape) * 4 * 8
    apart, pairs = Strategy(shard=4), Strategy(shard=2, tp=2)
    fit = Fit(profile)
    there, back = cost.moved_s(apart, pairs, 0, 8, 1)
    assert there == pytest.approx(fit.collective_s("all_gather", 2, whole / 2, 1))
    assert back == 0
    assert cost.moved_s(pairs, apart, 0, 8, 1) == (0, there)
    split = replace(pairs, sp=True)  # of its samples each gives half of the tokens, for as many
    each = fit.collective_s("all_gather", 2, whole / 4, 1)
    assert cost.moved_s(apart, split, 0, 8, 1) == (each, each)
    assert cost.moved_s(split, split, 0, 8, 1) == (0, 0)
