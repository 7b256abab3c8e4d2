"""Uses of the models in module_models.py on ranks: training them against plain PyTorch, and what is said of what can't be right."""

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

import torch
from module_models import (
    HOMES,
    MICROBATCHES,
    MODELS,
    STEPS,
    WIDTH,
    HasScale,
    KeepsList,
    Model,
    NamesMemoryTwice,
    Nests,
    NormsTied,
    Pair,
    Recomputes,
    SetsInContainer,
    SetsSame,
    SetsScale,
    UsesEither,
    count_calls,
    hooked,
    make,
    make_batch,
)
from small_net import job, raised
from torch import nn

import smp


def distribute(net: nn.Module, homes: str) -> smp.DistributedModel:
    for path, home in HOMES[homes].items():
        smp.set_partition(net.get_submodule(path), home)
    return smp.DistributedModel(net)


@smp.step
def train_step(model, x):
    loss = model(x).square().mean()
    model.backward(loss)
    return loss


def outcome(losses: list[torch.Tensor], parameters: Any) -> dict[str, Any]:
    return {
        "losses": torch.stack(losses),
        "gradients": {n: p.grad if p.grad is None else p.grad.clone() for n, p in parameters},
    }


def train(name: str, homes: str) -> dict[str, Any]:
    with job(2, MICROBATCHES):
        model = distribute(make(MODELS[name]), homes)
        losses = [loss for step in range(STEPS) for loss in train_step(model, make_batch(step)).outputs]
        return outcome(losses, model.local_named_parameters())


def plain(model: type[Model]) -> dict[str, Any]:
    net, losses = make(model), []
    for step in range(STEPS):
        for part in make_batch(step).chunk(MICROBATCHES):
            loss = net(part).square().mean()
            (loss / MICROBATCHES).backward()
            losses.append(loss.detach())
    return outcome(losses, net.named_parameters())


def backward_beside_modules(steps: int) -> list[str]:
    """What is wrong after steps whose second backward is that of parameters of partition 0 alone, while modules run there."""
    with job(2, MICROBATCHES):
        torch.manual_seed(0)
        net = Model()
        model = distribute(net, "middle")
        model._partition()

        @smp.step
        def step(model, x):
            loss = model(x).square().mean()
            model.backward(loss)
            penalty = model.module.first.linear.weight.square().sum()
            model.backward(penalty)
            return loss

        torch.manual_seed(0)
        reference = Model()
        wrong = []
        for seed in range(steps):
            step(model, make_batch(seed))
            for part in make_batch(seed).chunk(MICROBATCHES):
                loss = reference(part).square().mean()
                (loss / MICROBATCHES).backward()
                (reference.first.linear.weight.square().sum() / MICROBATCHES).backward()
            expected = dict(reference.named_parameters())
            wrong += [
                f"{name} in step {seed}"
                for name, p in model.local_named_parameters()
                if not torch.equal(p.grad, expected[name].grad)
            ]
            model.zero_grad(set_to_none=True)
            reference.zero_grad(set_to_none=True)
    return wrong


def reach_that_varies() -> dict[str, Any]:
    """The message of the step in which it shows, and the outcome afterwards."""
    with job(2, MICROBATCHES):
        torch.manual_seed(0)
        model = distribute(UsesEither(), "middle")
        message = raised(train_step, model, make_batch(0))
        model.zero_grad(set_to_none=True)
        losses = [loss for step in range(STEPS) for loss in train_step(model, make_batch(step)).outputs]
        return {"message": message, **outcome(losses, model.local_named_parameters())}


def recompute(how: dict[str, Any] | None) -> dict[str, Any]:
    with job(2, MICROBATCHES):
        torch.manual_seed(0)
        net = Recomputes()
        net.how = how
        model = distribute(net, "middle")
        torch.manual_seed(1)
        losses = [loss for step in range(STEPS) for loss in train_step(model, make_batch(step)).outputs]
        return outcome(losses, model.local_named_parameters())


def attacked(model: Any, x: torch.Tensor, backward: Any) -> torch.Tensor:
    """One microbatch of adversarial training: gradients for what the network was given, and for a parameter in glue."""
    x = x.detach().requires_grad_()
    seen = x * 2
    inner = model.module if isinstance(model, smp.DistributedModel) else model
    loss = (model(seen) * inner.scale).square().mean()
    by_input, by_seen, by_scale = torch.autograd.grad(loss, (x, seen, inner.scale), retain_graph=True)
    loss = loss + model(x.detach() + 0.1 * by_input.sign() + by_seen * by_scale).square().mean()
    backward(loss)
    return loss


@smp.step
def attacked_step(model, x):
    return attacked(model, x, model.backward)


@smp.step
def gradient_of_a_parameter(model, x):
    torch.autograd.grad(model(x).sum(), model.module.first.linear.weight, allow_unused=True)


def adversarial(homes: str | None) -> Any:
    torch.manual_seed(0)
    net = HasScale()
    if homes is None:
        losses = []
        for step in range(STEPS):
            for part in make_batch(step).chunk(MICROBATCHES):
                losses.append(attacked(net, part, lambda loss: (loss / MICROBATCHES).backward()).detach())
        return outcome(losses, net.named_parameters())
    with job(2, MICROBATCHES):
        model = distribute(net, homes)
        losses = [loss for step in range(STEPS) for loss in attacked_step(model, make_batch(step)).outputs]
        result = outcome(losses, model.local_named_parameters())
        return {**result, "refused": raised(gradient_of_a_parameter, model, make_batch(0))}


def refused_models() -> dict[str, tuple[str, str]]:
    """What steps of models say that can't be right."""
    said = {}
    for name, make_net, home in (("tied", NormsTied, "last"), ("nested", Nests, "middle.layers.0")):
        with job(2, MICROBATCHES):
            net = make(make_net)
            smp.set_partition(net.get_submodule(home), 1)
            model = smp.DistributedModel(net)
            model.eval()
            with torch.no_grad():
                said[name] = raised(forward_step, model, make_batch(0))
    return said


def state_set_on_a_module_elsewhere() -> dict[str, str]:
    """What this rank logs in two steps whose code changes a module that runs elsewhere. The last one changes nothing."""
    nets = {
        "attribute": SetsScale,
        "attribute by a hook": lambda: hooked(
            lambda module, args: setattr(module, "calls", getattr(module, "calls", 0) + 1)
        ),
        "buffer by a hook": lambda: hooked(count_calls),
        "by a container": SetsInContainer,
        "same value": SetsSame,
    }
    said = {}
    for name, make_net in nets.items():
        with logged() as log, job(2, MICROBATCHES):
            torch.manual_seed(0)
            net = make_net()
            if name == "same value":
                net.middle.scale = 1.5
            model = distribute(net, "inside" if name == "by a container" else "middle")
            for step in range(STEPS):
                with torch.no_grad():
                    forward_step(model, make_batch(step))
        said[name] = log.getvalue()
    return said


@smp.step
def forward_step(model, x):
    return model(x)


def memory_of_two_names() -> dict[str, Any]:
    """What steps say that change one of two tensors with the same memory and then use the other one; on rank 0."""

    def result_then_argument(net, x):
        h = net.first(x)
        net.flatten(h).mul_(2)
        return h + 1

    def argument_then_result(net, x):
        h = net.first(x)
        flat = net.flatten(h)
        h.mul_(2)
        return flat + 1

    def through_views(net, x):
        h = net.first(x)
        flat = net.flatten(h)
        h[0].mul_(2)
        assert (h + 1).shape == h.shape
        return flat[2:] + 1

    def two_results(net, x):
        y, flat = net.two_names(net.first(x))
        flat.mul_(2)
        return y + 1

    def of_a_container(net, x):
        h = net.first(x)
        _, flat = net.middle(h)
        h.mul_(2)
        return flat + 1

    def into_a_module(net, x):
        h = net.first(x)
        net.flatten(h).mul_(2)
        return net.last(h)

    def result_then_local(net, x):
        flat = net.flatten(x)
        flat.mul_(2)
        return x + 1

    def local_then_result(net, x):
        flat = net.flatten(x)
        x.mul_(2)
        return flat + 1

    said = {}
    with job(2, 1):
        torch.manual_seed(0)
        model = distribute(NamesMemoryTwice(), "middle")
        for body in (
            result_then_argument, argument_then_result, through_views, two_results, of_a_container, into_a_module, result_then_local,
            local_then_result,
        ):  # fmt: skip
            said[body.__name__] = raised(
                smp.step(lambda model, x, body=body: body(model.module, x)), model, make_batch(0)
            )
    return said


def looking_at_a_tensor() -> dict[str, Any]:
    """Texts of a remote tensor, and what other reads say; on rank 0."""
    texts: dict[str, Any] = {}
    with job(2, 1):
        model = distribute(Model(), "middle")

        @smp.step
        def look(model, x):
            h = model.module.middle(model.module.first(x))
            texts["inside"] = str(h)
            texts["numpy"] = raised(h.detach().numpy)
            texts["same"] = str(torch.empty(h.shape).copy_(h.detach()))
            texts["transform"] = raised(torch.func.grad(lambda r: model.module.middle(r).sum()), torch.ones(2, WIDTH))
            texts["kept"] = h.detach()
            return h

        look(model, make_batch(0))
        if "kept" in texts:
            texts["outside"] = str(texts.pop("kept"))
    return texts


def inference() -> list[bool]:
    """Evaluation under inference_mode, around the step and inside it."""
    equal = []
    with job(2, MICROBATCHES):
        torch.manual_seed(0)
        net = Model()
        torch.manual_seed(0)
        reference = Model()
        model = distribute(net, "middle")

        @smp.step
        def inside(model, x):
            with torch.inference_mode():
                return model(x)

        @smp.step
        def around(model, x):
            return model(x)

        for _ in range(2):
            with torch.inference_mode():
                outputs = around(model, make_batch(0)).outputs
            outputs += inside(model, make_batch(0)).outputs
            expected = [reference(part).detach() for part in make_batch(0).chunk(MICROBATCHES)] * 2
            equal.append(all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True)))
    return equal


def hook_before_the_first_step() -> list[bool]:
    """Outputs of a layer inside a module elsewhere, caught by a hook that was set before the first step; on rank 0."""
    caught, expected = [], []
    with job(2, 2):
        torch.manual_seed(0)
        net = Model()
        net.middle = Pair()
        model = distribute(net, "middle")
        net.middle.one.register_forward_hook(lambda module, args, output: caught.append(output))

        @smp.step
        def step(model, x):
            caught.clear()
            out = model(x)
            expected.append(model.module.middle.one(model.module.first(x)))
            return out, caught[0], expected[-1]

        _, found, right = step(model, make_batch(0)[:4])
    return [torch.equal(a, b) for a, b in zip(found.outputs, right.outputs, strict=True)]


@contextlib.contextmanager
def logged() -> Iterator[io.StringIO]:
    """What this rank logs meanwhile."""
    log = io.StringIO()
    handler = logging.StreamHandler(log)
    logger = logging.getLogger("smp")
    logger.addHandler(handler)
    try:
        yield log
    finally:
        logger.removeHandler(handler)


def lost_change() -> str:
    """What this rank logs when a module changes a list that it was given."""
    with logged() as log, job(2, MICROBATCHES):
        model = distribute(KeepsList(), "middle")
        for step in range(STEPS):
            train_step(model, make_batch(step))
    return log.getvalue()
