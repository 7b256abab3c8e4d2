"""Trains a case over partitions, and compares it with plain PyTorch; runs on every rank."""

import time
from typing import Any

import models
import torch
from training_case import TrainingResult, make_optimizer, plain_training

import smp
from smp import _C

STEPS = 3


def place(model: torch.nn.Module, homes: dict[str, int]) -> None:
    """Places every module by hand."""
    for name, module in model.named_modules():
        smp.set_partition(module, homes[name])


def train(
    name: str, partitions: int, microbatches: int, pipeline: str, steps: int = STEPS
) -> tuple[TrainingResult, dict[str, Any]]:
    """Trains a case with the library. Gradients are this rank's, weights and buffers everybody's; the facts are for assertions."""
    case = models.BUILDERS[name]()
    homes = case.homes[partitions] if partitions > 1 else None
    smp.init(
        {
            "partitions": partitions,
            "microbatches": microbatches,
            "pipeline": pipeline,
            "auto_partition": homes is None,
            "default_partition": 0,
            "stall_timeout": 60,  # a hang is explained before the launch is given up
        }
    )
    optimizer = make_optimizer(case.model.parameters())
    model = smp.DistributedModel(case.model)
    if homes is not None:
        place(case.model, homes)
    optimizer = smp.DistributedOptimizer(optimizer)
    model.train()

    @smp.step
    def train_step(model, batch):
        return case.step(model, batch, model.backward)

    losses, gradients = [], []
    for step in range(steps):
        losses.append(train_step(model, case.make_batch(step)).outputs)
        gradients.append({key: None if p.grad is None else p.grad.clone() for key, p in model.local_named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
    case.step = None  # and with it what the step function kept: values live as long as somebody can see them
    facts = describe(model)
    state = model.state_dict()
    named = dict(case.model.named_parameters(remove_duplicate=False))
    result = TrainingResult(
        losses,
        gradients,
        {key: value.clone() for key, value in state.items() if key in named},
        {key: value.clone() for key, value in state.items() if key not in named},
    )
    smp.shutdown()
    return result, facts


def describe(model: smp.DistributedModel) -> dict[str, Any]:
    """Counts of this rank's engine, and what its tables still hold once all ranks are idle."""
    runtime = model._runtime
    if runtime is None:
        return {}
    counts = runtime.engine.counts()
    elsewhere = [p for _, p, home in runtime.parameters if home != runtime.partition]
    return {
        "executed": counts["executed"],
        "contributions": counts["gradient_contributions"],
        "state": settled(runtime),
        "remote_bytes": sum(p.nbytes for p in elsewhere if _C.holds_memory(p)),
    }


def settled(runtime: Any) -> dict[str, int]:
    """The engine's state, once releases have reached every rank."""
    for _ in range(100):
        smp.barrier()
        empty = runtime.engine.state()["values"] == 0 and runtime.engine.state()["calls"] == 0
        if all(smp.allgather(empty, smp.WORLD)):
            break
        time.sleep(0.02)  # idle ranks pass releases on every 50 ms
    return runtime.engine.state()


def compare(name: str, partitions: int, microbatches: int, pipeline: str) -> dict[str, Any]:
    """Trains with the library and without; the differences by name, and the facts."""
    result, facts = train(name, partitions, microbatches, pipeline)
    plain = plain_training(models.BUILDERS[name], microbatches, STEPS)
    differences = []

    def check(what: str, ours: Any, theirs: Any) -> None:
        if (ours is None) != (theirs is None) or (ours is not None and not torch.equal(ours, theirs)):
            gap = (
                "None against a tensor"
                if ours is None or theirs is None
                else float((ours.float() - theirs.float()).abs().max())
            )
            differences.append((what, gap))

    for step in range(STEPS):
        for index, (ours, theirs) in enumerate(zip(result.losses[step], plain.losses[step], strict=True)):
            check(f"loss of step {step}, microbatch {index}", ours, theirs)
        for key, ours in result.gradients[step].items():
            check(f"gradient of {key}, step {step}", ours, plain.gradients[step][key])
    for key, theirs in plain.weights.items():
        check(f"weight {key}", result.weights[key], theirs)
    persistent = models.BUILDERS[name]().model.state_dict()
    for key, theirs in plain.buffers.items():
        if key in persistent:  # what a state dict holds; the others are made anew with the model
            check(f"buffer {key}", result.buffers[key], theirs)

    def count_nonzero(gradients: dict[str, torch.Tensor | None]) -> int:
        return sum(bool(g is not None and g.abs().sum() > 0) for g in gradients.values())

    local = result.gradients[0]
    return {
        "differences": differences,
        "facts": facts,
        "nonzero_gradients": count_nonzero(local),
        "expected_nonzero_gradients": count_nonzero({key: plain.gradients[0][key] for key in local}),
    }
