"""Small models of the usual kinds, and the table of all training cases.

`BUILDERS[name]()` gives a new `TrainingCase`, with the same weights each time.
"""

import itertools

import call_scenarios
import torch
import torch.nn.functional as F
import value_scenarios
from torch import nn
from training_case import BATCH_SIZE, TrainingCase
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

WIDTH = 16
CLASSES = 5
VOCABULARY = 61
LENGTH = 12


def classification_batch(shape):
    """A batch maker: `x` of [BATCH_SIZE, *shape] and class labels `y`."""

    def make_batch(seed):
        generator = torch.Generator().manual_seed(seed)
        return {
            "x": torch.randn(BATCH_SIZE, *shape, generator=generator),
            "y": torch.randint(CLASSES, (BATCH_SIZE,), generator=generator),
        }

    return make_batch


def token_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCABULARY, (BATCH_SIZE, LENGTH), generator=generator)
    return {"input_ids": ids, "labels": ids}


def classification_step(model, batch, backward):
    loss = F.cross_entropy(model(batch["x"]), batch["y"])
    backward(loss)
    return loss


def language_step(model, batch, backward):
    loss = model(**batch, use_cache=False).loss
    backward(loss)
    return loss


def deep_mlp():
    torch.manual_seed(0)
    layers = []
    for _ in range(10):
        layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return TrainingCase(
        nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES)), classification_batch((WIDTH,)), classification_step
    )


class ConvNet(nn.Module):
    """Blocks with BatchNorm, whose running statistics change in each forward."""

    def __init__(self):
        super().__init__()
        channels = [1, 4, 8, 8, 8]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU())
            for a, b in itertools.pairwise(channels)
        )
        self.head = nn.Linear(8, CLASSES)

    def forward(self, images):
        h = images
        for block in self.blocks:
            h = block(h)
        return self.head(h.mean(dim=(2, 3)))


def conv_batch_norm():
    torch.manual_seed(0)
    return TrainingCase(ConvNet(), classification_batch((1, 6, 6)), classification_step)


class Attention(nn.Module):
    def __init__(self, heads=2):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, h, causal_mask):
        batch, length, _ = h.shape
        qkv = self.qkv(h).view(batch, length, 3, self.heads, WIDTH // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q @ k.transpose(-1, -2)) / (WIDTH // self.heads) ** 0.5
        mixed = scores.masked_fill(causal_mask, float("-inf")).softmax(-1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))


class TransformerBlock(nn.Module):
    """Both residual additions are glue of this module: its children may live elsewhere."""

    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, h, causal_mask):
        h = h + self.attention(self.norm1(h), causal_mask)
        return h + self.down(F.gelu(self.up(self.norm2(h))))


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, ids):
        length = ids.shape[1]
        h = self.tokens(ids) + self.positions(torch.arange(length, device=ids.device))
        causal_mask = torch.ones(length, length, dtype=torch.bool, device=ids.device).triu(1)
        for block in self.blocks:
            h = block(h, causal_mask)
        return self.head(self.norm(h))


def transformer_step(model, batch, backward):
    logits = model(batch["input_ids"])
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    backward(loss)
    return loss


def transformer():
    torch.manual_seed(0)
    return TrainingCase(Transformer(), token_batch, transformer_step)


def hugging_face_gpt2():
    """Embedding and head share one parameter."""
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=WIDTH,
        n_layer=4,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # What it takes anyway, but with a warning.
    return TrainingCase(model, token_batch, language_step)


def hugging_face_llama():
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return TrainingCase(LlamaForCausalLM(config), token_batch, language_step)


BUILDERS = {
    build.__name__: build
    for build in (
        deep_mlp,
        conv_batch_norm,
        transformer,
        hugging_face_gpt2,
        hugging_face_llama,
        *call_scenarios.BUILDERS,
        *value_scenarios.BUILDERS,
    )
}
