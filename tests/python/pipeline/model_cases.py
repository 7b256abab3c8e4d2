"""Uses of `smp.DistributedModel` that run on every rank; what they return is asserted in test_model.py."""

import copy
import io
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import models
import torch
from small_net import Net, distribute, job, make_batch, make_net, plain_step, raised, train_step
from torch import nn

import smp
from smp import _C


def names(module: Any, local: bool = False) -> dict[str, list[str]]:
    """Names of modules, parameters and buffers."""
    start = "local_named_" if local else "named_"
    return {
        kind: [name for name, _ in getattr(module, start + kind)()] for kind in ("modules", "parameters", "buffers")
    }


def small_job(partitions: int) -> tuple[nn.Module, smp.DistributedModel]:
    """The net placed by hand, before its first step."""
    net = make_net()
    return net, distribute(net)


def gpt2_job(partitions: int) -> tuple[nn.Module, smp.DistributedModel]:
    """GPT-2, whose embedding and head share a parameter, partitioned automatically."""
    net = models.BUILDERS["hugging_face_gpt2"]().model
    return net, smp.DistributedModel(net)


JOBS = {"small": small_job, "gpt2": gpt2_job}


def names_everywhere(kind: str, partitions: int) -> dict[str, Any]:
    with job(partitions, auto_partition=kind == "gpt2"):
        net, model = JOBS[kind](partitions)
        plain = make_net() if kind == "small" else models.BUILDERS["hugging_face_gpt2"]().model
        before = model.partitioned
        local = names(model, local=True)
        wrapped = names(model)
        result = {
            "before": before,
            "after": model.partitioned,
            "local": local,
            "plain": names(plain),
            "same": {kind: wrapped[kind] == names(plain)[kind] for kind in ("parameters", "buffers")},
            "user's own": model.get_module() is net and all(map(lambda a, b: a is b, model.parameters(), net.parameters())),
            "local objects": [
                all(dict(net.named_modules())[n] is m for n, m in model.local_named_modules()),
                list(model.local_modules()) == [m for _, m in model.local_named_modules()],
                all(a is b for a, (_, b) in zip(model.local_parameters(), model.local_named_parameters(), strict=True)),
                all(a is b for a, (_, b) in zip(model.local_buffers(), model.local_named_buffers(), strict=True)),
            ],
            "keys": list(model.state_dict()) == list(plain.state_dict()),
            "values": all(torch.equal(v, plain.state_dict()[k]) for k, v in model.state_dict().items()),
            "chained": model.eval() is model and model.train() is model and not model.eval().module.training,
        }  # fmt: skip
    return result


# ---- state


def trained(model: smp.DistributedModel, net: nn.Module, steps: int = 1) -> None:
    """Plain steps of SGD on this rank's parameters."""
    optimizer = smp.DistributedOptimizer(torch.optim.SGD(net.parameters(), lr=0.1))
    for seed in range(steps):
        train_step(model, *make_batch(seed))
        optimizer.step()
        optimizer.zero_grad()


def plain_weights(steps: int = 1) -> dict[str, torch.Tensor]:
    plain = make_net()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for seed in range(steps):
        plain_step(plain, *make_batch(seed))
        optimizer.step()
        optimizer.zero_grad()
    return plain.state_dict()


def equals(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return list(ours) == list(theirs) and all(torch.equal(value, theirs[key]) for key, value in ours.items())


def state_round_trips(partitions: int) -> dict[str, Any]:
    """Weights of a trained model, taken out and put into new models in every way."""
    facts: dict[str, Any] = {}
    expected, untrained = plain_weights(), make_net(1).state_dict()
    with job(partitions):
        net, model = small_job(partitions)
        trained(model, net)
        whole, partial = copy.deepcopy(model.state_dict()), copy.deepcopy(model.local_state_dict())
        facts["whole"] = equals(whole, expected)
        facts["prefix"] = equals(model.state_dict(prefix="a."), {f"a.{key}": value for key, value in expected.items()})
        facts["metadata"] = whole._metadata == make_net().state_dict()._metadata
        facts["rank 0 only"] = len(model.state_dict(gather_to_rank0=True))
        facts["partial"] = [key for key in partial if not key.startswith("_")]
        facts["mark"] = partial["_smp_is_partial"]

        model.load_state_dict(untrained)  # into a partitioned model
        facts["replaced"] = equals(model.state_dict(), untrained)
        facts["loaded"] = str(model.load_state_dict(partial, same_partition_load=True))
        facts["same partition"] = equals(model.state_dict(), expected)
        model.load_state_dict(untrained)
        model.load_state_dict(partial)
        facts["merged"] = equals(model.state_dict(), expected)

    for load, saved in (("whole", whole), ("partial", partial)):
        with job(partitions):
            net = make_net(1)
            model = distribute(net)
            model.load_state_dict(saved)  # before the model is partitioned
            facts[f"{load} before the first step"] = equals(model.state_dict(), expected)
            train_step(model, *make_batch())

    with job(partitions):  # another placement than the one under which it was saved
        net = make_net(1)
        smp.set_partition(net, partitions - 1)
        smp.set_partition(net.second, 0)
        model = smp.DistributedModel(net)
        model.load_state_dict(partial)
        facts["other placement"] = equals(model.state_dict(), expected)
        facts["other partial"] = [key for key in model.local_state_dict() if not key.startswith("_")]
    return facts


def state_errors(partitions: int) -> dict[str, Any]:
    """What load_state_dict refuses, before and after the first step; nothing waits for a rank that found no mistake."""
    facts = {}
    good = make_net().state_dict()
    bad = {
        "missing": {key: value for key, value in good.items() if key != "second.bias"},
        "unexpected": {**good, "third.bias": torch.zeros(1)},
        "shape": {**good, "second.bias": torch.zeros(7)},
    }
    with job(partitions):
        _, model = small_job(partitions)
        for when in ("before", "after"):
            for name, entries in bad.items():
                facts[f"{name} {when}"] = raised(model.load_state_dict, entries)
            keys = model.load_state_dict({**bad["missing"], "third.bias": torch.zeros(1)}, strict=False)
            facts[f"lenient {when}"] = (list(keys.missing_keys), list(keys.unexpected_keys))
            train_step(model, *make_batch())
        local = model.local_state_dict()
        local.pop(next(iter(local)))
        facts["partial"] = raised(model.load_state_dict, local, same_partition_load=True)
        facts["unhurt"] = (
            equals(dict(model.named_parameters()), dict(make_net().named_parameters())) if partitions == 1 else True
        )
    return facts


# ---- parameters that live elsewhere

READS = {
    "sum": lambda p: p.sum(),
    "repr": repr,
    "print": lambda p: print(p, file=io.StringIO()),
    "numpy": lambda p: p.detach().numpy().sum(),
    "data": lambda p: p.data.tolist(),
    "clone": lambda p: p.clone(),
    "tolist": lambda p: p.tolist(),
    "compare": lambda p: p == 1,
    "matmul": lambda p: torch.ones(4, 4) @ p,
    "to": lambda p: p.to(torch.float64),
    "save": lambda p: torch.save(p, io.BytesIO()),
    "save data": lambda p: torch.save({"p": p.data}, io.BytesIO()),
    "pickle": lambda p: pickle.dumps(p),
    "deepcopy": copy.deepcopy,
    "isnan": lambda p: torch.isnan(p).any(),
    "data_ptr": lambda p: p.data_ptr(),
    "fill": lambda p: p.data.fill_(1),
    "copy into": lambda p: p.data.copy_(torch.ones(4, 4)),
    "init": nn.init.zeros_,
    "view": lambda p: p.view(-1).tolist(),
    "transposed": lambda p: p.T.sum(),
    "item": lambda p: p[0, 0].item(),
    "float()": lambda p: float(p.detach()[0, 0]),
    "slice": lambda p: p[:2].sum(),
    "index": lambda p: p.data[0].add_(1),
    "storage": lambda p: p.untyped_storage()[0],
}


def reads_of_a_parameter_elsewhere() -> dict[str, Any]:
    """What each read of `first.weight` raises on rank 1, where it does not live; it is 4 x 4, on partition 0."""
    with job():
        net = make_net()
        weight = net.first.weight
        facts: dict[str, Any] = {"holds memory": [_C.holds_memory(weight)]}
        model = distribute(net)
        train_step(model, *make_batch())
        facts["holds memory"].append(_C.holds_memory(weight))
        facts["kept"] = [
            net.first.weight is weight,
            tuple(weight.shape),
            weight.dtype,
            weight.requires_grad,
            weight.numel(),
            weight.stride(),
        ]
        facts["gradient"] = weight.grad is not None
        if smp.rank() == 1:
            facts["reads"] = {name: raised(read, weight) for name, read in READS.items()}
            facts["module"] = raised(lambda: torch.save(net.state_dict(), io.BytesIO()))
        # Neither clipping nor moving the model to where it is reads it.
        nn.utils.clip_grad_norm_(model.local_parameters(), 1.0)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        model.to("cpu").zero_grad()
        train_step(model, *make_batch())
    return facts


def memory_given_back() -> float:
    """By how many MiB this rank's resident memory fell when a parameter of 256 MiB on partition 0 was placed."""

    def resident_mib() -> float:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

    with job():
        net = nn.Sequential(nn.Linear(8192, 8192, bias=False), nn.Linear(8192, 4))
        model = smp.DistributedModel(net)
        smp.set_partition(net[0], 0)
        smp.set_partition(net[1], 1)
        before = resident_mib()
        list(model.local_parameters())  # partitions the model
        return before - resident_mib()


# ---- what is refused


def more_than_one_replica() -> tuple[str, str]:
    with job(1):
        return_value = raised(smp.DistributedModel, make_net())
    return return_value


def second_model(partitions: int) -> list[Any]:
    """One model for an init; after shutdown another can follow, of the same module even, once it has its weights back."""
    facts: list[Any] = []
    with job(partitions):
        net, model = small_job(partitions)
        facts.append(raised(smp.DistributedModel, make_net()))
        train_step(model, *make_batch())
        facts.append(raised(smp.set_partition, net.first, 0))
        weights = model.state_dict()
    own_forward = ["forward" in module.__dict__ for module in net.modules()]
    with job(partitions):
        again = make_net(5)
        model = distribute(again)
        model.load_state_dict(weights)
        train_step(model, *make_batch())
    return [*facts, any(own_forward)]


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(4, 4)


class Longer(Net):
    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.ReLU()


class Renamed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.Tanh()


class RenamedElsewhere(Net):
    def __init__(self) -> None:
        super().__init__()
        self.nonlinearity = nn.Tanh()


def models_that_differ() -> dict[str, tuple[str, str]]:
    """Rank 1 builds something else; both ranks say so, and the launch goes on."""

    def frozen() -> Net:
        net = make_net()
        net.first.bias.requires_grad_(False)
        return net

    def double() -> Net:
        return make_net().double()

    cases = {
        "shape": (Net, Wider),
        "more": (Net, Longer),
        "name": (Renamed, RenamedElsewhere),
        "frozen": (Net, frozen),
        "dtype": (Net, double),
    }
    messages = {}
    for name, builders in cases.items():
        with job():
            messages[name] = raised(train_step, distribute(builders[smp.rank()]()), *make_batch())
    with job():
        net = make_net()
        smp.set_partition(net.first, smp.rank())
        messages["placement"] = raised(train_step, distribute(net), *make_batch())
    return messages


# ---- one partition


def one_partition() -> dict[str, Any]:
    """Threads of the process before init and after training, and what the model's modules look like then."""

    def threads() -> tuple[int, int]:
        return len(os.listdir("/proc/self/task")), threading.active_count()

    plain_step(make_net(), *make_batch())  # whatever threads plain PyTorch starts
    before = threads()
    with job(1):
        net, model = small_job(1)
        trained(model, net)
        model(make_batch()[0]).sum().backward()
        facts = {
            "threads": [before, threads()],
            "forward": [m.forward.__func__ is type(m).forward and "forward" not in m.__dict__ for m in net.modules()],
            "engine": model._runtime,
            "transport": smp.state.transport,
            "partitioned": model.partitioned,
            "remote tensors": smp._C.is_remote(model(make_batch()[0])),
        }
    return facts
