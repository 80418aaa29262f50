"""A compiled block of a decoder: its tables of positions are made once, not by what reads them."""

from __future__ import annotations

from functools import partial

import torch

from polyreme.data import objective
from polyreme.graph.options import Transformers
from polyreme.runtime.compiled import compile_layer

CONFIG = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def test_tables_of_positions_are_compiled_into_what_reads_them(monkeypatch) -> None:
    called: list[str] = []

    def backend(module, examples):
        called.extend(str(node.target) for node in module.graph.nodes)
        return module.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    torch.compiler.reset()
    graph = Transformers(model_type="llama", config=CONFIG).graph(objective.sample("next", 8, 16))
    block = graph.build("block.0").to_empty(device="cpu")
    graph.initialise("block.0", block, seed=0)
    hidden = torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(1))
    plain = block(hidden)
    compile_layer(block)
    assert torch.equal(block(hidden), plain)
    torch.compiler.reset()
    assert any("scaled_dot_product" in each for each in called)
    assert not {"cos", "sin"} & {each.rpartition(".")[2] for each in called}
