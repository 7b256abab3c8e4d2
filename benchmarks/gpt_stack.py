"""A plain GPT: what the benchmarks split over ranks, by the library, by hand, or not at all."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

BLOCKS = 8
VOCABULARY = 256
HEADS = 4


class Size(NamedTuple):
    """What decides how long one microbatch takes."""

    hidden: int
    length: int
    rows: int  # in one microbatch


SIZES = {"large": Size(512, 256, 2), "medium": Size(256, 128, 1), "small": Size(128, 64, 1)}


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm1, self.qkv, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.norm2, self.up, self.down = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        rows, length, hidden = h.shape
        q, k, v = self.qkv(self.norm1(h)).view(rows, length, 3, HEADS, hidden // HEADS).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = h + self.out(mixed.transpose(1, 2).reshape(rows, length, hidden))
        return h + self.down(F.gelu(self.up(self.norm2(h))))


class Front(nn.Module):
    """The embeddings, and blocks after them: [rows, length] to [rows, length, hidden]."""

    def __init__(self, size: Size, blocks: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, size.hidden), nn.Embedding(size.length, size.hidden)
        self.blocks = nn.ModuleList(Block(size.hidden) for _ in range(blocks))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        h = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            h = block(h)
        return h


class Middle(nn.Module):
    """Blocks alone: [rows, length, hidden] to the same."""

    def __init__(self, size: Size, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(size.hidden) for _ in range(blocks))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            h = block(h)
        return h


class Back(Middle):
    """More blocks, and the head: [rows, length, hidden] to [rows, length, VOCABULARY]."""

    def __init__(self, size: Size, blocks: int) -> None:
        super().__init__(size, blocks)
        self.norm, self.head = nn.LayerNorm(size.hidden), nn.Linear(size.hidden, VOCABULARY, bias=False)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(super().forward(h)))


class Model(nn.Module):
    """The parts one after another, of as many blocks each; the same weights for each call."""

    def __init__(self, size: Size, parts: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        kinds = [Front, *[Middle] * (parts - 2), Back]
        self.parts = nn.Sequential(*(kind(size, BLOCKS // parts) for kind in kinds))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.parts(ids)


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
