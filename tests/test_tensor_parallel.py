"""A layer's tensor parts compute together what it computes unsplit, per parameter."""

from __future__ import annotations

import pytest
import torch

from polyreme.graph.cut import Cut, vocabulary_interval
from polyreme.graph.dropout import without_dropout
from polyreme.graph.loss import cross_entropy as whole_loss
from polyreme.graph.tensor import Run, padded
from polyreme.runtime.apply.tensor import Tp, argmax, cross_entropy, split
from polyreme.runtime.timing import Traffic
from tensor_cases import CASES, B, T, V, compare, drops, parts, paths, trained
from tiny import Model

FIRST = ("gemma2", "gpt2", "phi3", "swin")


EACH = [*FIRST, *(pytest.param(n, marks=pytest.mark.long) for n in CASES if n not in FIRST)]


@pytest.mark.slice(2)
@pytest.mark.parametrize("name", EACH)
def test_parts_compute_what_the_whole_computes(pool, name):
    ways = [(degree, sp, degree == 4) for degree in (2, 4) for sp in (False, True)]
    for wrong in pool(4).run(compare, name, ways, timeout_s=120):
        assert wrong == []


def test_dropout_is_alike_between_regions_and_differs_inside(pool):
    first, second = pool(2).run(drops, False)
    assert torch.equal(first["out"], second["out"])
    assert (first["outside"] * second["outside"] == 1).all()
    assert (first["inside"] * second["inside"] == -1).any()
    assert torch.equal(first["state"], second["state"])
    assert first["kept"]


def test_dropout_differs_everywhere_where_tokens_are_split(pool):
    first, second = pool(2).run(drops, True)
    for where in ("inside", "outside"):  # the first holds a token more outside
        n_tokens = second[where].shape[1]
        assert (first[where][:, :n_tokens] * second[where] == -1).any()
    assert torch.equal(first["state"], second["state"])
    assert first["kept"]


def test_a_sample_whose_path_is_dropped_is_dropped_in_all_parts(pool):
    first, second = pool(2).run(paths)
    assert torch.equal(first["path"], second["path"])
    assert set(first["path"].tolist()) == {False, True}
    assert (first["inside"] * second["inside"] == -1).any()
    assert torch.equal(first["state"], second["state"])


def sent_bytes(world) -> dict[bool, tuple[int, int]]:
    """Bytes that a block sends forward and backward, without and with tokens split."""
    found = {}
    graph = CASES["llama"].graph()
    for sp in (False, True):
        tp = parts(world, 2, sp=sp)
        module = graph.build("block.0").to_empty(device="cpu")
        graph.initialise("block.0", module, 0)
        split(module, graph.tensor_plan("block.0"), tp)
        hidden = torch.ones(B, T // 2 if sp else T, 32, requires_grad=True)
        out = module(hidden)
        forward = tp.traffic.sent_bytes
        out.sum().backward()
        found[sp] = (forward, tp.traffic.sent_bytes - forward)
    return found


def losses(world, dtype: torch.dtype, n_classes: int) -> None:
    """The parallel loss and best classes are those of whole scores, whatever the parts."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, n_classes, generator=generator).mul(8).to(dtype).requires_grad_()
    labels = torch.randint(n_classes, (2, 3), generator=generator)
    labels[0, 1] = -100
    with torch.no_grad():
        logits[1, 1, 7] = logits[1, 1, n_classes - 1] = 100  # two largest: the first counts
    total, weight = whole_loss(logits, labels)
    total.backward()
    tp = parts(world, 4, sp=False)
    start, stop, padding = vocabulary_interval(n_classes, 4, tp.rank)
    own = logits.detach()[..., start:stop]
    own = torch.cat([own, own.new_full((2, 3, padding), 1e4)], -1).requires_grad_()
    found, count = cross_entropy(own, labels, n_classes, tp)
    found.backward()
    assert count == weight
    assert found.dtype == total.dtype
    exact = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(found, total, rtol=min(exact, 1e-5), atol=0)
    assert not own.grad[..., stop - start :].any()
    torch.testing.assert_close(
        own.grad[..., : stop - start], logits.grad[..., start:stop], rtol=exact, atol=exact
    )
    assert torch.equal(argmax(own, n_classes, tp), logits.argmax(-1))
    assert cross_entropy(own, torch.full_like(labels, -100), n_classes, tp)[0] == 0
    unknown = torch.full_like(labels, n_classes)  # a row of padding, and of nobody
    assert cross_entropy(own, unknown, n_classes, tp)[0].isnan()
    own.data[0, 0, 0] = torch.nan
    assert argmax(own, n_classes, tp)[0, 0] == n_classes


def test_a_block_sends_two_sums_each_way_and_as_much_with_tokens_split(pool):
    sums = 2 * (B * T * 32 * 4)  # an all-reduce of two sends each byte once
    for found in pool(2).run(sent_bytes):
        assert found == {False: (sums, sums), True: (sums, sums)}


@pytest.mark.parametrize(
    ("dtype", "n_classes"),
    [(torch.float64, 50257), (torch.float32, 130), (torch.bfloat16, 300)],
    ids=str,
)
def test_the_loss_of_parts_is_that_of_the_whole(pool, dtype, n_classes):
    pool(4).run(losses, dtype, n_classes)


def test_padding_stays_zero(pool):
    for padding in pool(4).run(trained):
        assert not any(rows.any() for rows in padding)
    assert len(padding) == 3  # of the last part: a tied table, and another with a head's bias
    assert all(len(rows) == 128 for rows in padding)


def test_a_vocabulary_is_padded_to_128_a_part():
    assert (padded(50257, 2), padded(50257, 4), padded(256, 2)) == (50432, 50688, 256)


@pytest.mark.parametrize("name", EACH)
def test_parts_of_parameters_make_up_the_whole(name):
    graph = CASES[name].graph()
    for layer in graph.layers:
        plan = graph.tensor_plan(layer.name)
        for degree in graph.tensor_degrees(8):
            seen = {}
            for rank in range(degree):
                module = graph.build(layer.name)  # on meta
                shapes = {key: tuple(t.shape) for key, t in module.state_dict().items()}
                tp = Tp(rank=rank, degree=degree, group=None, traffic=Traffic())
                cuts = split(module, plan, tp)
                for key, tensor in module.state_dict(keep_vars=True).items():
                    cut = cuts[key]
                    assert type(tensor) is torch.nn.Parameter
                    assert cut.shape == shapes[key]
                    assert cut.local_shape == tuple(tensor.shape)
                    whole = seen.setdefault(key, torch.zeros(cut.shape))
                    own = cut.take(torch.arange(1.0, whole.numel() + 1).view(cut.shape))
                    assert tuple(own.shape) == cut.local_shape
                    if cut.copy == 0:
                        written = torch.zeros(cut.shape)
                        cut.put(own, written)
                        whole += written
            for whole in seen.values():
                assert torch.equal(whole, torch.arange(1.0, whole.numel() + 1).view(whole.shape))


def test_a_part_of_a_fused_matrix_is_several_intervals():
    graph = CASES["gpt2"].graph()
    module = graph.build("block.0")
    tp = Tp(rank=1, degree=2, group=None, traffic=Traffic())
    cut = split(module, graph.tensor_plan("block.0"), tp)["block.attn.c_attn.weight"]
    assert cut == Cut(shape=(32, 96), dim=1, intervals=((16, 32), (48, 64), (80, 96)))


def test_heads_fewer_than_parts_are_held_by_several():
    kv = Run(what="num_key_value_heads", units=2, width=8, shared=True)
    assert [kv.interval(4, rank) for rank in range(4)] == [(0, 8), (0, 8), (8, 16), (8, 16)]
    assert [kv.legal(degree) for degree in (1, 2, 3, 4, 6)] == [True, True, False, True, True]
    graph = CASES["llama"].graph()
    assert graph.tensor_degrees(16) == (1, 2, 4)
    plan = graph.tensor_plan("block.0")
    assert plan.refusal(3) == "does not divide num_attention_heads 4"
    assert graph.tensor_plan("embed").legal(7)


def test_frozen_parameters_stay_frozen_and_ties_stay_one_object():
    graph = CASES["phi"].graph()
    module = graph.build("block.0")
    attention = module.block.self_attn
    attention.k_proj.weight = attention.q_proj.weight
    attention.q_proj.weight.requires_grad_(False)
    tp = Tp(rank=0, degree=4, group=None, traffic=Traffic())
    split(module, graph.tensor_plan("block.0"), tp)
    assert attention.k_proj.weight is attention.q_proj.weight
    assert not attention.q_proj.weight.requires_grad
    assert attention.q_proj.bias.requires_grad


def test_models_of_others_have_one_part_only():
    graph = Model().graph()
    assert graph.tensor_plan("block.0") is None
    assert graph.tensor_degrees(8) == (1,)


@pytest.mark.parametrize("name", ["llama", "t5", "vit", "bert sentence"])
def test_a_part_of_an_output_has_the_shape_that_is_foretold(name):
    graph = without_dropout(CASES[name].graph())
    last = graph.layers[-1]
    plan = graph.tensor_plan(last.name)
    shape = plan.output_shape("logits", last.outputs["logits"].shape, 4, 3, sp=True)
    whole = last.outputs["logits"].shape
    assert shape == ((*whole[:-1], 128) if plan.vocabulary else whole)
    assert plan.vocabulary in (None, V)
    hidden = graph.layers[0].outputs["hidden"].shape
    plans = [graph.tensor_plan(graph.layers[0].name)] * 4
    held = [
        plan.output_shape("hidden", hidden, 4, rank, sp=True) for rank, plan in enumerate(plans)
    ]
    assert sum(n_tokens for n_tokens, _ in held) == hidden[0]
    assert plans[0].output_shape("hidden", hidden, 4, 0, sp=False) == hidden
