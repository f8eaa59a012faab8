"""Tensor plans of models of Hugging Face Transformers, by `model.config.model_type`."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

_LLAMA = {
    "embed_tokens": "vocabulary",
    "layers.*.self_attn": "heads",
    "layers.*.mlp.gate_proj": "column",
    "layers.*.mlp.up_proj": "column",
    "layers.*.mlp.down_proj": "row",
    "lm_head": "vocabulary",
}

TENSOR_PLANS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {
        "wte": "vocabulary",
        "h.*.attn": "heads",
        "h.*.mlp.c_fc": "column",
        "h.*.mlp.c_proj": "row",
        "lm_head": "vocabulary",
    },
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


def tensor_plan_of(model: nn.Module) -> Mapping[str, str]:
    """Return the shipped tensor plan of a model; empty if there is none."""
    kind = getattr(getattr(model, "config", None), "model_type", "")
    plan = TENSOR_PLANS.get(kind, {})
    return {
        pattern: word for pattern, word in plan.items() if pattern != "lm_head" or hasattr(model, pattern)
    }
