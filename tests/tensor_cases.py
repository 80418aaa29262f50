"""Tiny models split over tensor parts, and the same unsplit; runs in every process."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from polyreme.graph.cut import Cut, vocabulary_interval
from polyreme.graph.dropout import without_dropout
from polyreme.graph.layer import LayerGraph
from polyreme.graph.loss import cross_entropy as whole_loss
from polyreme.graph.options import Transformers
from polyreme.graph.run import run
from polyreme.runtime.apply.tensor import Tp, argmax, cross_entropy, split
from polyreme.runtime.apply.tensor.meet import own_tokens
from polyreme.runtime.timing import Traffic
from polyreme.sample import SampleSpec, TensorSpec

B, T, T_DECODER = 2, 12, 7  # 7: neither 2 nor 4 divides it
V = 300  # padded to 512: two parts hold 256 and 44, of four parts the last holds padding alone


def _text(n_tokens, **others):
    fields = {"input_ids": n_tokens, "labels": n_tokens, **others}
    specs = {name: TensorSpec((n,), "int64") for name, n in fields.items()}
    return SampleSpec(fields=specs, n_classes=V)


TEXT, ODD = _text(T), _text(T_DECODER)
PAIR = SampleSpec(
    fields={
        **_text(T_DECODER, decoder_input_ids=T_DECODER).fields,
        "input_ids": TensorSpec((T - 1,), "int64"),
    },
    n_classes=V,
)
SENTENCE = SampleSpec(
    fields={"input_ids": TensorSpec((T,), "int64"), "labels": TensorSpec((), "int64")}, n_classes=3
)
IMAGE = SampleSpec(  # 16 patches and one
    fields={"pixel_values": TensorSpec((1, 16, 16), "float32"), "labels": TensorSpec((), "int64")},
    n_classes=5,
)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
GROUPED = {**SMALL, "num_key_value_heads": 2}
MIXED = {
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 5,
}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
SWIN = {"embed_dim": 16, "depths": [2, 1], "num_heads": [4, 4], "patch_size": 2}


@dataclass(frozen=True)
class Case:
    model_type: str
    config: dict
    sample: SampleSpec
    task: str | None = None

    def graph(self, **config) -> LayerGraph:
        options = Transformers(
            model_type=self.model_type, config={**self.config, **config}, task=self.task
        )
        return options.graph(self.sample)


CASES = {
    "llama": Case("llama", {**GROUPED, "attention_bias": True, "mlp_bias": True}, TEXT),
    "llama tied, odd": Case("llama", {**SMALL, "tie_word_embeddings": True}, ODD),
    "qwen2": Case("qwen2", GROUPED, ODD),
    "qwen3 window": Case(
        "qwen3", {**GROUPED, **MIXED, "use_sliding_window": True, "head_dim": 16}, TEXT
    ),
    "mistral": Case("mistral", {**GROUPED, "sliding_window": 5}, ODD),
    "gemma": Case("gemma", {**GROUPED, "head_dim": 8, "num_key_value_heads": 1}, TEXT),
    "gemma2": Case("gemma2", {**GROUPED, **MIXED, "head_dim": 8}, ODD),
    "gemma3": Case("gemma3_text", {**GROUPED, **MIXED, "head_dim": 8}, ODD),
    "phi": Case("phi", {**SMALL, "qk_layernorm": True}, ODD),
    "phi3": Case("phi3", {**GROUPED, "pad_token_id": 0}, TEXT),
    "phi3, one kv head": Case("phi3", {**SMALL, "num_key_value_heads": 1, "pad_token_id": 0}, ODD),
    "phi3 ungrouped": Case("phi3", {**SMALL, "pad_token_id": 0}, ODD),
    "gpt2": Case("gpt2", GPT2, ODD),
    "bert": Case("bert", SMALL, TEXT),
    "bert in chunks": Case("bert", {**SMALL, "chunk_size_feed_forward": 4}, TEXT),
    "bert sentence": Case("bert", {**SMALL, "vocab_size": V}, SENTENCE, "sequence_classification"),
    "t5": Case("t5", T5, PAIR),
    "t5 gated, untied": Case(
        "t5", {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}, PAIR
    ),
    "vit": Case("vit", {**SMALL, "patch_size": 4}, IMAGE),
    "swin": Case("swin", {**SWIN, "window_size": 3}, IMAGE),
    "swin, windows within the picture": Case("swin", {**SWIN, "window_size": 4}, IMAGE),
}


def parts(world, degree: int, *, sp: bool) -> Tp:
    """This process among `degree` ranks in a row; all ranks of the world call it together."""
    groups = [
        dist.new_group(list(range(first, first + degree)))
        for first in range(0, world.n_ranks, degree)
    ]
    group = groups[world.rank // degree]
    return Tp(rank=world.rank % degree, degree=degree, group=group, traffic=Traffic(), sp=sp)


def whole_modules(graph: LayerGraph) -> dict[str, torch.nn.Module]:
    """Modules with values that depend on names alone, none of them 0 or 1."""
    modules = {}
    for layer in graph.layers:
        module = graph.build(layer.name).to_empty(device="cpu")
        graph.initialise(layer.name, module, 0)
        module.double()
        with torch.no_grad():
            for local, tensor in module.named_parameters(remove_duplicate=False):
                name = layer.params[local].encode()
                seed = int.from_bytes(hashlib.sha256(name).digest()[:7], "big")
                noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(seed))
                tensor.copy_(0.1 * noise + ("norm" in local.lower()))
        modules[layer.name] = module
    return modules


def tie(graph: LayerGraph, modules) -> dict[str, torch.nn.Parameter]:
    """Parameters by whole name; one object where several layers share one."""
    found: dict[str, torch.nn.Parameter] = {}
    for layer in graph.layers:
        module = modules[layer.name]
        for local, tensor in list(module.named_parameters(remove_duplicate=False)):
            kept = found.setdefault(layer.params[local], tensor)
            path, _, leaf = local.rpartition(".")
            setattr(module.get_submodule(path), leaf, kept)
    return found


def split_modules(graph, modules, tp) -> tuple[dict, dict[str, Cut]]:
    """Copies of the modules, split; and cuts by whole name."""
    local, cuts = {}, {}
    for layer in graph.layers:
        local[layer.name] = copy.deepcopy(modules[layer.name])
        found = split(local[layer.name], graph.tensor_plan(layer.name), tp)
        assert found.keys() == layer.params.keys()
        for own, cut in found.items():
            assert cuts.setdefault(layer.params[own], cut) == cut
    return local, cuts


def batch_of(case: Case) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    batch = {}
    for name, spec in case.sample.fields.items():
        shape = (B, *spec.shape)
        if spec.dtype == "int64":
            batch[name] = torch.randint(case.sample.n_classes, shape, generator=generator)
        else:
            batch[name] = torch.randn(shape, generator=generator, dtype=torch.float64)
    if batch["labels"].dim() == 2:
        batch["labels"][0, :3] = -100
        batch["labels"][1, 0] = V - 1
        # 0 is the padding id of some; 128 and 256 are the first of a part.
        batch["input_ids"][0, :4] = torch.tensor([0, 128, 256, V - 1])
    return batch


def loss_of(graph, logits, labels, tp):
    """The loss, and classes, of what the last layer of a part gives."""
    n_classes = graph.tensor_plan(graph.layers[-1].name).vocabulary
    if n_classes is None:
        return whole_loss(logits, labels)[0], logits.argmax(-1)
    return cross_entropy(logits, labels, n_classes, tp)[0], argmax(logits, n_classes, tp)


def recomputed(modules):
    """Modules whose forward pass is played again in the backward pass."""
    return {
        name: lambda *inputs, module=module: checkpoint(module, *inputs, use_reentrant=False)
        for name, module in modules.items()
    }


def assembled(world, tp, cuts, local) -> dict[str, torch.Tensor]:
    """Whole tensors of all parts; those that hold the same must agree to the bit."""
    first = world.rank // tp.degree * tp.degree
    found = world.gather((cuts, local))[first : first + tp.degree]
    whole = {}
    for name in local:
        whole[name] = torch.full(cuts[name].shape, torch.nan, dtype=local[name].dtype)
        for rank, (their_cuts, tensors) in enumerate(found):
            cut, n_copies = their_cuts[name], cuts[name].copies
            holder = rank - rank % n_copies
            assert cut.copy == rank - holder
            assert cut.intervals == found[holder][0][name].intervals
            torch.testing.assert_close(tensors[name], found[holder][1][name], rtol=0, atol=0)
            cut.put(tensors[name], whole[name])
        assert not whole[name].isnan().any()
    return whole


@contextmanager
def wide_norms(modules) -> Iterator[None]:
    """The library's norms, which compute in float32, do so in their input's float64."""

    def forward(norm, x):
        eps = norm.eps if hasattr(norm, "eps") else norm.variance_epsilon
        gain = norm.weight + ("Gemma" in type(norm).__name__)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * gain

    found = {
        type(child)
        for module in modules.values()
        for child in module.modules()
        if type(child).__name__.endswith(("RMSNorm", "T5LayerNorm"))
    }
    with ExitStack() as stack:
        for kind in found:
            stack.enter_context(mock.patch.object(kind, "forward", forward))
        yield


def compare(world, name: str, ways) -> list[str]:
    """Play a case unsplit, and split in each way (degree, sp, recompute); what differs, said."""
    graph = without_dropout(CASES[name].graph())
    modules = whole_modules(graph)
    with wide_norms(modules):
        reference = _reference(graph, modules, batch_of(CASES[name]))
        return [
            f"tp {degree}{' sp' * sp}: {said}"
            for degree, sp, recompute in ways
            for said in _differences(world, name, graph, modules, reference, degree, sp, recompute)
        ]


def _reference(graph, modules, batch) -> dict[str, torch.Tensor]:
    whole = copy.deepcopy(modules)
    parameters = tie(graph, whole)
    logits = run(graph, whole, batch)
    loss, _ = whole_loss(logits, batch["labels"])
    loss.backward()
    found = {"logits": logits.detach(), "loss": loss.detach(), "argmax": logits.argmax(-1)}
    for key, tensor in parameters.items():
        found[key] = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
    return found


def _differences(world, name, graph, modules, reference, degree, sp, recompute):
    plans = [graph.tensor_plan(layer.name) for layer in graph.layers]
    refused = next(filter(None, (plan.refusal(degree) for plan in plans)), None)
    if refused:
        yield refused
        return
    tp = parts(world, degree, sp=sp)
    batch = batch_of(CASES[name])
    local, cuts = split_modules(graph, modules, tp)
    own = tie(graph, local)
    out = run(graph, recomputed(local) if recompute else local, batch)
    total, classes = loss_of(graph, out, batch["labels"], tp)
    total.backward()
    found = {key: p.grad if p.grad is not None else torch.zeros_like(p) for key, p in own.items()}
    sum_partial([(cuts[key], grad) for key, grad in found.items()], tp)
    cuts["logits"] = _cut_of_logits(graph, reference["logits"], tp)
    found["logits"] = out.detach()
    found = assembled(world, tp, cuts, {key: grad.detach() for key, grad in found.items()})
    found |= {"loss": total.detach(), "argmax": classes}
    assert found.keys() == reference.keys()
    for key, expected in reference.items():
        scale = max(1.0, float(expected.abs().max()))
        off = float((found[key] - expected).abs().max()) / scale
        if not off < 1e-10:
            yield f"{key} is off by {off:.2g}"


def _cut_of_logits(graph, logits, tp) -> Cut:
    shape, n_classes = tuple(logits.shape), graph.tensor_plan(graph.layers[-1].name).vocabulary
    if n_classes is None:
        return Cut(shape=shape, copies=tp.degree, copy=tp.rank)
    start, stop, padding = vocabulary_interval(n_classes, tp.degree, tp.rank)
    intervals = ((start, stop),) if stop > start else ()
    return Cut(shape=shape, dim=len(shape) - 1, intervals=intervals, padding=padding)


def _fate(before, after) -> torch.Tensor:
    """1 where something was dropped, -1 where it was kept, 0 where there was nothing."""
    return (before != 0) * torch.where(after == 0, 1, -1)


def drops(world, sp: bool) -> dict:
    """What a training layer with dropout gives, drops and leaves behind, on each part."""
    tp = parts(world, 2, sp=sp)
    graph = CASES["t5"].graph(dropout_rate=0.25)
    local, _ = split_modules(graph, whole_modules(graph), tp)
    block = local["encoder.block.0"].train()
    dropped = []
    for name, child in block.named_modules():
        if name.endswith(("DenseReluDense.dropout", "layer.1.dropout")):
            child.register_forward_hook(lambda *seen: dropped.append(_fate(seen[1][0], seen[2])))
    n_tokens = T - 1
    hidden = torch.ones(B, n_tokens, 32, dtype=torch.float64)
    if sp:
        hidden = own_tokens(hidden, tp)
    found = {}
    for again in (False, True):
        torch.manual_seed(5)
        inputs = hidden.clone().requires_grad_()
        call = recomputed({"": block})[""] if again else block
        out, _ = call(inputs)
        (out * torch.arange(32.0)).sum().backward()
        grads = [p.grad for p in block.parameters()] + [inputs.grad]
        block.zero_grad()
        found[again] = (out.detach(), grads)
    for first, second in zip(found[False][1], found[True][1], strict=True):
        torch.testing.assert_close(first, second, rtol=0, atol=0)
    block.eval()
    before = torch.get_rng_state()
    block(hidden)
    return {
        "out": found[False][0],
        "inside": dropped[0],
        "outside": dropped[1],
        "state": torch.get_rng_state(),
        "kept": torch.equal(before, torch.get_rng_state()),
    }


def paths(world) -> dict:
    """Of 16 samples with split tokens: which are dropped whole, which entries beside that."""
    tp = parts(world, 2, sp=True)
    graph = CASES["swin"].graph(drop_path_rate=0.5, hidden_dropout_prob=0.25)
    local, _ = split_modules(graph, whole_modules(graph), tp)
    block = local["stage.1.block.0"].train()
    found = {}

    def note(path, seen):
        found.setdefault(path, _fate(seen[0], seen[1]))

    inner = block.inner
    inner.drop_path.register_forward_hook(lambda _, x, out: note("path", (x[0], out)))
    inner.dropout.register_forward_hook(lambda _, x, out: note("inside", (x[0], out)))
    torch.manual_seed(5)
    block(torch.ones(16, 8, 32, dtype=torch.float64))
    return {
        "path": (found["path"] == -1).flatten(1).any(1),
        "inside": found["inside"],
        "state": torch.get_rng_state(),
    }


def sum_partial(gradients: list[tuple[Cut, torch.Tensor]], tp: Tp) -> None:
    """Sum gradients over the parts that hold the same of a parameter, in place."""
    for cut, gradient in gradients:
        if cut.partial:
            rows = [torch.empty_like(gradient) for _ in range(tp.degree)]
            dist.all_gather(rows, gradient.contiguous(), group=tp.group)
            alike = (row for n, row in enumerate(rows) if n // cut.copies == tp.rank // cut.copies)
            gradient.copy_(sum(alike))


def trained(world) -> list[torch.Tensor]:
    """Padding rows of a tied table, and of a head with a bias, after steps with decay."""
    padding = []
    tp = parts(world, 4, sp=False)
    for name in ("llama tied, odd", "bert"):
        graph = without_dropout(CASES[name].graph(tie_word_embeddings=True))
        local, cuts = split_modules(graph, whole_modules(graph), tp)
        own = tie(graph, local)
        optimizer = torch.optim.AdamW(own.values(), lr=0.1, weight_decay=0.1)
        batch = batch_of(CASES[name])
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(graph, run(graph, local, batch), batch["labels"], tp)[0].backward()
            grads = [(cuts[key], p.grad) for key, p in own.items() if p.grad is not None]
            sum_partial(grads, tp)
            optimizer.step()
        for key, tensor in own.items():
            if cuts[key].padding:
                n_held = tensor.shape[0] - cuts[key].padding
                padding.append(tensor.detach()[n_held:].clone())
                assert n_held == 0 or tensor.detach()[:n_held].any()
    return padding
