"""Tiny models of Hugging Face's families with random weights, as users make them: configuration, model, a training batch.

Dropout is off, since plain PyTorch draws in another order. Everything else is the default.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from torch import nn

VOCABULARY = 96
LENGTH = 10
BATCH_SIZE = 4
HIDDEN = 32
LAYERS = 4
HEADS = 4


class Member(NamedTuple):
    model: str  # class of transformers
    config: dict[str, Any]
    kind: str = "decoder"


_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
_LAYERS = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
}
_TEXT = {**_LAYERS, "vocab_size": VOCABULARY, "max_position_embeddings": 2 * LENGTH}
_LLAMA = {**_TEXT, "num_key_value_heads": 2, **_NO_TOKENS}
_GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 2 * LENGTH,
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": HEADS,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    **_NO_TOKENS,
}
_BERT = {**_TEXT, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

MEMBERS = {
    "gpt2": Member("GPT2LMHeadModel", _GPT2),
    "gpt_neox": Member("GPTNeoXForCausalLM", {**_TEXT, **_NO_TOKENS}),
    "llama": Member("LlamaForCausalLM", _LLAMA),
    "mistral": Member("MistralForCausalLM", _LLAMA),
    "qwen2": Member("Qwen2ForCausalLM", _LLAMA),
    "qwen3": Member("Qwen3ForCausalLM", {**_LLAMA, "head_dim": 8}),
    "gemma2": Member("Gemma2ForCausalLM", {**_LLAMA, "head_dim": 8}),
    "phi": Member("PhiForCausalLM", {**_LLAMA, "num_key_value_heads": HEADS}),
    "opt": Member(
        "OPTForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "ffn_dim": 2 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "max_position_embeddings": 2 * LENGTH,
            "word_embed_proj_dim": HIDDEN,
            "dropout": 0.0,
            **_NO_TOKENS,
            "pad_token_id": 1,
        },
    ),
    "bert": Member("BertForMaskedLM", _BERT),
    "roberta": Member("RobertaForMaskedLM", {**_BERT, "pad_token_id": 1}),
    "t5": Member(
        "T5ForConditionalGeneration",
        {
            "vocab_size": VOCABULARY,
            "d_model": HIDDEN,
            "d_kv": HIDDEN // HEADS,
            "d_ff": 2 * HIDDEN,
            "num_layers": LAYERS,
            "num_heads": HEADS,
            "dropout_rate": 0.0,
            "decoder_start_token_id": 0,
            "pad_token_id": 0,
        },
        "encoder-decoder",
    ),
    "vit": Member(
        "ViTForImageClassification",
        {
            **_LAYERS,
            "image_size": 8,
            "patch_size": 4,
            "num_channels": 1,
            "num_labels": 5,
        },
        "images",
    ),
    "mixtral": Member(
        "MixtralForCausalLM",
        {**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gptj": Member("GPTJForCausalLM", {**_GPT2, "rotary_dim": 4}),
    "falcon": Member(
        "FalconForCausalLM",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
            **_NO_TOKENS,
        },
    ),
}

# One parameter that enters three or more places, whose gradients are then added in another order: equal up to rounding.
MANY_TIES = {"t5"}


def build(name: str, seed: int = 0, **config: Any) -> nn.Module:
    """A new model; the same weights for the same seed."""
    member = MEMBERS[name]
    model_class: Callable[..., nn.Module] = getattr(transformers, member.model)
    torch.manual_seed(seed)
    settings = {**member.config, **config}
    return model_class(model_class.config_class(**settings)).train()


def make_batch(name: str, seed: int = 0, length: int = LENGTH, masked: bool = False) -> dict[str, torch.Tensor]:
    """A training batch with labels; `masked` adds an attention mask with padding on the right of every second row."""
    generator = torch.Generator().manual_seed(seed)
    kind = MEMBERS[name].kind
    if kind == "images":
        return {
            "pixel_values": torch.randn(BATCH_SIZE, 1, 8, 8, generator=generator),
            "labels": torch.randint(5, (BATCH_SIZE,), generator=generator),
        }
    ids = torch.randint(2, VOCABULARY, (BATCH_SIZE, length), generator=generator)
    batch = {"input_ids": ids, "labels": ids.clone()}
    if masked:
        mask = torch.ones_like(ids)
        mask[::2, length - 3 :] = 0
        batch["attention_mask"] = mask
        batch["labels"][mask == 0] = -100
    return batch
