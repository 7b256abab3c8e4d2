"""GPT-2 of Hugging Face, unmodified, against a bare stack of the same layers; both over two ranks by the library.

mpirun -np 2 python benchmarks/hf_gpt2.py [--size large|medium|small]

What is between the layers in the unmodified model (masks, positions, keyword arguments, the loss) is glue, and costs the issuing
rank; the stack has none of it. Both have the same weights and are cut at the same place. In turns; the ratio of the medians counts.
"""

import argparse
import statistics
import time

import torch
import torch.nn.functional as F
from environment import describe
from gpt_stack import BLOCKS, HEADS, SIZES, VOCABULARY, Size
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel
from transformers import __version__ as transformers_version

import smp


def make_model(size: Size) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            n_layer=BLOCKS, n_embd=size.hidden, n_head=HEADS, vocab_size=VOCABULARY, n_positions=size.length, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0, tie_word_embeddings=False,
        )
    )  # fmt: skip


class Half(nn.Module):
    """Layers that follow each other on one rank."""

    def __init__(self, layers: nn.ModuleList | list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            h = layer(h)
            h = h[0] if isinstance(h, tuple) else h
        return h


class Stack(nn.Module):
    """The layers of a GPT2LMHeadModel, and nothing else."""

    def __init__(self, model: GPT2LMHeadModel) -> None:
        super().__init__()
        body = model.transformer
        self.tokens, self.positions = body.wte, body.wpe
        self.front = Half(list(body.h[: BLOCKS // 2]))
        self.back = Half([*body.h[BLOCKS // 2 :], body.ln_f, model.lm_head])

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        h = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        logits = self.back(self.front(h))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Both(nn.Module):
    """Two models in one, since a job has one distributed model."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.unmodified, self.stack = make_model(size), Stack(make_model(size))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="medium")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    smp.init({"partitions": 2, "microbatches": options.microbatches, "auto_partition": False})
    size = SIZES[options.size]
    net = Both(size)
    for module in (
        net.stack.back,
        net.unmodified.lm_head,
        net.unmodified.transformer.ln_f,
        *net.unmodified.transformer.h[BLOCKS // 2 :],
    ):
        smp.set_partition(module, 1)
    model = smp.DistributedModel(net)

    @smp.step
    def unmodified(model: smp.DistributedModel, ids: torch.Tensor) -> torch.Tensor:
        loss = model.module.unmodified(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids)).loss
        model.backward(loss)
        return loss

    @smp.step
    def stack(model: smp.DistributedModel, ids: torch.Tensor) -> torch.Tensor:
        loss = model.module.stack(ids, ids)
        model.backward(loss)
        return loss

    ids = torch.randint(VOCABULARY, (size.rows * options.microbatches, size.length))
    seconds: dict[str, list[float]] = {"unmodified": [], "stack": []}
    for repeat in range(options.repeats + 1):
        for name, step in (("unmodified", unmodified), ("stack", stack)):
            smp.barrier()
            started = time.perf_counter()
            loss = step(model, ids)
            smp.barrier()
            if repeat:
                seconds[name].append(time.perf_counter() - started)
            elif smp.rank() == 0:
                print(f"loss of {name}: {loss.reduce_mean().item():.6f}")
    if smp.rank() == 0:
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        print(describe(f"transformers {transformers_version}", "2 ranks of 1 thread"))
        print(f"size {options.size} {size}, {options.microbatches} microbatches; median of {options.repeats} steps")
        for name, median in medians.items():
            print(f"{name:12} {median * 1e3:8.1f} ms a step")
        print(f"unmodified: {medians['stack'] / medians['unmodified']:.2f} of the speed of the stack")


if __name__ == "__main__":
    main()
