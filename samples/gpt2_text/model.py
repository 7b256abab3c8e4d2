"""The network and its optimizer: Hugging Face's GPT-2 as it is, with random weights and about 10 million parameters."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def build_model(vocabulary_size, length, dropout, seed):
    """A `GPT2LMHeadModel` for windows of up to `length` tokens; the same seed gives the same weights on every rank."""
    config = GPT2Config(
        vocab_size=vocabulary_size,
        n_positions=length,
        n_embd=368,
        n_layer=6,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        # The defaults are ids of OpenAI's own vocabulary, which is larger than this one.
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(seed)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # What it takes anyway, but with a warning.
    return model


def forward(model, ids):
    """Mean loss of predicting each token of `ids` [windows, length] from those before it."""
    # With a mask, GPT-2 sees that nothing is padded and leaves the causal part to the attention kernel. Without one it builds a
    # mask for packed sequences each time.
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False).loss


def make_optimizer(parameters, options):
    # The second moment is averaged over 20 steps instead of 1000: the whole training has a few hundred.
    return torch.optim.AdamW(parameters, lr=options.learning_rate, betas=(0.9, 0.95), weight_decay=options.weight_decay)


def parameter_count(model):
    return sum(parameter.numel() for parameter in model.parameters())


def continue_text(model, tokenizer, start, token_count, seed):
    """`start` and `token_count` sampled tokens after it, as text."""
    ids = torch.tensor([tokenizer.encode(start).ids])
    torch.manual_seed(seed)
    model.eval()
    mask = torch.ones_like(ids)
    ids = model.generate(ids, attention_mask=mask, max_new_tokens=token_count, do_sample=True, top_k=20, pad_token_id=0)
    return tokenizer.decode(ids[0].tolist())
