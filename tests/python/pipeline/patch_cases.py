"""Patches of PyTorch on several ranks, in one that works as another version does, and in broken ones."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from small_net import Net, distribute, job, make_batch, make_net, plain_step, raised, train_step

import smp
from smp import torch_patches
from smp.placement import _MarkedInit
from smp.step_patches import STEP_PATCHES, RefusedBackward

KINDS = (RefusedBackward, _MarkedInit, *STEP_PATCHES)
PLACES = [place for kind in KINDS for place in kind.rehearsal().replacements()]


def in_place() -> dict[str, Any]:
    """What is now where smp puts something else, as the module or class itself has it."""
    found = {place: torch_patches.find(place) for place in PLACES}
    return {place: vars(owner).get(name) for place, (owner, name) in found.items()}


def is_same(before: dict[str, Any]) -> bool:
    return all(value is before[place] for place, value in in_place().items())


def checkpoint_of_2_14(
    function: Any,
    *args: Any,
    use_reentrant: bool,
    preserve_rng_state: bool = True,
    context_fn: Any = torch.utils.checkpoint.noop_context_fn,
    **kwargs: Any,
) -> Any:
    """As `torch.utils.checkpoint.checkpoint` from 2.14 on: all arguments of the generator by name, and another generator."""
    module: Any = torch.utils.checkpoint
    if use_reentrant:
        return module.CheckpointFunction.apply(function, preserve_rng_state, *args)
    generator = module._checkpoint_without_reentrant_generator_impl(
        function, args, kwargs, preserve_rng_state=preserve_rng_state, context_fn=context_fn
    )
    next(generator)
    result = function(*args, **kwargs)
    next(generator, None)
    return result


@contextlib.contextmanager
def torch_2_14(change: pytest.MonkeyPatch) -> Iterator[None]:
    """PyTorch with the checkpoints of 2.14, where it is older."""
    module: Any = torch.utils.checkpoint
    name = "_checkpoint_without_reentrant_generator"
    if not hasattr(module, f"{name}_impl"):
        old = getattr(module, name)

        def new(fn: Any, args: Any, kwargs: Any, *, preserve_rng_state: bool = True, context_fn: Any) -> Any:
            return old(fn, preserve_rng_state, context_fn, "default", False, True, *args, **kwargs)

        change.setattr(module, f"{name}_impl", new, raising=False)
        change.setattr(module, name, lambda fn, *args, **kwargs: pytest.fail("checkpoint() does not call this in 2.14"))
        change.setattr(module, "checkpoint", checkpoint_of_2_14)
        change.setattr("smp.step_patches._imported_checkpoint", checkpoint_of_2_14)
    change.setattr(torch_patches, "_verified", set())
    yield


class CheckpointedNet(Net):
    """Its second half is two regions, by the function of PyTorch as it was when the model was made, and as it is."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.imported = torch.utils.checkpoint.checkpoint

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.imported(self.norm, torch.tanh(self.first(x)), use_reentrant=self.use_reentrant)
        return torch.utils.checkpoint.checkpoint(
            self.second, x, use_reentrant=self.use_reentrant, preserve_rng_state=False
        )


def regions(simulated: bool, use_reentrant: bool) -> tuple[bool, list[str]]:
    """Are gradients those of plain PyTorch, and which modules ran again here?"""
    with pytest.MonkeyPatch.context() as change, torch_2_14(change) if simulated else contextlib.nullcontext(), job(2):
        others = {id(region) for region in smp.checkpointing.report().regions}
        torch.manual_seed(0)
        net, plain = CheckpointedNet(use_reentrant), make_net()
        model = distribute(net)
        train_step(model, *make_batch())
        plain_step(plain, *make_batch())
        expected = dict(plain.named_parameters())
        same = all(torch.equal(p.grad, expected[name].grad) for name, p in model.local_named_parameters())
        return same, [r.name for r in smp.checkpointing.report().regions if r.recomputes and id(r) not in others]


def broken_then_mended() -> dict[str, Any]:
    """A model in a PyTorch that has lost the last patch, and another one when it has it again."""
    with job(2):
        before = in_place()
        with pytest.MonkeyPatch.context() as change:
            change.setattr(torch_patches, "_verified", set())
            change.setattr(torch.nn.utils, "spectral_norm", lambda module: module)
            net = make_net()
            kind, message = raised(distribute, net)
            facts: dict[str, Any] = {"kind": kind, "message": message, "taken back": is_same(before)}
            facts["no model"] = smp.state.model is None
            facts["untouched"] = "forward" not in vars(net.first) and all(p.isfinite().all() for p in net.parameters())
        model = distribute(make_net())
        train_step(model, *make_batch())
        now = in_place()
        facts["in force"] = [place for place in PLACES if now[place] is not before[place]]
    facts["after close"] = is_same(before)
    return facts
