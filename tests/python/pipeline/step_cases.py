"""Uses of `@smp.step` that run on every rank; what they return is asserted in test_step.py."""

import collections
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from small_net import distribute, job, make_batch, make_net, plain_step, raised, train_step
from transformers.modeling_outputs import CausalLMOutput

import smp

# ---- arguments


class Pair(NamedTuple):
    left: torch.Tensor
    right: Any


class Boxes:
    """An object that knows how to cut itself; the piece is of another type."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def smp_slice(self, num_mb: int, mb: int, axis: int) -> list[Any]:
        return [num_mb, mb, axis, self.values.chunk(num_mb, axis)[mb]]


@smp.step(non_split_inputs=["whole", "table"], input_split_axes={"columns": 1, "last": -1, "boxes": 1})
def take_apart(model, rows, columns, whole, *rest, boxes, options, scalar=None, **more):
    return {
        "rows": rows, "columns": columns, "whole": whole, "rest": list(rest), "boxes": boxes, "options": options,
        "scalar": scalar, "last": more["last"], "table": more["table"]["row"], "model": model(rows).shape[0],
    }  # fmt: skip


def arguments(partitions: int) -> Any:
    """Every kind of argument. Ranks that follow pass nothing useful."""
    with job(partitions):
        model = distribute()
        x = torch.arange(32.0).view(8, 4)
        names = {"a": x + 1, "b": [x + 2, (x + 3, "text")], "pair": Pair(x, 7), "set": {x + 4}, "none": None}
        if smp.rank() == 0:
            result = take_apart(
                model,
                x,
                x,
                x,
                x + 5,
                "word",
                boxes=Boxes(x),
                options=names,
                scalar=torch.tensor(3.0),
                last=x,
                table={"row": x},
            )
        else:
            result = take_apart(None, columns="ignored")
    outputs = {key: result[key].outputs for key in ("rows", "columns", "whole", "scalar", "last", "table")}
    options = result["options"]
    return {
        **outputs,
        "model": result["model"],
        "rest": [result["rest"][0].outputs, result["rest"][1]],
        "boxes": [*result["boxes"][:3], result["boxes"][3].outputs],
        "a": options["a"].outputs,
        "b": [options["b"][0].outputs, options["b"][1][0].outputs, options["b"][1][1]],
        "pair": [type(options["pair"]).__name__, options["pair"].left.outputs, options["pair"].right],
        "set": [next(iter(part)) for part in options["set"]],
        "none": options["none"],
    }


# ---- results


@dataclass
class Report:
    """A class that is no container: it comes back as a list, with the tensors in it."""

    loss: torch.Tensor
    name: str


@smp.step
def give_all_kinds(model, x):
    logits = model(x)
    index = smp.state.microbatch
    shared = logits * 2
    return {
        "tuple": (logits, index, "text"),
        "list": [shared, shared],
        "pair": Pair(logits[0, 0], {"deep": logits.sum()}),
        "ordered": collections.OrderedDict(b=logits, a=index / 2),
        "user": collections.UserDict(a=logits),
        "output": CausalLMOutput(loss=logits.mean(), logits=logits),
        "none": None,
        "sometimes": None if index else logits.detach(),
        "varying": [index] * index,
        "report": Report(logits.sum(), "r"),
        "set": {"one", "two"},
        "input": x,
        "integers": logits.argmax(1),
        "scalar": logits.sum().item(),
    }


@smp.step
def give_nothing(model, x):
    model(x)


@smp.step
def give_function(model, x):
    model(x)
    return lambda: 0


def results(partitions: int) -> dict[str, Any]:
    """Every kind of result, and what plain PyTorch computes for the two microbatches."""
    with job(partitions):
        model = distribute()
        model.eval()
        x, _ = make_batch()
        result = give_all_kinds(model, x)
        expected = make_net().eval()(x).detach().chunk(2)
        facts = {
            "logits": all(torch.equal(a, b) for a, b in zip(result["tuple"][0].outputs, expected, strict=True)),
            "shared": [torch.equal(a, 2 * b) for out in result["list"] for a, b in zip(out.outputs, expected, strict=True)],
            "tuple": [type(result["tuple"]).__name__, *result["tuple"][1:]],
            "pair": [type(result["pair"]).__name__, torch.equal(result["pair"].left.outputs[1], expected[1][0, 0])],
            "deep": torch.equal(result["pair"].right["deep"].outputs[0], expected[0].sum()),
            "ordered": [type(result["ordered"]).__name__, list(result["ordered"]), result["ordered"]["a"]],
            "user": [type(result["user"]).__name__, type(result["user"]["a"]).__name__],
            "output": [type(result["output"]).__name__, list(result["output"].keys()), result["output"].loss is result["output"]["loss"]],
            "mean": torch.equal(result["output"].loss.reduce_mean(), (expected[0].mean() + expected[1].mean()) / 2),
            "none": result["none"],
            "sometimes": [type(item).__name__ for item in result["sometimes"]],
            "varying": result["varying"],
            "report": [(type(r).__name__, r.name, torch.equal(r.loss, e.sum())) for r, e in zip(result["report"], expected, strict=True)],
            "set": [(type(item).__name__, sorted(item)) for item in result["set"]],
            "input": torch.equal(result["input"].concat(), x),
            "integers": torch.equal(result["integers"].concat(), torch.cat(expected).argmax(1)),
            "scalar": result["scalar"] == [e.sum().item() for e in expected],
            "stack": list(result["tuple"][0].stack().shape),
            "sum": torch.equal(result["tuple"][0].reduce_sum(), expected[0] + expected[1]),
            "attached": [out.requires_grad for out in result["tuple"][0].outputs],
            "nothing": give_nothing(model, x),
            "function": raised(give_function, model, x),
        }  # fmt: skip
        assert torch.equal(give_all_kinds(model, x)["input"].concat(), x), "a step after a refused result"
    return facts


@smp.step(detach_outputs=False)
def give_attached(model, x):
    logits = model(x)
    return logits, [logits.sum()]


def attached_outputs(partitions: int) -> Any:
    """With one partition the graph of what `detach_outputs=False` returns can be used after the step."""
    with job(partitions):
        net = make_net()
        model = distribute(net)
        x, _ = make_batch()
        logits, (total,) = give_attached(model, x)
        attached = [t.requires_grad for t in [*logits.outputs, *total.outputs]]
        if partitions == 1:
            total.reduce_sum().backward()
            other = make_net()
            sum(other(part).sum() for part in x.chunk(2)).backward()
            assert torch.equal(net.first.weight.grad, other.first.weight.grad)
    return attached


# ---- ways to call


class Trainer:
    @smp.step
    def without_self(model, x, y):  # noqa: N805
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss

    @smp.step
    @staticmethod
    def outside_static(model, x):
        return model(x)

    @staticmethod
    @smp.step
    def inside_static(model, x):
        return model(x)

    def train(self, model, x, y):
        return [
            self.without_self(model, x, y),
            self.outside_static(model, x),
            self.inside_static(model, x),
            Trainer.without_self(model, x, y),
        ]


def attribute_of_a_class(partitions: int) -> Any:
    with job(partitions):
        model = distribute()
        outputs = Trainer().train(model, *make_batch())
        facts = [len(out.outputs) for out in outputs]
        facts.append(
            [Trainer.without_self.__name__, Trainer.inside_static.__doc__, type(Trainer.without_self).__name__]
        )
    return facts


def without_a_model() -> Any:
    """A step that has no model yet: every rank runs it for itself."""
    with job():
        x, _ = make_batch()
        out = smp.step(lambda x: (x + smp.rank(), smp.state.microbatch))(x)
        assert torch.equal(out[0].concat(), x + smp.rank())
    return out[1]


@smp.step
def evaluate(model, x, y):
    logits = model(x)
    return (
        F.cross_entropy(logits, y, reduction="sum").item(),
        logits.argmax(1),
        logits.requires_grad,
        torch.is_grad_enabled(),
    )


def evaluation_between_training(partitions: int) -> Any:
    """Other batch sizes under no_grad in between change nothing of the training."""
    with job(partitions):
        net, plain = make_net(), make_net()
        model = distribute(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        losses, grad_modes = [], []
        for size in (8, 2, 12):
            model.train(), plain.train()
            ours = train_step(model, *make_batch(size)).outputs
            assert all(map(torch.equal, ours, plain_step(plain, *make_batch(size))))
            optimizer.step(), other.step(), optimizer.zero_grad(), other.zero_grad()
            model.eval(), plain.eval()
            x, y = make_batch(100 + size, size)
            with torch.no_grad():
                total, classes, requires_grad, enabled = evaluate(model, x, y)
            parts = [
                F.cross_entropy(plain(a), b, reduction="sum").item()
                for a, b in zip(x.chunk(2), y.chunk(2), strict=True)
            ]
            losses.append(total == parts and torch.equal(classes.concat(), plain(x).argmax(1)))
            grad_modes += requires_grad + enabled
        equal = [torch.equal(v, plain.state_dict()[k]) for k, v in model.state_dict().items()]
    return losses, grad_modes, equal


def accumulated_gradients(partitions: int, average: bool) -> Any:
    """Three steps without zero_grad: the gradients of this rank's parameters against plain PyTorch's."""
    with job(partitions, 4):
        net, plain = make_net(), make_net()
        model = distribute(net, average_grads_across_microbatches=average)
        for seed in range(3):
            ours = train_step(model, *make_batch(seed)).outputs
            assert all(map(torch.equal, ours, plain_step(plain, *make_batch(seed), 4, average)))
        expected = dict(plain.named_parameters())
        equal = {name: torch.equal(p.grad, expected[name].grad) for name, p in model.local_named_parameters()}
        elsewhere = [p.grad is None for p in net.parameters() if not any(p is q for q in model.local_parameters())]
    return equal, elsewhere


# ---- what is refused


@smp.step
def outer(model, x, y):
    return train_step(model, x, y)


@smp.step
def updates(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    optimizer.step()


@smp.step
def backward_of_a_matrix(model, x):
    model.backward(model(x))


@smp.step
def too_many_gradients(model, x):
    out = model(x).sum()
    model.backward([out], [torch.ones(()), torch.ones(())])


@smp.step
def plain_backward(model, x):
    model(x).sum().backward()


@smp.step
def backward_by_function(model, x):
    torch.autograd.backward([model(x)], [torch.ones(len(x), 3)])


def misuse(partitions: int) -> dict[str, tuple[str, str]]:
    """What each mistake raises. Each is followed by a step that works, and in the end gradients are as without them."""
    with job(partitions):
        net, plain = make_net(), make_net()
        model = distribute(net)
        optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
        x, y = make_batch()
        attempts = {
            "odd batch": (train_step, model, x[:7], y[:7]),
            "no such axis": (smp.step(input_split_axes={"x": 2})(lambda model, x: None), model, x),
            "nested": (outer, model, x, y),
            "optimizer.step": (updates, model, optimizer, x, y),
            "missing argument": (train_step, model, x),
            "matrix": (backward_of_a_matrix, model, x),
            "too many gradients": (too_many_gradients, model, x),
            "loss.backward": (plain_backward, model, x),
            "torch.autograd.backward": (backward_by_function, model, x),
        }
        messages = {}
        for name, (call, *args) in attempts.items():
            messages[name] = raised(call, *args)
            model.zero_grad()
            net.norm.reset_running_stats(), plain.norm.reset_running_stats(), plain.zero_grad()
            assert all(map(torch.equal, train_step(model, x, y).outputs, plain_step(plain, x, y))), (
                f"a step after {name}"
            )
            expected = dict(plain.named_parameters())
            assert all(torch.equal(p.grad, expected[n].grad) for n, p in model.local_named_parameters()), (
                f"gradients after {name}"
            )
        if partitions > 1:
            messages["outside"] = raised(model, x)
            messages["backward outside"] = raised(model.backward, torch.zeros((), requires_grad=True))
        else:
            torch.manual_seed(0)
            model(x).sum().backward()  # with one partition the step is optional
    return messages


def outside_before_the_first_step() -> Any:
    with job():
        model = distribute()
        return_values = [raised(model, make_batch()[0]), raised(model.backward, torch.zeros((), requires_grad=True))]
        train_step(model, *make_batch())
    return return_values


class Calls(torch.nn.Module):
    """Calls a function of the script in its forward."""

    def __init__(self, function):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.function = function

    def forward(self, x):
        self.function()
        return x + self.weight


def misuse_in_a_module() -> Any:
    """A step, and an optimizer's step, in the forward of a module that lives on the rank that follows."""
    messages = []
    for attempt in (lambda: train_step(None, *make_batch()), lambda: optimizer.step()):  # noqa: B023
        with job():
            net = make_net()
            net.second = Calls(attempt)
            model = distribute(net)
            optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
            messages.append(raised(give_nothing, model, make_batch()[0]))
    return messages


def wrong_names() -> Any:
    """Names that are no arguments are refused when the function is decorated."""

    def takes_anything(x, **more):
        return x

    smp.step(non_split_inputs=["other"])(takes_anything)
    return [
        raised(smp.step(non_split_inputs=["model", "z"]), train_step._function),
        raised(smp.step(input_split_axes={"batch": 1}), train_step._function),
        raised(smp.step(), 3),
        raised(smp.step, "train_step"),
    ]
