"""Uses of `smp.DistributedOptimizer` and `smp.amp.GradScaler` that run on every rank."""

import copy
import math
from typing import Any

import torch
import torch.nn.functional as F
from small_net import distribute, job, make_batch, make_net, plain_step, raised, train_step

import smp

LEARNING_RATE = 0.05
MICROBATCHES = 2


def groups(net: torch.nn.Module) -> list[dict[str, Any]]:
    """Two groups; the first has no weight decay."""
    parameters = dict(net.named_parameters())
    biases = [p for name, p in parameters.items() if name.endswith("bias")]
    return [
        {"params": biases, "weight_decay": 0.0},
        {"params": [p for p in parameters.values() if not any(p is q for q in biases)]},
    ]


def make_adam(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(net), lr=LEARNING_RATE)


def same(ours: Any, theirs: Any) -> bool:
    """Equal trees; tensors bit by bit."""
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same(value, theirs[key]) for key, value in ours.items())
    if isinstance(ours, list | tuple):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    return bool(ours == theirs)


def clipped_training(partitions: int, norm_type: float) -> list[bool]:
    """`torch.nn.utils.clip_grad_norm_` in training, against plain PyTorch: norms, gradients and weights."""
    clip = torch.nn.utils.clip_grad_norm_
    with job(partitions):
        net, plain = make_net(), make_net()
        model = distribute(net)
        alone = torch.nn.Parameter(torch.ones(3))  # of no model, on every rank
        other_alone = torch.nn.Parameter(torch.ones(3))
        optimizer, other = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(plain.parameters(), lr=0.1)
        facts = []
        for seed in range(3):
            train_step(model, *make_batch(seed))
            plain_step(plain, *make_batch(seed))
            alone.grad, other_alone.grad = torch.full((3,), 0.2), torch.full((3,), 0.2)
            ours = clip([*model.parameters(), alone], 0.1, norm_type)
            theirs = clip([*plain.parameters(), other_alone], 0.1, norm_type)
            expected = dict(plain.named_parameters())
            facts += [theirs.item() > 0.1, torch.equal(ours, theirs), torch.equal(alone.grad, other_alone.grad)]
            facts += [torch.equal(p.grad, expected[name].grad) for name, p in model.local_named_parameters()]
            # Of one partition alone, and of no partition.
            facts.append(torch.equal(clip(net.second.parameters(), 1e-3), clip(plain.second.parameters(), 1e-3)))
            facts.append(torch.equal(clip([alone], 1e-3), clip([other_alone], 1e-3)))
            # What each rank has itself counts once.
            facts.append(torch.allclose(clip(model.local_parameters(), 1e-4), clip(plain.parameters(), 1e-4)))
            optimizer.step(), other.step()
            optimizer.zero_grad(), other.zero_grad()
        facts.append(same(dict(model.state_dict()), dict(plain.state_dict())))
    before = torch.nn.utils.clip_grad._get_total_norm.__module__
    return [*facts, before == "torch.nn.utils.clip_grad"]


def clipped_infinity(partitions: int) -> list[tuple[str, str]]:
    """A gradient that is not finite on partition 1 alone is an error on every rank, where asked for."""
    with job(partitions):
        net = make_net()
        model = distribute(net)
        train_step(model, *make_batch())
        if net.second.weight.grad is not None:
            net.second.weight.grad.fill_(float("inf"))
        parameters = list(model.parameters())
        clip = torch.nn.utils.clip_grad_norm_
        return [raised(clip, parameters, 1.0, error_if_nonfinite=True), str(clip(parameters, 1.0).item())]


def scheduled_training(partitions: int, before: bool) -> dict[str, Any]:
    """AdamW with a scheduler against plain PyTorch; the optimizer is made before or after the model is wrapped."""
    facts = {}
    with job(partitions):
        net, plain = make_net(), make_net()
        inner = make_adam(net) if before else None
        model = distribute(net)
        inner = inner or make_adam(model)
        optimizer, other = smp.DistributedOptimizer(inner), make_adam(plain)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=10)
        other_scheduler = torch.optim.lr_scheduler.OneCycleLR(other, 0.1, total_steps=10)
        rates = []
        for seed in range(3):
            train_step(model, *make_batch(seed))
            plain_step(plain, *make_batch(seed))
            optimizer.step(), other.step()
            optimizer.zero_grad(), other.zero_grad()
            scheduler.step(), other_scheduler.step()
            rates.append(scheduler.get_last_lr() == other_scheduler.get_last_lr())
        facts["rates"] = rates
        facts["cleared"] = all(p.grad is None for p in net.parameters())
        facts["groups"] = [
            optimizer.param_groups is inner.param_groups,
            optimizer.param_groups[0]["lr"] == inner.param_groups[0]["lr"] != LEARNING_RATE,
        ]
        facts["attributes"] = [
            optimizer.state is inner.state,
            optimizer.defaults is inner.defaults,
            "DistributedOptimizer(AdamW" in repr(optimizer),
        ]
        facts["kind"] = isinstance(optimizer, torch.optim.Optimizer)
        facts["state"] = same(optimizer.state_dict(), other.state_dict())
        facts["weights"] = same(dict(model.state_dict()), dict(plain.state_dict()))
        facts["local"] = len(optimizer.local_state_dict()["state"]), optimizer.local_state_dict()["_smp_is_partial"]
        closure = optimizer.step(lambda: 3.0)
        facts["closure"] = closure
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 1.0})
        facts["added"] = len(inner.param_groups)
    return facts  # fmt: skip


def resumed_training(partitions: int, partial: bool) -> dict[str, Any]:
    """Two steps, saving, and two more in new objects, against four in a row. Loads before the first step, as resuming scripts do."""
    with job(partitions):
        net = make_net()
        model = distribute(net)
        optimizer = smp.DistributedOptimizer(make_adam(net))
        train(model, optimizer, (0, 1))
        saved = copy.deepcopy(
            [model.local_state_dict(), optimizer.local_state_dict()]
            if partial
            else [model.state_dict(), optimizer.state_dict()]
        )
        train(model, optimizer, (2, 3))
        expected = copy.deepcopy([dict(model.state_dict()), optimizer.state_dict()])
    with job(partitions):
        net = make_net(7)
        model = distribute(net)
        optimizer = smp.DistributedOptimizer(make_adam(net))
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        held = len(optimizer.state)
        train(model, optimizer, (2, 3))
        return_value = {
            "weights": same(dict(model.state_dict()), expected[0]),
            "state": same(optimizer.state_dict(), expected[1]),
            "held": held,
            "local": len(list(model.local_parameters())),
        }
    return return_value


def train(model: smp.DistributedModel, optimizer: smp.DistributedOptimizer, seeds: Any) -> None:
    for seed in seeds:
        train_step(model, *make_batch(seed))
        optimizer.step()
        optimizer.zero_grad()


# ---- loss scaling


@smp.step
def scaled_step(model, scaler, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(scaler.scale(loss))
    return loss


def scaler_passes_through(partitions: int) -> dict[str, Any]:
    """Without an accelerator and without a named device the scaler changes nothing."""
    with job(partitions):
        net, plain = make_net(), make_net()
        model = distribute(net)
        scaler = smp.amp.GradScaler()
        optimizer, other = smp.DistributedOptimizer(make_adam(net)), make_adam(plain)
        for seed in range(2):
            scaled_step(model, scaler, *make_batch(seed))
            plain_step(plain, *make_batch(seed))
            scaler.step(optimizer)
            scaler.update()
            other.step()
            optimizer.zero_grad(), other.zero_grad()
        facts = {
            "enabled": scaler.is_enabled() == torch.cuda.is_available(),
            "weights": same(dict(model.state_dict()), dict(plain.state_dict())),
        }
    return facts


def infinity_on_one_rank(partitions: int, place: str | None) -> dict[str, Any]:
    """Scaled steps of which the second meets an infinity in the gradients of one module."""
    with job(partitions):
        net = make_net()
        model = distribute(net)
        scaler = smp.amp.GradScaler(init_scale=1024.0, growth_interval=2, device="cpu")
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        scales, changed = [], []
        for step in range(4):
            scaled_step(model, scaler, *make_batch(step))
            for name, p in model.local_named_parameters():
                if step == 1 and place is not None and name.startswith(place):
                    p.grad[0] = math.inf
            before = copy.deepcopy(dict(model.local_named_parameters()))
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            changed.append([not torch.equal(p, before[name]) for name, p in model.local_named_parameters()])
            scales.append(scaler.get_scale())
        saved = scaler.state_dict()
        restored = smp.amp.GradScaler(device="cpu")
        restored.load_state_dict(saved)
    return {"scales": scales, "changed": changed, "restored": restored.get_scale()}


def scaled_training_is_exact(partitions: int, fused: bool) -> bool:
    """A scale that is a power of two changes no bit of the weights."""

    def make_optimizer(net: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(net.parameters(), lr=0.1, fused=fused)

    with job(partitions):
        net, plain = make_net(), make_net()
        model = distribute(net)
        scaler = smp.amp.GradScaler(init_scale=64.0, device="cpu")
        optimizer, other = smp.DistributedOptimizer(make_optimizer(net)), make_optimizer(plain)
        for seed in range(2):
            scaled_step(model, scaler, *make_batch(seed))
            plain_step(plain, *make_batch(seed))
            scaler.step(optimizer)
            scaler.update()
            other.step()
            optimizer.zero_grad(), other.zero_grad()
        equal = same(dict(model.state_dict()), dict(plain.state_dict()))
    return equal


def scaling_without_gradients() -> float:
    """A rank whose parameters get no gradient takes part in the decision."""
    with job():
        net = make_net()
        net.first.requires_grad_(False)
        model = distribute(net)
        scaler = smp.amp.GradScaler(init_scale=64.0, growth_interval=1, device="cpu")
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        scaled_step(model, scaler, *make_batch())
        scaler.step(optimizer)
        scaler.update()
        scale = scaler.get_scale()
    return scale


def refused() -> list[tuple[str, str]]:
    with job(1):
        inner = torch.optim.SGD(make_net().parameters(), lr=0.1)
        messages = [
            raised(smp.DistributedOptimizer, make_net()),
            raised(smp.DistributedOptimizer, smp.DistributedOptimizer(inner)),
        ]
        # The options of the FP16 wrapper are accepted in both spellings.
        smp.DistributedOptimizer(
            inner, static_loss_scale=None, dynamic_loss_scale=True, dynamic_loss_args={"scale_window": 10}
        )
        smp.DistributedOptimizer(inner, dynamic_loss_scale=True, init_scale=2**16)
        copied = copy.deepcopy(smp.DistributedOptimizer(inner))
        assert copied.param_groups[0]["lr"] == 0.1 and copied.optimizer is not inner
    return messages
