"""Functions of PyTorch that smp replaces: a PyTorch that goes past the replacement is an error, and all of it is taken back."""

import contextlib
import functools
import re
import subprocess
import sys
import threading
import warnings
from typing import Any

import patch_cases
import pytest
import torch
import torch.utils.checkpoint
from patch_cases import KINDS, PLACES, in_place, is_same
from small_net import distribute, job
from torch import nn
from torch.nn.utils import clip_grad, prune
from torch.utils.checkpoint import checkpoint

import smp
from smp import step_patches, torch_patches
from smp.placement import _MarkedInit
from smp.step_patches import STEP_PATCHES, RefusedBackward
from smp.torch_patches import Patches, verify
from smp.torch_versions import place_of_checkpoint_generator
from smp.weight_hooks import WeightHooks

GENERATOR = place_of_checkpoint_generator()
# Functions of modules, and the classes of the others.
NAMES = dict.fromkeys(re.match(r"[\w.]+:\w+", place)[0] for place in PLACES)

INIT = "torch.nn:Module.__init__"  # replaced in contexts of smp.partition only


@pytest.fixture(autouse=True)
def nothing_stays(monkeypatch):
    """Nothing is verified yet, and nothing is patched afterwards."""
    monkeypatch.setattr(torch_patches, "_verified", set())
    before = in_place()
    yield
    monkeypatch.undo()
    assert is_same(before), "a patch was left behind"


def norm_only(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False):
    return clip_grad._get_total_norm([p.grad for p in parameters], norm_type, error_if_nonfinite)


def clip_only(parameters, max_norm, norm_type=2.0, error_if_nonfinite=False):
    norm = torch.ones(())
    clip_grad._clip_grads_with_norm_(parameters, max_norm, norm)
    return norm


def other_order(outputs, inputs):
    return torch.autograd._engine_run_backward((outputs,), (inputs,), None, False, False, True, accumulate_grad=False)


def plain_call(function, *args, use_reentrant=None, preserve_rng_state=True):
    return function(*args)


def plain_if(is_plain):
    """`checkpoint`, but one kind of it only calls the function."""

    def call(function, use_reentrant, preserve_rng_state):
        made = plain_call if use_reentrant is is_plain else checkpoint
        return made(function, use_reentrant=use_reentrant, preserve_rng_state=preserve_rng_state)

    return call


def always_preserves(function, use_reentrant, preserve_rng_state):
    return checkpoint(function, use_reentrant=use_reentrant)


def with_own(name):
    """`__getattribute__` of tensors that have their own function of the name."""
    own = getattr(torch._C.TensorBase, name)

    def get(tensor, wanted):
        return functools.partial(own, tensor) if wanted == name else object.__getattribute__(tensor, wanted)

    return get


def hooked_otherwise(module, *args):
    module.register_forward_pre_hook(lambda *_: None)


class NeverInitialised(type):
    def __call__(cls, *args, **kwargs):
        return None


# What is changed in PyTorch, to what, and the public function and a private one that the error then names.
BREAKS = {
    "backward": (torch.Tensor, "backward", lambda t: None, "torch.Tensor.backward", "torch.autograd.backward"),
    "grad": (torch.autograd, "grad", lambda *_: (), "torch.autograd.grad", "torch.autograd._engine_run_backward"),
    "grad, other arguments": (
        torch.autograd, "grad", other_order, "torch.autograd.grad", "torch.autograd._engine_run_backward",
    ),
    "norm": (nn.utils, "clip_grad_norm_", clip_only, "torch.nn.utils.clip_grad_norm_", "clip_grad._get_total_norm"),
    "clip": (nn.utils, "clip_grad_norm_", norm_only, "torch.nn.utils.clip_grad_norm_", "_clip_grads_with_norm_"),
    "checkpoint, not reentrant": (
        torch.utils.checkpoint, "checkpoint", plain_if(False), "checkpoint(use_reentrant=False)", "_checkpoint_without",
    ),
    "checkpoint, reentrant": (
        torch.utils.checkpoint, "checkpoint", plain_if(True), "checkpoint(use_reentrant=True)", "CheckpointFunction",
    ),
    "checkpoint, imported by name": (
        step_patches, "_imported_checkpoint", plain_call, "checkpoint(use_reentrant=False)", "_checkpoint_without",
    ),
    "checkpoint, an argument": (
        torch.utils.checkpoint, "checkpoint", always_preserves, "(use_reentrant=False)", "_checkpoint_without",
    ),
    "random state": (
        torch, "get_rng_state", lambda: torch.zeros(8), "torch.get_rng_state", "torch.random.default_generator",
    ),
    "set random state": (
        torch, "set_rng_state", lambda new: None, "torch.set_rng_state", "torch.random.default_generator",
    ),
    "text": (torch.Tensor, "__repr__", lambda t: "", "repr of a torch.Tensor", "torch._tensor_str._str"),
    "new_tensor": (
        torch.Tensor, "__getattribute__", with_own("new_tensor"), "torch.Tensor.new_tensor", "torch.Tensor.new_tensor",
    ),
    "new": (torch.Tensor, "__getattribute__", with_own("new"), "torch.Tensor.new is", "new_tensor, torch.Tensor.new"),
    "weight_norm": (
        torch_patches.find("torch.nn.utils.weight_norm:WeightNorm.apply")[0], "apply", staticmethod(hooked_otherwise),
        "torch.nn.utils.weight_norm", "WeightNorm.__call__",
    ),
    "spectral_norm": (
        nn.utils, "spectral_norm", hooked_otherwise, "torch.nn.utils.spectral_norm", "SpectralNorm.__call__",
    ),
    "prune": (prune, "identity", hooked_otherwise, "torch.nn.utils.prune.identity", "BasePruningMethod.__call__"),
    "modules": (nn, "Module", NeverInitialised("Module", (), {}), "torch.nn.Module()", "torch.nn.Module.__init__"),
}  # fmt: skip


def refusal(*kinds: type[torch_patches.Patch]) -> str:
    with pytest.raises(smp.SMPUsageError) as caught:
        verify(*kinds)
    assert isinstance(caught.value, smp.SMPError)
    return str(caught.value)


@pytest.mark.parametrize("name", BREAKS)
def test_a_function_that_goes_another_way_is_an_error_that_names_it(monkeypatch, name):
    owner, attribute, other, public, private = BREAKS[name]
    before = in_place()
    with monkeypatch.context() as change:
        change.setattr(owner, attribute, other)
        message = refusal(*KINDS)
    assert message.startswith(f"torch {torch.__version__} does not call") and "Install a torch" in message
    assert public in message.partition(" when ")[2] and private in message.partition(" when ")[0]
    assert is_same(before)
    verify(*KINDS)  # nothing of the failed check stays


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_pytorch_does_not_have_is_an_error_that_names_it(monkeypatch, name):
    kind, place = next((kind, p) for kind in KINDS for p in kind.rehearsal().replacements() if p.startswith(name))
    module, _, attribute = name.partition(":")
    with monkeypatch.context() as change:
        # Without it an older one would be taken, which is another error.
        change.setattr(step_patches, "place_of_checkpoint_generator", lambda: GENERATOR)
        change.delattr(sys.modules[module], attribute)
        message = refusal(kind)
    assert message.startswith(f"torch {torch.__version__} has no {place.replace(':', '.')}, which smp replaces")
    assert "Install a torch" in message


def test_hooks_without_a_call_of_their_own_are_an_error(monkeypatch):
    with monkeypatch.context() as change:
        change.delattr(prune.BasePruningMethod, "__call__")
        assert "has no torch.nn.utils.prune.BasePruningMethod.__call__" in refusal(WeightHooks)


def test_one_patch_that_fails_takes_back_those_before_it(monkeypatch):
    before = in_place()
    verify(*STEP_PATCHES)
    monkeypatch.delattr(prune.BasePruningMethod, "__call__")
    with pytest.raises(smp.SMPUsageError, match=r"has no .*BasePruningMethod\.__call__"):
        Patches(RefusedBackward(lambda: False), *step_patches.step_patches(repr, (), WeightHooks(bool)))
    monkeypatch.undo()
    assert is_same(before)


def test_a_model_of_one_partition_needs_no_more_than_it_replaces(monkeypatch):
    with job(1):
        with monkeypatch.context() as change:
            change.setattr(torch.Tensor, "backward", lambda t: None)
            with pytest.raises(smp.SMPUsageError, match=r"torch\.Tensor\.backward"):
                distribute()
        assert smp.state.model is None
        monkeypatch.delattr(clip_grad, "_get_total_norm")
        distribute()
        monkeypatch.undo()


def test_a_model_in_a_broken_pytorch_is_refused_before_it_is_touched(clusters):
    for facts in clusters(2).run(patch_cases.broken_then_mended):
        assert facts["kind"] == "SMPUsageError"
        assert f"torch {torch.__version__} " in facts["message"] and "spectral_norm" in facts["message"]
        assert facts["taken back"] and facts["no model"] and facts["untouched"]
        assert facts["in force"] == [place for place in PLACES if place != INIT] and facts["after close"]


def test_closing_gives_pytorch_its_own_functions_back():
    before = in_place()
    patches = Patches(RefusedBackward(lambda: False), *step_patches.step_patches(repr, (), WeightHooks(bool)))
    during = in_place()
    assert [place for place in PLACES if during[place] is before[place]] == [INIT]
    patches.close()
    assert is_same(before)
    patches.close()
    assert is_same(before)


def test_each_patch_is_checked_once_a_process(monkeypatch):
    counts = dict.fromkeys(KINDS, 0)
    for kind in KINDS:

        def rehearsal(kind=kind, make=kind.rehearsal):
            counts[kind] += 1
            return make()

        monkeypatch.setattr(kind, "rehearsal", rehearsal)
    verify(*KINDS)
    Patches(RefusedBackward(lambda: False)).close()
    with smp.partition(0), smp.partition(0):
        nn.Identity()
    assert set(counts.values()) == {1}
    torch_patches._verified.discard(_MarkedInit)
    with smp.partition(0):
        assert counts[_MarkedInit] == 2


@pytest.mark.parametrize(
    "scope",
    [contextlib.nullcontext, torch.no_grad, torch.inference_mode, lambda: torch.device("meta"),
     torch.autograd.graph.save_on_cpu, lambda: torch.autograd.graph.disable_saved_tensors_hooks("none")],
    ids=["plain", "no_grad", "inference_mode", "device", "saved_tensors_hooks", "no_saved_tensors_hooks"],
)  # fmt: skip
def test_the_check_leaves_no_trace(scope):
    def state() -> tuple[Any, ...]:
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()
        return *modes, torch.get_default_device(), warnings.filters[:], threading.active_count()

    numbers = torch.get_rng_state()
    with scope(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        before = state()
        verify(*KINDS)
        assert state() == before and told == []
    assert torch.equal(torch.get_rng_state(), numbers)


def test_the_check_imports_nothing_that_takes_long():
    script = (
        "import sys; from smp.step_patches import *; from smp.torch_patches import verify; before = set(sys.modules); "
        "verify(RefusedBackward, *STEP_PATCHES); print(sorted(set(sys.modules) - before))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout == "[]\n"


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("simulated", [False, True], ids=["this torch", "2.14"])
def test_checkpoints_of_pytorch_are_regions(clusters, simulated, use_reentrant):
    outcomes = clusters(2).run(patch_cases.regions, simulated, use_reentrant)
    assert [same for same, _ in outcomes] == [True, True]
    assert outcomes[1][1] == ["module 'norm'", "module 'second'"]


def test_a_patch_of_the_generator_of_2_13_alone_is_an_error_in_2_14(monkeypatch):
    with monkeypatch.context() as change, patch_cases.torch_2_14(change):
        verify(step_patches._NativeCheckpoints)
        old = "torch.utils.checkpoint:_checkpoint_without_reentrant_generator"
        change.setattr(step_patches, "place_of_checkpoint_generator", lambda: old)
        torch_patches._verified.clear()
        assert "checkpoint(use_reentrant=False) is called" in refusal(step_patches._NativeCheckpoints)


@pytest.mark.parametrize("simulated", [False, True], ids=["this torch", "2.14"])
def test_outside_of_steps_checkpoints_are_pytorchs(monkeypatch, simulated):
    class Other(torch.utils.checkpoint.CheckpointFunction):
        pass

    calls = []

    def scaled(x, *, scale=2.0):
        calls.append(torch.is_grad_enabled())
        return (x * scale).sin()

    def contexts():
        calls.append("contexts")
        return contextlib.nullcontext(), contextlib.nullcontext()

    with monkeypatch.context() as change, patch_cases.torch_2_14(change) if simulated else contextlib.nullcontext():
        patches = Patches(step_patches._NativeCheckpoints())
        x = torch.ones(2, requires_grad=True)
        made = torch.utils.checkpoint.checkpoint(
            scaled, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts, scale=3.0
        )
        made.sum().backward()
        assert calls == ["contexts", True, True] and torch.equal(x.grad, 3.0 * torch.cos(3.0 * torch.ones(2)))
        reentrant = functools.partial(torch.utils.checkpoint.checkpoint, use_reentrant=True)
        direct = functools.partial(torch.utils.checkpoint.CheckpointFunction.apply, scaled, True)
        for call in (functools.partial(reentrant, scaled), direct, functools.partial(Other.apply, scaled, True)):
            calls.clear()
            made = call(x)
            made.sum().backward()
            assert calls == [False, True]
        patches.close()
