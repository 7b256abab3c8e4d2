"""What travels between ranks while GPT-2 trains."""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import smp

MICROBATCHES = 4
ROWS, LENGTH, HIDDEN, VOCABULARY = 2, 10, 32, 96


def links(masked: bool) -> dict[tuple[int, int], list[int]]:
    """[values, bytes] on each link in a step that knows its shapes. The head is untied, on rank 1."""
    smp.init({"partitions": 2, "microbatches": MICROBATCHES, "stall_timeout": 60})
    torch.manual_seed(0)
    config = GPT2Config(
        n_layer=4, n_embd=HIDDEN, n_head=4, vocab_size=VOCABULARY, n_positions=LENGTH, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, tie_word_embeddings=False,
    )  # fmt: skip
    model = smp.DistributedModel(GPT2LMHeadModel(config))

    @smp.step
    def step(model, ids, labels, mask):
        inputs: dict[str, Any] = {"attention_mask": mask} if masked else {}
        loss = model(input_ids=ids, labels=labels, **inputs).loss
        model.backward(loss)
        return loss

    ids = torch.randint(VOCABULARY, (ROWS * MICROBATCHES, LENGTH))
    mask = torch.ones_like(ids)
    mask[:, -2:] = 0
    step(model, ids, ids.clone(), mask)
    homes = smp.get_partition_report().assignment
    assert homes["transformer.wte"] == 0 and homes["lm_head"] == 1, homes
    with smp.trace() as summary:
        step(model, ids, ids.clone(), mask)
    smp.shutdown()
    return summary.links
