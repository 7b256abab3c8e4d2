"""Models that pass unusual values between modules or change them on the way; homes are given by hand."""

from dataclasses import dataclass
from typing import Any

import torch
from call_scenarios import WIDTH, Layer, TwoOutputs, case, linear, regression_batch
from torch import nn
from training_case import BATCH_SIZE


@dataclass
class State:
    hidden: torch.Tensor
    note: str
    gate: torch.Tensor | None = None


class TreeLayer(nn.Module):
    """Takes and returns values in every common kind of container, None among them."""

    def __init__(self):
        super().__init__()
        self.linear, self.gate = linear(), linear()

    def forward(self, state, pair, table=None, *, scale=1.0):
        h = torch.tanh(self.linear(state.hidden)) * scale + pair[0]
        if state.gate is not None:
            h = h * state.gate
        if table is not None:
            h = h + table["bias"]
        gate = torch.sigmoid(self.gate(h))
        return State(h, state.note + "+", gate), (h, None), {"bias": gate * 0.1, "count": 3, "nothing": None}


class Trees(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = TreeLayer(), TreeLayer(), linear()

    def forward(self, x):
        state, pair, table = self.first(State(x, "start"), (x, None))
        state, pair, table = self.second(state, pair, table, scale=0.5)
        assert state.note == "start++" and pair[1] is None and table["count"] == 3 and table["nothing"] is None
        return self.last(state.hidden) + table["bias"]


def argument_trees():
    torch.manual_seed(0)
    return case(Trees(), {"second": 1}, {"first": 1, "second": 2, "last": 3})


class IgnoresOne(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x, ignored, also_ignored=None):
        return torch.tanh(self.linear(x))


class UnusedInputs(nn.Module):
    """What only reaches an ignored argument gets no gradient: None, not zero."""

    def __init__(self):
        super().__init__()
        self.first, self.aside, self.second, self.never = Layer(), Layer(), IgnoresOne(), Layer()

    def forward(self, x):
        h = self.first(x)
        return self.second(h, self.aside(h), also_ignored=h)


def unused_inputs():
    torch.manual_seed(0)
    return case(UnusedInputs(), {"second": 1, "never": 1}, {"aside": 1, "second": 2, "never": 3})


def forward_hooks():
    """Hooks that change input and output, and count in the attribute `hook_calls` how often they ran."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(4)))

    def halve_input(module, arguments):
        return (arguments[0] * 0.5,)

    def shift_output(module, arguments, output):
        module.hook_calls = getattr(module, "hook_calls", 0) + 1
        return output + 0.25

    for index in (1, 2):
        model[index].register_forward_pre_hook(halve_input)
        model[index].register_forward_hook(shift_output)
    return case(model, {"1": 1, "2": 1}, {"0": 1, "1": 2, "2": 3})


class ChangesArgument(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = linear()

    def forward(self, x):
        x.add_(0.5)
        return torch.tanh(self.linear(x))


class InPlaceArgument(nn.Module):
    """The caller sees the change that a module made to its argument."""

    def __init__(self):
        super().__init__()
        self.first, self.changes, self.last = linear(), ChangesArgument(), linear()

    def forward(self, x):
        h = self.first(x)
        changed = self.changes(h)
        return self.last(changed + h)


def in_place_argument():
    torch.manual_seed(0)
    return case(InPlaceArgument(), {"changes": 1}, {"first": 1, "changes": 2, "last": 3})


class InPlaceGlue(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.activation, self.last = linear(), nn.ReLU(inplace=True), linear()

    def forward(self, x):
        h = self.first(x)
        h += x
        h = self.last(self.activation(h))
        h[:, : WIDTH // 2].mul_(2.0)
        return h.mul_(0.5)


def in_place_glue():
    torch.manual_seed(0)
    return case(InPlaceGlue(), {"first": 1, "activation": 1}, {"first": 1, "activation": 2, "last": 3})


class Views(nn.Module):
    """Passes views on, gets its own argument back, and uses the shape of what comes from elsewhere."""

    def __init__(self):
        super().__init__()
        self.first, self.same, self.last = Layer(), nn.Identity(), nn.Linear(WIDTH // 2, WIDTH)

    def forward(self, x):
        h = self.same(self.first(x))
        rows = h.view(h.shape[0], 2, -1).transpose(0, 1)
        left, right = rows.unbind(0)
        return self.last(left * right)


def views():
    torch.manual_seed(0)
    return case(Views(), {"first": 1}, {"first": 1, "same": 2, "last": 3})


class ReadsValue(nn.Module):
    """Which layer comes next depends on a value that is computed elsewhere."""

    def __init__(self):
        super().__init__()
        self.first, self.positive, self.negative = Layer(), Layer(), Layer()

    def forward(self, x):
        h = self.first(x)
        return self.positive(h) if h.detach().sum().item() > 0 else self.negative(h)


def value_read():
    torch.manual_seed(0)
    return case(ReadsValue(), {"first": 1, "negative": 1}, {"first": 1, "positive": 2, "negative": 3})


class Detached(nn.Module):
    """A branch without gradient through `detach`, and one under `no_grad`."""

    def __init__(self):
        super().__init__()
        self.first, self.target, self.last = Layer(), Layer(), Layer()

    def forward(self, x):
        h = self.first(x)
        with torch.no_grad():
            target = self.target(h)
        return self.last(h.detach()) + h * target


def detached_branches():
    torch.manual_seed(0)
    return case(Detached(), {"first": 1, "target": 1}, {"first": 1, "target": 2, "last": 3})


def gradients_given():
    """Backward from two outputs with gradients given for them, as `torch.autograd.backward` takes them."""
    torch.manual_seed(0)

    def step(model, batch, backward):
        output, extra = model(batch["x"])
        difference = (output - batch["y"]).detach()
        rows = len(difference)
        backward([output, extra], [difference / rows, torch.full_like(extra, 0.1 / rows)])
        return difference.square().mean()

    return case(TwoOutputs(), {"body": 1, "extra": 1}, {"body": 1, "used": 2, "extra": 3}, step)


def other_arguments():
    """A batch with a flag and a text next to the tensors; integer and Boolean tensors as arguments of modules."""
    torch.manual_seed(0)

    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = Layer(), Picks()

        def forward(self, x, rows: torch.Tensor, options: dict[str, Any]):
            h = self.first(x)
            return self.last(h, rows, rows % 2 == 0) if options["pick"] else h

    def make_batch(seed):
        return {
            **regression_batch(seed),
            "rows": torch.arange(BATCH_SIZE),
            "options": {"pick": True, "name": f"seed {seed}"},
        }

    def step(model, batch, backward):
        loss = (model(batch["x"], batch["rows"], options=batch["options"]) - batch["y"]).square().mean()
        backward(loss)
        return loss

    return case(Chooses(), {"last": 1}, {"first": 1, "last": 3}, step, make_batch)


class Picks(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(BATCH_SIZE, WIDTH), linear()

    def forward(self, x, rows, even):
        return self.linear(torch.where(even[:, None], x, self.table(rows)))


BUILDERS = (
    argument_trees,
    unused_inputs,
    forward_hooks,
    in_place_argument,
    in_place_glue,
    views,
    value_read,
    detached_branches,
    gradients_given,
    other_arguments,
)
