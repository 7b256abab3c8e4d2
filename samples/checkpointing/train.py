"""The three uses of activation checkpointing, on handwritten digits, with and without it.

mpirun -np 2 python samples/checkpointing/train.py [--partitions 2] [--steps 30]

Each use trains the same model twice, and prints whether losses and weights are equal bit for bit, the time of a step, and what the regions saved.
"""

import argparse
import time

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from transformers import GPT2Config, GPT2ForSequenceClassification

import smp
from smp.checkpointing import checkpoint, checkpoint_sequential

WIDTH, CLASSES, BATCH = 256, 10, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class ModuleUse(nn.Module):
    """`checkpoint(self.fc1, x)` in a forward."""

    def __init__(self, checkpointed):
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.head = nn.Linear(64, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.fc1, self.fc2 = (nn.Sequential(*(Block() for _ in range(3))) for _ in range(2))

    def forward(self, x):
        x = self.embed(x)
        for module in (self.fc1, self.fc2):
            x = checkpoint(module, x) if self.checkpointed else module(x)
        return self.head(x)


class SequentialUse(nn.Module):
    """`checkpoint_sequential(self.seq, x)` in a forward."""

    def __init__(self, checkpointed):
        super().__init__()
        self.checkpointed = checkpointed
        self.embed, self.seq = nn.Linear(64, WIDTH), nn.Sequential(*(Block() for _ in range(6)))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x):
        x = self.embed(x)
        x = checkpoint_sequential(self.seq, x, strategy="group_2") if self.checkpointed else self.seq(x)
        return self.head(x)


def imported():
    """A model of Hugging Face, which reads the pixels of a digit as a sequence of 64 tokens."""
    return GPT2ForSequenceClassification(
        GPT2Config(
            vocab_size=18,
            n_positions=64,
            n_embd=64,
            n_layer=4,
            n_head=4,
            num_labels=CLASSES,
            pad_token_id=17,
            use_cache=False,
        )
    )


@smp.step
def train_step(model, inputs, labels):
    logits = model(inputs)
    loss = F.cross_entropy(getattr(logits, "logits", logits), labels)
    model.backward(loss)
    return loss


def build(use, checkpointed):
    torch.manual_seed(0)
    if use == "imported":
        model = smp.DistributedModel(imported())
        if checkpointed:
            smp.set_activation_checkpointing(model.module.module.module.transformer.seq_layers)
        return model
    return smp.DistributedModel({"module": ModuleUse, "sequential": SequentialUse}[use](checkpointed))


def train(use, checkpointed, partitions, steps):
    """Losses of all steps, this rank's weights, the seconds of a step, and what the regions of this rank did."""
    smp.init({"partitions": partitions, "microbatches": 2})
    before = smp.checkpointing.report().regions  # of earlier models
    model = build(use, checkpointed)
    optimizer = smp.DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3))
    digits = load_digits()
    pixels = torch.tensor(digits.data, dtype=torch.long if use == "imported" else torch.float32)
    labels = torch.tensor(digits.target)
    torch.manual_seed(1)
    losses, started = [], time.perf_counter()
    for step in range(steps):
        if step == 1:  # the first one places the modules
            started = time.perf_counter()
        rows = torch.randint(len(labels), (BATCH,))
        losses.append(train_step(model, pixels[rows], labels[rows]).reduce_mean())
        optimizer.step()
        optimizer.zero_grad()
    seconds = (time.perf_counter() - started) / max(steps - 1, 1)
    weights = {name: p.detach().clone() for name, p in model.local_named_parameters()}
    report = smp.checkpointing.Report(tuple(r for r in smp.checkpointing.report().regions if r not in before))
    smp.shutdown()
    return torch.stack(losses), weights, seconds, report


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--partitions", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for use in ("module", "sequential", "imported"):
        losses, weights, seconds, _ = train(use, False, options.partitions, options.steps)
        again, others, seconds_again, report = train(use, True, options.partitions, options.steps)
        equal = torch.equal(losses, again) and all(torch.equal(weights[name], others[name]) for name in weights)
        smp.init({"partitions": options.partitions})
        text = (
            f"\n== {use}, rank {smp.rank()}: loss {losses[0]:.3f} to {losses[-1]:.3f}; with checkpointing equal: {equal}\n"
            f"   a step takes {seconds * 1e3:.1f} ms, with checkpointing {seconds_again * 1e3:.1f} ms\n{report}"
        )
        for turn in smp.allgather(text, smp.WORLD) if smp.size() > 1 else [text]:
            if smp.rank() == 0:
                print(turn, flush=True)
        smp.shutdown()
        if not equal:
            raise SystemExit(f"{use}: checkpointing changed the result")


if __name__ == "__main__":
    main()
