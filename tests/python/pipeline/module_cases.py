"""Models that do what models do: fill buffers, change arguments, give arguments back, differentiate inside; against plain PyTorch."""

import contextlib
import io
import logging
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from small_net import job, raised
from torch import nn
from torch.utils.checkpoint import checkpoint

import smp

WIDTH = 6
MICROBATCHES = 4
STEPS = 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.silu(self.linear(x))


class Model(nn.Module):
    """`first` and `last` around what a case puts in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Layer(), Layer()
        self.make_middle()

    def make_middle(self) -> None:
        self.middle: nn.Module = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


class Pair(nn.Module):
    """A container of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.one(x))


class FillsBuffer(Model):
    """A local tensor that remote ones are put into, and that is passed on."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.middle(self.first(x))
        filled = torch.zeros(len(x), WIDTH)
        for row in range(len(x)):
            filled[row] = 2 * h[row]
        return self.last(filled)


class FillsWithOwn(Model):
    """Into what a parameter of this rank made."""

    def make_middle(self) -> None:
        super().make_middle()
        self.own = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.middle(self.first(x))
        filled = self.own * torch.ones(len(x), WIDTH)
        filled[0] = h[0] + h[1]
        return self.last(filled)


class PairThatFills(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.one(x)
        filled = torch.zeros(len(x), WIDTH)
        filled[1] = h[0] + x[0]
        return self.two(filled)


class FillsInContainer(Model):
    def make_middle(self) -> None:
        self.middle = PairThatFills()


class PairThatChanges(Pair):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.add_(1)
        return super().forward(x)


class ChangesInContainer(Model):
    """The container changes its argument, which its caller uses afterwards."""

    def make_middle(self) -> None:
        self.middle = PairThatChanges()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(self.middle(h) + h)


class GivesArgumentBack(Model):
    """What a module returns is its argument, changed in place afterwards."""

    def make_middle(self) -> None:
        super().make_middle()
        self.same, self.off = nn.Identity(), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        shortcut = self.off(self.same(h))
        h.mul_(2)
        return self.last(self.middle(h) + shortcut)


class ReturnsBuffer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.mean.mul_(0.9).add_(x.detach().mean(0))
        return self.linear(x), self.mean


class UsesReturnedBuffer(Model):
    def make_middle(self) -> None:
        self.middle = ReturnsBuffer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, mean = self.middle(self.first(x))
        return self.last(h) * mean


class Conjugates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(self.linear(x), x).conj()


class Complex(Model):
    def make_middle(self) -> None:
        self.middle = Conjugates()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.middle(self.first(x))
        return self.last(z.real + z.imag)


class GradientInside(Model):
    """autograd.grad in glue: nothing may be added to gradients."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        y = self.middle(h)
        (g,) = torch.autograd.grad(y.sum(), h, retain_graph=True)
        return self.last(y + g)


class Recurrent(Model):
    def make_middle(self) -> None:
        self.middle = nn.LSTM(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        sequence = torch.stack([h, h * 2], 1)
        out, _ = self.middle(sequence)
        return self.last(out.sum(1))


class Recomputes(Model):
    """Recomputation in glue, of modules here and elsewhere."""

    how: dict[str, Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def run(h: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.last(F.dropout(self.middle(h), 0.5)), 0.5)

        h = self.first(x)
        return run(h) if self.how is None else checkpoint(run, h, **self.how)


class UsesParameters(Model):
    """Parameters used outside of their modules, alone and with what is here: a penalty, a view, a weight that is borrowed."""

    def make_middle(self) -> None:
        super().make_middle()
        self.lender = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight, bias = self.lender.linear.weight, self.lender.linear.bias
        borrowed = F.linear(x, weight.t(), bias[0].expand(WIDTH))
        filled = torch.zeros(WIDTH)
        filled.copy_(bias)
        h = self.last(self.middle(self.first(borrowed)))
        penalty = sum(p.square().sum() for p in self.middle.parameters()) + torch.linalg.vector_norm(weight)
        return h * (1 + filled) + 1e-2 * penalty


class Tokens(nn.Module):
    """The gradient of its argument lies in memory otherwise than the argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.flatten(2).transpose(1, 2))


class ViewsOfGradients(Model):
    """Backward of glue that makes views, of such a gradient."""

    def make_middle(self) -> None:
        self.middle = Tokens()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).view(-1, 3, 2).view(-1, 3, 1, 2).permute(0, 3, 1, 2).contiguous()
        return self.last(self.middle(h).reshape(len(x), WIDTH))


class SameMemory(torch.autograd.Function):
    """Does nothing, by the strides of the gradient."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.as_strided(gradient.shape, gradient.stride())


class StridesOfGradients(ViewsOfGradients):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).view(len(x), 2, 3, 1)
        scale = h.new_tensor([1.5, 0.5])
        h = SameMemory.apply(h)
        return self.last(self.middle(h).reshape(len(x), WIDTH)) * scale.sum()


class Flattens(nn.Module):
    """Gives back a view of its argument, having changed it where `changes` says so."""

    def __init__(self, changes: bool = False) -> None:
        super().__init__()
        self.changes = changes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.add_(1) if self.changes else x).view(-1)


class FlattensInside(Pair):
    """A container that gives back a view of its argument."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), x.view(-1)


class ChangesViews(Model):
    """Views that modules gave back are changed in place where nobody else looks at their memory."""

    def make_middle(self) -> None:
        self.middle = nn.Linear(WIDTH, 2 * WIDTH)
        self.flatten, self.shift = Flattens(), Flattens(changes=True)
        self.halves = Halves()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.shift(self.first(x) * 2)
        h.mul_(2)
        a, b = self.halves(self.middle(h.view(len(x), WIDTH)))
        a.mul_(3)  # lies beside b
        flat = self.flatten(a + b)
        flat.add_(1)
        return self.last(flat.view(len(x), WIDTH) + b)


class Halves(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[:, :WIDTH], x[:, WIDTH:]


MODELS = {
    model.__name__: model
    for model in (
        FillsBuffer, FillsWithOwn, FillsInContainer, ChangesInContainer, GivesArgumentBack, UsesReturnedBuffer, Complex, GradientInside, Recurrent,
        UsesParameters, ChangesViews, ViewsOfGradients, StridesOfGradients,
    )
}  # fmt: skip

# Who is away from partition 0.
HOMES = {
    "middle": {"middle": 1},
    "lender": {"lender": 1},
    "others": {"first": 1, "last": 1},
    "inside": {"middle": 1, "middle.one": 0, "middle.two": 1},
}


def make(model: type[Model]) -> Model:
    torch.manual_seed(0)
    return model()


def make_batch(step: int) -> torch.Tensor:
    return torch.randn(3 * MICROBATCHES, WIDTH, generator=torch.Generator().manual_seed(step))


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


class Either(Layer):
    """Which argument it uses depends on data."""

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return super().forward(a if a.detach()[0, 0] > a.detach()[1, 0] else b)


class UsesEither(Model):
    def make_middle(self) -> None:
        self.middle = Either()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(self.middle(h, -2 * h))


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


class SetsScale(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.middle.scale = 2.0 * len(x)
        return super().forward(x)


class SetsSame(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.middle.scale = len(x) / 2
        return super().forward(x)


def count_calls(module: nn.Module, args: Any) -> None:
    module.count.add_(1)


def hooked(hook: Any) -> Model:
    net = Model()
    net.middle.register_buffer("count", torch.zeros(()))
    net.middle.register_forward_pre_hook(hook)
    return net


def state_set_on_a_module_elsewhere() -> dict[str, str]:
    """What rank 0 logs in two steps whose code changes a module that runs elsewhere. The last one changes nothing."""
    nets = {
        "attribute": SetsScale,
        "attribute by a hook": lambda: hooked(
            lambda module, args: setattr(module, "calls", getattr(module, "calls", 0) + 1)
        ),
        "buffer by a hook": lambda: hooked(count_calls),
        "spectral_norm": with_old_norm,
        "same value": SetsSame,
    }
    said = {}
    for name, make_net in nets.items():
        with logged() as log, job(2, MICROBATCHES):
            torch.manual_seed(0)
            net = make_net()
            if name == "same value":
                net.middle.scale = 1.5
            model = distribute(net, "middle")
            for step in range(STEPS):
                with torch.no_grad():
                    forward_step(model, make_batch(step))
        said[name] = log.getvalue()
    return said


@smp.step
def forward_step(model, x):
    return model(x)


def with_old_norm() -> Model:
    net = Model()
    net.middle = torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))
    return net


class TwoNames(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = 2 * x
        return y, y.view(-1)


class NamesMemoryTwice(Model):
    def make_middle(self) -> None:
        self.middle = FlattensInside()
        self.flatten, self.two_names = Flattens(), TwoNames()


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


class Appends(Layer):
    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        seen.append(x)
        return super().forward(x)


class KeepsList(Model):
    def make_middle(self) -> None:
        self.middle = Appends()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x), []))


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
