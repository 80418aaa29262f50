"""Known model configurations: shapes alone, no weights. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec


class Configuration(msgspec.Struct, frozen=True, kw_only=True):
    """A transformers model type, the fields that differ from its defaults, and their source."""

    model_type: str
    config: Mapping[str, Any]
    summary: str
    source: str
    task: Any = None


def describe() -> list[tuple[str, str, str]]:
    """Name, one line and source of each preset."""
    return [(name, preset.summary, preset.source) for name, preset in PRESETS.items()]


_LLAMA_3: Mapping[str, Any] = {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    "bos_token_id": 128000,
    "eos_token_id": 128001,
}
_ROPE_LLAMA_31: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

PRESETS: Mapping[str, Configuration] = {
    "llama-7b": Configuration(
        model_type="llama",
        config={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 11008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
        },
        summary="Llama, 6.7 B parameters, 32 blocks of 4096",
        source="Touvron et al. 2023, LLaMA, table 2",
    ),
    "llama-13b": Configuration(
        model_type="llama",
        config={
            "vocab_size": 32000,
            "hidden_size": 5120,
            "intermediate_size": 13824,
            "num_hidden_layers": 40,
            "num_attention_heads": 40,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
        },
        summary="Llama, 13.0 B parameters, 40 blocks of 5120",
        source="Touvron et al. 2023, LLaMA, table 2",
    ),
    "llama3-8b": Configuration(
        model_type="llama",
        config={
            **_LLAMA_3,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        summary="Llama 3, 8.0 B parameters, 32 blocks of 4096, 8 key-value heads",
        source="Llama team 2024, The Llama 3 Herd of Models, table 3",
    ),
    "llama3-70b": Configuration(
        model_type="llama",
        config={
            **_LLAMA_3,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
        },
        summary="Llama 3, 70.6 B parameters, 80 blocks of 8192, 8 key-value heads",
        source="Llama team 2024, The Llama 3 Herd of Models, table 3",
    ),
    "llama3-405b": Configuration(
        model_type="llama",
        config={
            **_LLAMA_3,
            "hidden_size": 16384,
            "intermediate_size": 53248,
            "num_hidden_layers": 126,
            "num_attention_heads": 128,
            "max_position_embeddings": 131072,
            "rope_parameters": _ROPE_LLAMA_31,
        },
        summary="Llama 3.1, 405.9 B parameters, 126 blocks of 16384, 8 key-value heads",
        source="Llama team 2024, The Llama 3 Herd of Models, table 3",
    ),
    "qwen3-8b": Configuration(
        model_type="qwen3",
        config={
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "max_position_embeddings": 40960,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
            "tie_word_embeddings": False,
        },
        summary="Qwen3, 8.2 B parameters, 36 blocks of 4096, 8 key-value heads",
        source="Qwen team 2025, Qwen3 technical report, table 1",
    ),
    "mixtral-8x7b": Configuration(
        model_type="mixtral",
        config={
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 32768,
        },
        summary="Mixtral, 46.7 B parameters, 32 blocks of 4096, 2 of 8 experts a token",
        source="Jiang et al. 2024, Mixtral of Experts, table 1",
    ),
    "gpt3-175b": Configuration(
        model_type="gpt2",
        config={
            "vocab_size": 50257,
            "n_positions": 2048,
            "n_embd": 12288,
            "n_layer": 96,
            "n_head": 96,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
        summary="GPT-3, 174.6 B parameters, 96 blocks of 12288, dense attention everywhere",
        source="Brown et al. 2020, table 2.1; the paper alternates dense and sparse attention",
    ),
    "bert-huge": Configuration(
        model_type="bert",
        config={
            "vocab_size": 30522,
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "max_position_embeddings": 512,
        },
        summary="BERT, 0.67 B parameters, 32 blocks of 1280, masked language model",
        source="Miao et al. 2022, Galvatron, table 2 (BERT-Huge-32)",
        task="masked_lm",
    ),
    "t5-large": Configuration(
        model_type="t5",
        config={
            "vocab_size": 32128,
            "d_model": 1024,
            "d_kv": 64,
            "d_ff": 4096,
            "num_layers": 24,
            "num_decoder_layers": 24,
            "num_heads": 16,
        },
        summary="T5, 0.74 B parameters, 24 + 24 blocks of 1024",
        source="Raffel et al. 2020, section 3.7 (Large)",
    ),
    "vit-base": Configuration(
        model_type="vit",
        config={
            "hidden_size": 768,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "image_size": 224,
            "patch_size": 16,
        },
        summary="ViT-B/16, 86 M parameters, 12 blocks of 768",
        source="Dosovitskiy et al. 2021, table 1",
    ),
    "vit-huge": Configuration(
        model_type="vit",
        config={
            "hidden_size": 1280,
            "intermediate_size": 5120,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "image_size": 224,
            "patch_size": 14,
        },
        summary="ViT-H/14, 0.63 B parameters, 32 blocks of 1280",
        source="Dosovitskiy et al. 2021, table 1",
    ),
    "swin-huge": Configuration(
        model_type="swin",
        config={
            "embed_dim": 320,
            "depths": [2, 2, 26, 2],
            "num_heads": [8, 16, 32, 64],
            "window_size": 7,
            "image_size": 224,
            "patch_size": 4,
            "drop_path_rate": 0.1,
        },
        summary="Swin, 0.70 B parameters, 2 + 2 + 26 + 2 blocks of 320 to 2560",
        source="Miao et al. 2022, Galvatron, table 2 (Swin-Huge-32)",
    ),
}
