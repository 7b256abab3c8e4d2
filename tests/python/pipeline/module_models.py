"""Models that do what models do: fill buffers, change arguments, give arguments back, differentiate inside."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

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


class NormsWeight(Model):
    def make_middle(self) -> None:
        self.middle = torch.nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))


class NormsSpectrum(Model):
    def make_middle(self) -> None:
        self.middle = torch.nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


class Prunes(Model):
    def make_middle(self) -> None:
        self.middle = nn.Linear(WIDTH, WIDTH)
        prune.random_unstructured(self.middle, "weight", 0.5)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum()


class FunctionInGlue(Model):
    """The gradient of the model's own parameter comes from where the activations are."""

    def make_middle(self) -> None:
        self.middle = Layer()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(Scaled.apply(self.middle(self.first(x)), self.scale))


class HooksParameters(FunctionInGlue):
    """Hooks that a script sets on parameters before it trains."""

    def make_middle(self) -> None:
        super().make_middle()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient * 2)


class HooksInForward(FunctionInGlue):
    """Sets the first hook of a parameter in the middle of a step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.scale._backward_hooks:
            self.scale.register_hook(lambda gradient: gradient * 2)
        return super().forward(x)


class PacksInGlue(Model):
    def make_middle(self) -> None:
        self.middle = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sequences = self.first(x).unsqueeze(0).expand(2, -1, -1)
        packed = pack_padded_sequence(sequences, torch.tensor([3, 2]), batch_first=True)
        out, _ = pad_packed_sequence(self.middle(packed)[0], batch_first=True)
        return self.last(out.sum(0))


class NormsTied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle = nn.Embedding(WIDTH, WIDTH, max_norm=0.5), nn.Linear(WIDTH, WIDTH, bias=False)
        self.middle.weight = self.first.weight
        self.last = Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x.argmax(-1))))


class Nests(Model):
    """An encoder that makes nested tensors in its own code."""

    def make_middle(self) -> None:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, dropout=0, batch_first=True)
        self.middle = nn.TransformerEncoder(layer, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).unsqueeze(0)
        padding = torch.tensor([[False] * (h.shape[1] - 1) + [True]])
        return self.last(self.middle(h, src_key_padding_mask=padding).squeeze(0))


class HasScale(Model):
    def make_middle(self) -> None:
        self.middle = Layer()
        self.scale = nn.Parameter(torch.tensor(1.5))


class SetsInContainer(Model):
    """Its container, away from partition 0, sets what a child elsewhere does not see."""

    def make_middle(self) -> None:
        self.middle = SetsInside()


class SetsInside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Layer(), Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.one.scale = 2.0 * len(x)
        return self.two(self.one(x))


class TwoNames(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = 2 * x
        return y, y.view(-1)


class NamesMemoryTwice(Model):
    def make_middle(self) -> None:
        self.middle = FlattensInside()
        self.flatten, self.two_names = Flattens(), TwoNames()


class Appends(Layer):
    def forward(self, x: torch.Tensor, seen: list[torch.Tensor]) -> torch.Tensor:
        seen.append(x)
        return super().forward(x)


class KeepsList(Model):
    def make_middle(self) -> None:
        self.middle = Appends()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x), []))


MODELS = {
    model.__name__: model
    for model in (
        FillsBuffer, FillsWithOwn, FillsInContainer, ChangesInContainer, GivesArgumentBack, UsesReturnedBuffer, Complex, GradientInside, Recurrent,
        UsesParameters, ChangesViews, ViewsOfGradients, StridesOfGradients,
        NormsWeight, NormsSpectrum, Prunes, FunctionInGlue, HooksParameters, HooksInForward, PacksInGlue,
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
