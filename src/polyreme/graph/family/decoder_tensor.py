"""How a decoder block is split over tensor parts: as its library says, or packed (Phi-3).

The library's plan for Phi-3 gathers the fused matrices' results on every part; ours deals out
each of the matrices that are fused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..tensor import Context, Cutting, Number, Read, Region, Run, TensorPlan

_STYLES = {"colwise", "rowwise", "replicated_with_grad_allreduce"}
_PREFIX = "layers.*."


def block_plan(config: Any, n_tokens: int) -> TensorPlan | None:
    """The plan of a block; None if the library has none that can be followed."""
    sizes = _Sizes(config)
    if config.model_type == "phi3":
        return _phi3(sizes, n_tokens)
    named: Mapping[str, str] = getattr(config, "base_model_tp_plan", None) or {}
    styles = {
        path.removeprefix(_PREFIX): style
        for path, style in named.items()
        if path.startswith(_PREFIX)
    }
    if not styles or set(styles.values()) - _STYLES:
        return None
    inside = [path for path, style in styles.items() if style.startswith("replicated")]
    if getattr(config, "qk_layernorm", False):  # Phi; its library's plan does not name them
        inside += ["self_attn.q_layernorm", "self_attn.k_layernorm"]
    cuttings, regions = [], []
    for path, style in styles.items():
        module, _, leaf = path.rpartition(".")
        if style == "colwise":
            cuttings.append(_cut(path, "out", sizes.of(module, leaf)))
        elif style == "rowwise":
            cuttings.append(_cut(path, "in", sizes.of(module, leaf)))
            regions.append(_region(module, path, n_tokens))
    return TensorPlan(
        cuttings=tuple(cuttings),
        regions=tuple(regions),
        inside=tuple(f"block.{path}" for path in inside),
        numbers=(sizes.groups,),
        contexts=(sizes.context(n_tokens),),
        outputs={"hidden": "tokens"},
        n_tokens=n_tokens,
        sequence=("",),
    )


class _Sizes:
    def __init__(self, config: Any) -> None:
        heads, kv = config.num_attention_heads, config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // heads
        self.heads = Run(what="num_attention_heads", units=heads, width=width)
        self.kv = Run(what="num_key_value_heads", units=kv, width=width, shared=True)
        self.inner = Run(what="intermediate_size", units=config.intermediate_size)
        self.groups = Number(
            path="block.self_attn", name="num_key_value_groups", of=self.heads, per=self.kv
        )

    def context(self, n_tokens: int) -> Context:
        """What attention reads."""
        return Context(n_tokens=n_tokens, run=self.kv, n_queries=n_tokens, queries=self.heads)

    def of(self, module: str, leaf: str) -> Run:
        """What a matrix deals out."""
        if module != "self_attn":
            return self.inner
        return self.kv if leaf in ("k_proj", "v_proj") else self.heads


def _phi3(sizes: _Sizes, n_tokens: int) -> TensorPlan:
    attention, heads, kv = "block.self_attn", sizes.heads, sizes.kv
    return TensorPlan(
        cuttings=(
            _cut("self_attn.qkv_proj", "out", heads, kv, kv),
            _cut("self_attn.o_proj", "in", heads),
            _cut("mlp.gate_up_proj", "out", sizes.inner, sizes.inner),
            _cut("mlp.down_proj", "in", sizes.inner),
        ),
        regions=(
            _region("self_attn", "self_attn.o_proj", n_tokens),
            _region("mlp", "mlp.down_proj", n_tokens),
        ),
        numbers=(
            sizes.groups,
            Number(path=attention, name="num_key_value_heads", of=kv),
            Number(path=attention, name="config.num_attention_heads", of=heads),
        ),
        contexts=(sizes.context(n_tokens),),
        outputs={"hidden": "tokens"},
        n_tokens=n_tokens,
        sequence=("",),
    )


def _cut(path: str, side: Any, *runs: Run) -> Cutting:
    return Cutting(path=f"block.{path}", side=side, runs=runs)


def _region(entry: str, leave: str, n_tokens: int) -> Region:
    reads = (Read(n_tokens=n_tokens),)
    return Region(entry=f"block.{entry}", exit=f"block.{leave}", reads=reads)
