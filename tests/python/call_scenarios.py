"""Models whose modules call each other in ways that are hard to distribute; homes are given by hand."""

import torch
from torch import nn
from training_case import BATCH_SIZE, TrainingCase, by_prefix

WIDTH = 16


def regression_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(BATCH_SIZE, WIDTH, generator=generator) for name in ("x", "y")}


def regression_step(model, batch, backward):
    loss = (model(batch["x"]) - batch["y"]).square().mean()
    backward(loss)
    return loss


def case(model, two, four, step=regression_step, make_batch=regression_batch, **options):
    """`two` and `four` are the homes of name prefixes with 2 and 4 partitions."""
    homes = {2: by_prefix(model, two), 4: by_prefix(model, four)}
    return TrainingCase(model, make_batch, step, homes, **options)


def linear():
    return nn.Linear(WIDTH, WIDTH)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Nested(nn.Module):
    """Calls its own layer, then the next level, then its layer's twin, with an addition of its own."""

    def __init__(self, inner=None):
        super().__init__()
        self.before, self.inner, self.after = Layer(), inner, Layer()

    def forward(self, x):
        h = self.before(x)
        if self.inner is not None:
            h = self.inner(h) + h
        return self.after(h)


def nested_homes():
    """Homes 0-1-0-1 on the way down: a rank is called again by a rank that it waits for."""
    torch.manual_seed(0)
    model = Nested(Nested(Nested(Nested())))
    two = {"": 0, "inner": 1, "inner.inner": 0, "inner.inner.inner": 1}
    four = {"": 0, "inner": 2, "inner.inner": 1, "inner.inner.inner": 3, "inner.inner.inner.after": 0}
    return case(model, two, four)


def zig_zag():
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(6)))
    two = {str(index): home for index, home in enumerate((0, 1, 0, 1, 0, 1))}
    four = {str(index): home for index, home in enumerate((3, 0, 2, 1, 3, 0))}
    return case(model, two, four)


def container_away():
    """A container that lives on another rank than all of its children."""
    torch.manual_seed(0)
    model = nn.Sequential(Layer(), Nested(Layer()), Layer())
    two = {"1": 1, "1.before": 0, "1.inner": 0, "1.after": 0}
    four = {"1": 3, "1.before": 0, "1.inner": 1, "1.after": 2}
    return case(model, two, four)


class UsedTwice(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.between = Layer(), Layer()

    def forward(self, x):
        return self.shared(self.between(self.shared(x)))


def module_used_twice():
    torch.manual_seed(0)
    return case(UsedTwice(), {"shared": 1}, {"shared": 3, "between": 1})


class AttributeSkip(nn.Module):
    """Keeps a value in an attribute during forward and reads it later, as many user models do."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = Layer(), Layer(), Layer()

    def forward(self, x):
        self.skip = self.first(x)
        h = self.middle(self.skip)
        h = self.last(h) + self.skip
        del self.skip
        return h


def attribute_skip():
    torch.manual_seed(0)
    return case(AttributeSkip(), {"middle": 1, "last": 1}, {"first": 1, "middle": 2, "last": 3})


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.5))  # used by glue, not by a layer

    def forward(self, x):
        h = x
        for layer in self.layers:
            h = h + layer(h)
        return h * self.scale


def skip_connection():
    torch.manual_seed(0)
    two = {"layers.1": 1, "layers.2": 1}
    four = {"layers.0": 1, "layers.1": 2, "layers.2": 3}
    return case(Residual(), two, four)


def frozen_layer():
    """A layer without gradients of its own between two that have them, and one at the very start."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)))
    model[0].requires_grad_(False)
    model[2].requires_grad_(False)
    return case(model, {"1": 1, "2": 1}, {"0": 0, "1": 1, "2": 2, "3": 3})


class TwoOutputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.used, self.extra = Layer(), Layer(), Layer()

    def forward(self, x):
        h = self.body(x)
        return self.used(h), self.extra(h)


def unused_output():
    """One output never reaches the loss, and the user keeps it after the step: its branch gets no gradient."""
    torch.manual_seed(0)
    kept = []

    def step(model, batch, backward):
        output, extra = model(batch["x"])
        kept.append(extra)
        loss = (output - batch["y"]).square().mean()
        backward(loss)
        return loss

    return case(TwoOutputs(), {"body": 1, "extra": 1}, {"body": 1, "used": 2, "extra": 3}, step)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.two = Layer(), Layer(), Layer()

    def forward(self, x, head):
        return (self.one if head == "one" else self.two)(self.trunk(x))


def two_backwards():
    """Two pairs of forward and backward in one step function; they share a layer."""
    torch.manual_seed(0)

    def step(model, batch, backward):
        first = (model(batch["x"], "one") - batch["y"]).square().mean()
        backward(first)
        second = (model(batch["x"], head="two") + batch["y"]).abs().mean()
        backward(second)
        return first.detach() + second.detach()

    return case(Shared(), {"trunk": 1, "two": 1}, {"trunk": 1, "one": 2, "two": 3}, step)


BUILDERS = (
    nested_homes,
    zig_zag,
    container_away,
    module_used_twice,
    attribute_skip,
    skip_connection,
    frozen_layer,
    unused_output,
    two_backwards,
)
