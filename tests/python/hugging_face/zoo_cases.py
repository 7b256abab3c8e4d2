"""Trains members of the zoo on every rank, and compares with plain PyTorch; what they return is asserted in test_zoo.py."""

import warnings
from typing import Any

import torch
import transformers
import zoo

import smp

MICROBATCHES = 2
STEPS = 2


@smp.step
def train_step(model: smp.DistributedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss = model(**batch).loss
    model.backward(loss)
    return loss


def plain_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    losses = []
    for index in range(MICROBATCHES):
        loss = model(**{key: value.chunk(MICROBATCHES)[index] for key, value in batch.items()}).loss
        (loss / MICROBATCHES).backward()
        losses.append(loss.detach())
    return losses


def checkpoint_stacks(model: smp.DistributedModel) -> None:
    """Checkpoints every layer stack, found as `seq_layers`, other than the experts of a layer."""
    stacks = [m.seq_layers for m in model.module.module.module.modules() if hasattr(m, "seq_layers")]
    inside = {m for stack in stacks for layer in stack for m in layer.modules()}
    for stack in stacks:
        if stack not in inside:
            smp.set_activation_checkpointing(stack)


def compare(name: str, partitions: int, masked: bool = False, checkpointing: str = "", **config: Any) -> dict[str, Any]:
    """Two steps of a new sequence length each, with Hugging Face's default arguments: losses and gradients that differ from plain
    PyTorch, as (what, largest difference), and the parameters of each partition.

    `checkpointing`: "" none, "set" of all layer stacks by the library, "native" and "reentrant" by the model's own method, which
    plain PyTorch then runs with as well.
    """
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    plain = zoo.build(name, **config)
    smp.init({"partitions": partitions, "microbatches": MICROBATCHES, "stall_timeout": 60})
    model = smp.DistributedModel(zoo.build(name, **config))
    if checkpointing == "set":
        checkpoint_stacks(model)
    elif checkpointing:
        # On both sides: a model that checkpoints makes no key-value cache but a mask, and attention then runs other operators.
        model.train()
        plain.train()
        for side in (model.module, plain):
            side.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    before = len(smp.checkpointing.report().regions)
    differences = []
    for step in range(STEPS):
        batch = zoo.make_batch(name, seed=step, length=zoo.LENGTH + step, masked=masked)
        plain.zero_grad()
        for parameter in model.local_parameters():
            parameter.grad = None
        theirs = plain_step(plain, batch)
        ours = train_step(model, batch).outputs
        expected = dict(plain.named_parameters())
        pairs = [(f"loss {i}", a, b) for i, (a, b) in enumerate(zip(ours, theirs, strict=True))]
        # A tied parameter has several names, of which plain PyTorch gives one.
        local = {key: p for key, p in model.local_named_parameters() if key in expected}
        pairs += [(key, p.grad, expected[key].grad) for key, p in local.items()]
        for what, a, b in pairs:
            if (a is None) != (b is None):
                differences.append((step, what, "one has none"))
            elif a is not None and b is not None and not torch.equal(a, b):
                differences.append((step, what, (a - b).abs().max().item()))
    runtime = model._runtime
    state = None if runtime is None else {k: v for k, v in runtime.engine.state().items() if k != "value_bytes"}
    parameters = sum(p.numel() for p in model.local_parameters())
    recomputes = [region.recomputes for region in smp.checkpointing.report().regions[before:]]
    smp.shutdown()
    return {
        "differences": differences,
        "compared": sorted(local),
        "expected": sorted(expected.keys()),
        "parameters": parameters,
        "version": transformers.__version__,
        "state": state,
        "recomputes": recomputes,
    }
