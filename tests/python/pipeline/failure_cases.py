"""Steps and scripts that fail. As a script, run by a launcher: `failure_cases.py NAME` fails as NAME says."""

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from small_net import Net, distribute, job, make_batch, make_net, plain_step, train_step
from torch import nn

import smp
from smp.launchers import find_launch

MICROBATCHES = 4
STALL_S = 3


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("bad gradient")


class UnpicklableError(Exception):
    """Its arguments do not fit its constructor, so it can't be built again on another rank."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what} at {where}")


class Fails(nn.Linear):
    """A linear layer that fails in its third call, where `how` says."""

    how = ""
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3 and self.how == "forward":
            raise ValueError("too much")
        if self.calls == 3 and self.how == "unpicklable":
            raise UnpicklableError("broken", "home")
        if self.calls == 3 and self.how == "exit":
            sys.exit(7)
        if self.calls == 3 and self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.calls == 3 and self.how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        if self.calls == 3 and self.how == "hang":
            time.sleep(3600)
        if self.calls == 3 and self.how == "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
        if self.how == "slow":
            time.sleep(0.5)
        out = super().forward(x)
        return FailsInBackward.apply(out) if self.calls == 3 and self.how == "backward" else out


class FailingNet(Net):
    """`first` lives on partition 0 and `second` on partition 1."""

    def __init__(self) -> None:
        super().__init__()
        self.first.__class__ = self.second.__class__ = Fails


def make_failing_net() -> FailingNet:
    torch.manual_seed(0)
    return FailingNet()


@smp.step
def fails_itself(model, x, y):
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    if smp.state.microbatch == 2:
        raise LookupError("no such thing")
    return loss


@smp.step
def swallows(model, x, y):
    """Catches what a module raises, as code of models may do: the step fails all the same."""
    try:
        loss = F.cross_entropy(model(x), y)
        model.backward(loss)
        return loss.item()
    except Exception:
        return 0.0


def recoverable(how: str, partition: int | None) -> dict[str, Any]:
    """A step that fails, caught on every rank, and what follows: three steps that must equal plain PyTorch's."""
    step, size = train_step, 8
    with job(2, MICROBATCHES):
        net = make_failing_net()
        model = distribute(net)
        if partition is not None:
            (net.first, net.second)[partition].how = how.removesuffix(" swallowed")
        if how.endswith("swallowed"):
            step = swallows
        if how == "step function":
            step = fails_itself
        if how == "odd batch":
            size = 7
        x, y = make_batch()
        facts: dict[str, Any] = {}
        try:
            step(model, x[:size], y[:size])
            facts["error"] = None
        except BaseException as error:
            facts["error"] = [type(error).__name__, str(error), "\n".join(getattr(error, "__notes__", []))]
        net.first.how = net.second.how = ""
        model.zero_grad()
        net.norm.reset_running_stats()
        plain = make_net()
        optimizer, other = (
            smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1)),
            torch.optim.SGD(plain.parameters(), lr=0.1),
        )
        losses = []
        for seed in range(3):
            ours = train_step(model, *make_batch(seed)).outputs
            losses.append(all(map(torch.equal, ours, plain_step(plain, *make_batch(seed), MICROBATCHES))))
            optimizer.step(), other.step()
            optimizer.zero_grad(), other.zero_grad()
        facts["losses"] = losses
        facts["weights"] = [torch.equal(value, plain.state_dict()[key]) for key, value in model.state_dict().items()]
        for _ in range(100):
            smp.barrier()
            left = model._runtime.engine.state()
            if all(smp.allgather(left["values"] == left["calls"] == left["frames"] == 0, smp.WORLD)):
                break
        facts["left"] = left
    return facts


@smp.step
def thinks(model, x, y):
    """A step function that does something else for longer than `stall_timeout`."""
    if smp.state.microbatch == 1:
        time.sleep(2.5)
    loss = F.cross_entropy(model(x), y)
    model.backward(loss)
    return loss


def slow_but_not_stalled() -> list[bool]:
    """Long pauses of partition 0, in a step and between steps, under a short `stall_timeout`: are the losses right?"""
    with job(2, MICROBATCHES, stall_timeout=1):
        model, plain, facts = distribute(), make_net(), []
        for seed in range(2):
            if smp.rank() == 0:
                time.sleep(2.5)
            ours = thinks(model, *make_batch(seed)).outputs
            facts.append(all(map(torch.equal, ours, plain_step(plain, *make_batch(seed), MICROBATCHES))))
    return facts


def only_here() -> Any:
    if smp.rank() != 0:
        raise EOFError("nothing to build it from")
    return OnlyHere()


class OnlyHere:
    """Can be unpickled on rank 0 alone."""

    def __reduce__(self) -> Any:
        return only_here, ()


@smp.step
def gives_what_only_rank_0_can_build(model, x):
    return OnlyHere()


def result_of_rank_0_alone() -> dict[str, Any]:
    """A step whose result the other ranks can't build, twice, and a good step after each: rank 0 has left the step by then."""
    with job(2, MICROBATCHES):
        model, plain, facts = distribute(), make_net(), {"errors": [], "losses": []}
        for seed in range(2):
            try:
                gives_what_only_rank_0_can_build(model, make_batch()[0])
                facts["errors"].append(None)
            except EOFError as error:
                facts["errors"].append([str(error), *error.__notes__])
            ours = train_step(model, *make_batch(seed)).outputs
            facts["losses"].append(all(map(torch.equal, ours, plain_step(plain, *make_batch(seed), MICROBATCHES))))
    return facts


# ---- scripts that end


@smp.step
def other_step(model, x, y):
    return F.cross_entropy(model(x), y)


def tell_the_test(what: str) -> None:
    os.write(_TEST, f"{what}\n".encode())


@contextmanager
def model_of_the_script(**how: str) -> Iterator[smp.DistributedModel]:
    """A distributed model; `first="forward"` says which layer fails how."""
    smp.init({"partitions": 2, "microbatches": MICROBATCHES, "auto_partition": False, "stall_timeout": STALL_S})
    net = make_failing_net()
    for name, value in how.items():
        getattr(net, name).how = value
    model = distribute(net)
    tell_the_test("start")
    yield model
    print("reached the end")


def failing_module(first: str = "", second: str = "") -> Callable[[], None]:
    def script() -> None:
        with model_of_the_script(first=first, second=second) as model:
            for seed in range(2000):
                train_step(model, *make_batch(seed))

    return script


def failing_step_function() -> None:
    with model_of_the_script() as model:
        fails_itself(model, *make_batch())


def odd_batch() -> None:
    with model_of_the_script() as model:
        train_step(model, *make_batch(0, 7))


def different_steps() -> None:
    with model_of_the_script() as model:
        (train_step, other_step)[smp.rank()](model, *make_batch())


def one_step_more(rank: int) -> Callable[[], None]:
    def script() -> None:
        with model_of_the_script() as model:
            for _ in range(2 if smp.rank() == rank else 1):
                train_step(model, *make_batch())

    return script


def leaves_early(rank: int, leave: Callable[[], Any]) -> Callable[[], None]:
    def script() -> None:
        with model_of_the_script() as model:
            train_step(model, *make_batch())
            if smp.rank() == rank:
                leave()
            for _ in range(2000):
                train_step(model, *make_batch())

    return script


def calls_alone(
    rank: int, before_the_first_step: bool, call: Callable[[smp.DistributedModel], Any]
) -> Callable[[], None]:
    """`rank` makes a collective call that the other rank, whose script ends, never makes."""

    def script() -> None:
        with model_of_the_script() as model:
            if not before_the_first_step:
                train_step(model, *make_batch())
            if smp.rank() == rank:
                call(model)

    return script


def first_step(model: smp.DistributedModel) -> None:
    train_step(model, *make_batch())


def raise_outside() -> None:
    raise EOFError("the data ended")


def wrong_at_once(config: dict[str, int]) -> Callable[[], None]:
    """A configuration that each rank finds wrong by itself, however late it starts: launchers end the others when one has failed, so
    each waits until both have said why.
    """

    def script() -> None:
        tell_the_test("start")
        try:
            smp.init(config)
        except smp.SMPError:
            traceback.print_exc()
            words = [Path(sys.argv[2], f"rank{rank}") for rank in range(2)]
            end = time.monotonic() + 60
            while time.monotonic() < end and not all(said.exists() and said.stat().st_size > 0 for said in words):
                time.sleep(0.01)
            raise

    return script


def interrupted() -> None:
    with model_of_the_script(second="slow") as model:
        train_step(model, *make_batch())
        tell_the_test("interrupt")
        for _ in range(2000):
            train_step(model, *make_batch())


SCRIPTS: dict[str, Callable[[], None]] = {
    "forward on rank 0": failing_module(first="forward"),
    "forward on rank 1": failing_module(second="forward"),
    "backward on rank 0": failing_module(first="backward"),
    "backward on rank 1": failing_module(second="backward"),
    "step function": failing_step_function,
    "odd batch": odd_batch,
    "different steps": different_steps,
    "rank 0 has one step more": one_step_more(0),
    "rank 1 has one step more": one_step_more(1),
    "rank 0 exits": leaves_early(0, lambda: sys.exit(0)),
    "rank 1 exits": leaves_early(1, lambda: sys.exit(0)),
    "rank 1 exits with 3": leaves_early(1, lambda: sys.exit(3)),
    "rank 1 raises between steps": leaves_early(1, raise_outside),
    "rank 0 alone asks for the weights": calls_alone(0, False, lambda model: model.state_dict()),
    "rank 1 alone asks for the weights": calls_alone(1, False, lambda model: model.state_dict()),
    "rank 0 alone begins the first step": calls_alone(0, True, first_step),
    "rank 1 alone begins the first step": calls_alone(1, True, first_step),
    "wrong configuration": wrong_at_once({"partitions": 2, "microbatches": 0}),
    "wrong number of ranks": wrong_at_once({"partitions": 3}),
    "rank 0 is killed": failing_module(first="kill"),
    "rank 1 is killed": failing_module(second="kill"),
    "rank 0 is stopped": failing_module(first="stop"),
    "rank 1 is stopped": failing_module(second="stop"),
    "rank 0 hangs": failing_module(first="hang"),
    "rank 1 hangs": failing_module(second="hang"),
    "rank 0 is interrupted": failing_module(first="interrupt"),
    "rank 1 is interrupted": failing_module(second="interrupt"),
    "interrupt": interrupted,
}

if __name__ == "__main__":
    # What a rank writes goes to a file of its own, since launchers mix their lines.
    log = os.open(f"{sys.argv[2]}/rank{find_launch().rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    _TEST = os.dup(1)
    os.dup2(log, 1)
    os.dup2(log, 2)
    torch.set_num_threads(1)
    SCRIPTS[sys.argv[1]]()
