"""`smp.DistributedModel`: a model whose modules are spread over the ranks of a pipeline."""

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from . import _C
from .checkpointing.asked import Request
from .checkpointing.paths import Paths
from .checkpointing.plan import Plan
from .communication import allgather
from .exceptions import SMPUsageError
from .forwards import ReplacedForwards
from .log import logger
from .placement import assign
from .random import with_own_stream
from .ranks import PP_GROUP
from .runtime import Runtime, hooks_of
from .state import state
from .step_patches import STEP_PATCHES, RefusedBackward
from .torch_patches import Patches, verify

PARTIAL_KEY = "_smp_is_partial"


def _refuse(module: nn.Module) -> None:
    """Raises SMPUsageError for modules whose inside can't be placed."""
    if not isinstance(module, nn.Module):
        raise SMPUsageError(f"DistributedModel got {type(module).__name__}: it wraps a torch.nn.Module")
    for name, submodule in module.named_modules():
        where = f"module '{name}'" if name else "the model"
        if isinstance(submodule, DistributedModel):
            raise SMPUsageError(f"{where} is a DistributedModel already: wrap the model once")
        if isinstance(submodule, torch.jit.ScriptModule):
            raise SMPUsageError(
                f"{where} is a TorchScript module, which can't be taken apart: wrap the original module instead"
            )
        if type(submodule).__name__ == "OptimizedModule" and hasattr(submodule, "_orig_mod"):
            raise SMPUsageError(
                f"{where} is the result of torch.compile: wrap the original module instead (`module._orig_mod`)"
            )
        if isinstance(submodule, nn.parallel.DistributedDataParallel | nn.DataParallel):
            raise SMPUsageError(
                f"{where} is wrapped in {type(submodule).__name__}: wrap the inner module (`.module`) instead; smp itself reduces replicas"
            )


class DistributedModel(nn.Module):
    """Wraps a model; the first step places its modules on the pipeline ranks.

    Names of parameters, buffers and state are the user's model's own. Every rank must build the same model.

    Args:
        module: the model. On each rank, the parameters that live on other ranks give their memory back at the first step.
        average_grads_across_microbatches: True: gradients are the mean over microbatches; False: the sum.
        trace_device, trace_execution_times, trace_memory_usage: accepted; models are partitioned by the bytes of their parameters.
        overlapping_allreduce, backward_passes_per_step, bucket_cap_mb, broadcast_buffers, gradient_as_bucket_view,
            find_unused_parameters: accepted; they matter for several replicas only.

    Raises:
        SMPUsageError: before `smp.init`, for a second model, for more than one replica, for a module that can't be taken apart, or with a
            PyTorch whose functions smp can't replace.

    Example:
        >>> model = smp.DistributedModel(Net())
        >>> model.module  # the user's model
    """

    def __init__(
        self,
        module: nn.Module,
        trace_device: str = "gpu",
        trace_execution_times: bool = False,
        overlapping_allreduce: bool = True,
        backward_passes_per_step: int = 1,
        average_grads_across_microbatches: bool = True,
        bucket_cap_mb: int = 25,
        trace_memory_usage: bool = False,
        broadcast_buffers: bool = True,
        gradient_as_bucket_view: bool = False,
        find_unused_parameters: bool = False,
    ) -> None:
        topology = state.require_topology()
        _refuse(module)
        if state.model is not None:
            raise SMPUsageError(
                "there is a DistributedModel already: one is possible for each smp.init(); smp.shutdown() forgets it"
            )
        if topology.rdp_size > 1:
            raise SMPUsageError(
                f"{topology.size} ranks with {topology.pp_size} partitions make {topology.rdp_size} replicas of the model, whose gradients "
                f"are not reduced yet: start {topology.pp_size} ranks, or set partitions to {topology.size}"
            )
        for name, value in (
            ("trace_execution_times", trace_execution_times),
            ("trace_memory_usage", trace_memory_usage),
        ):
            if value:
                logger.warning("%s=True has no effect: models are partitioned by the bytes of their parameters", name)
        if trace_device not in ("cpu", "gpu"):
            raise SMPUsageError(f"trace_device is {trace_device!r}: it must be 'cpu' or 'gpu'")
        # Before anything is changed, and before data is on its way.
        verify(RefusedBackward, *(STEP_PATCHES if topology.pp_size > 1 else ()))
        super().__init__()
        self.module = module
        self._average = average_grads_across_microbatches
        self._runtime: Runtime | None = None
        self._partitioned = topology.pp_size == 1
        self._checked = False
        # What code of one rank hooks in later is not known on the others.
        self._hooks = {m: hooks_of(m) for m in module.modules()}
        self._num_calls = 0  # of `forward` that run
        self.checkpoints = Plan(module)
        self._paths = Paths(module)
        self._refusal = RefusedBackward(self._is_in_step_function)
        self._patches = Patches(self._refusal)
        self._streams: ReplacedForwards | None = None
        if self._partitioned and state.require_cfg().rng_by_module:
            self._streams = ReplacedForwards([(m, with_own_stream(m.forward)) for m in module.modules()])
        state.model = self

    # ---- placement

    @property
    def partitioned(self) -> bool:
        """Is each module placed: with one partition always, with more from the first step on."""
        return self._partitioned

    def get_module(self) -> nn.Module:
        """The user's model."""
        return self.module

    def _partition(self) -> None:
        if self._partitioned:
            return
        assignment = assign(self.module, state.require_cfg(), self.checkpoints)
        self._runtime = Runtime(self.module, assignment, self._hooks, self.checkpoints.runs())
        self._partitioned = True

    def request_checkpointing(self, module: nn.Module, request: Request) -> None:
        """For `smp.set_activation_checkpointing`. Raises SMPUsageError once modules are placed on several partitions."""
        if self._runtime is not None:
            raise SMPUsageError(
                "set_activation_checkpointing was called after the model was partitioned: call it before the first step"
            )
        self.checkpoints.request(module, request)
        if self._partitioned:
            self.checkpoints.install()

    def prepare_step(self) -> Runtime | None:
        """Partitions the model if that was not done yet, and checks once that all ranks have the same. Collective."""
        self._partition()
        if self._runtime is not None and not self._checked:
            self._check_same_everywhere(self._runtime)
            self._checked = True
        return self._runtime

    def _check_same_everywhere(self, runtime: Runtime) -> None:
        mine = [f"configuration {key}={value!r}" for key, value in vars(state.require_cfg()).items()]
        mine += [f"module '{name}'" for name in runtime.names]
        mine += [
            f"parameter '{name}' {list(p.shape)}, {p.dtype}, requires_grad={p.requires_grad}, on partition {home}"
            for name, p, home in runtime.parameters
        ]
        topology = state.require_topology()
        for rank, theirs in zip(topology.group("pp"), allgather(mine, PP_GROUP), strict=True):
            for here, there in itertools.zip_longest(mine, theirs, fillvalue="nothing"):
                if here != there:
                    raise SMPUsageError(
                        f"the model of rank {topology.rank} differs from that of rank {rank}, first here: {here}, there: {there}. Every rank must "
                        "build the same model with the same frozen parameters, and call smp.init with the same configuration"
                    )

    def close(self) -> None:
        """Stops what runs for this model on this rank."""
        for part in (self._runtime, self.checkpoints, self._paths, self._streams, self._patches):
            if part is not None:
                part.close()
        self._runtime = self._streams = None

    # ---- a step

    def _needs_step(self) -> bool:
        return self._runtime is not None or not self._partitioned

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The user's model's forward. With more than one partition, only in a step.

        Raises:
            SMPUsageError: outside a step, with more than one partition.
        """
        if self._needs_step() and not _C.in_frame():
            raise SMPUsageError(
                "the model was called outside a step: with more than one partition, call it (and model.backward) in a function that is "
                "decorated with @smp.step"
            )
        self._num_calls += 1
        try:
            return self.module(*args, **kwargs)
        finally:
            self._num_calls -= 1

    def _is_in_step_function(self) -> bool:
        if self._runtime is not None:
            return _C.in_frame()
        return state.microbatch is not None and self._num_calls == 0

    def backward(
        self,
        tensors: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
    ) -> None:
        """Like `torch.autograd.backward`, divided by the number of microbatches where gradients are averaged.

        Args:
            tensors: a scalar loss, or tensors with their incoming gradients.
            grad_tensors: one for each tensor, of its shape; may be left out for scalars.

        Raises:
            SMPUsageError: outside a step with more than one partition, or a gradient is missing.
        """
        if self._needs_step() and not _C.in_frame():
            raise SMPUsageError(
                "model.backward was called outside a step: call it in the function that is decorated with @smp.step"
            )
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        given = [grad_tensors] if isinstance(grad_tensors, torch.Tensor) else list(grad_tensors or [None] * len(roots))
        if len(given) != len(roots):
            raise SMPUsageError(
                f"model.backward got {len(roots)} tensors but {len(given)} grad_tensors: one is needed for each"
            )
        count = state.require_cfg().microbatches if self._average and state.microbatch is not None else 1
        gradients = []
        with torch.no_grad():
            for root, gradient in zip(roots, given, strict=True):
                if gradient is None:
                    if root.numel() != 1:
                        raise SMPUsageError(
                            f"model.backward got a tensor of shape {tuple(root.shape)} without a gradient: reduce it to a scalar, or pass "
                            "grad_tensors"
                        )
                    gradient = torch.ones(root.shape, dtype=root.dtype)
                gradients.append(gradient / count if count > 1 else gradient)
            if self._runtime is not None:
                # What lies here too: its backward must not run beside that of modules, which add to the same gradients.
                with torch.enable_grad():
                    self._runtime.engine.watch_gradients()
                    roots = [self._runtime.engine.root(root) for root in roots]
                gradients = [self._runtime.engine.seed(root, g) for root, g in zip(roots, gradients, strict=True)]
        self._refusal.original(roots, gradients)

    # ---- what is here

    def _is_local(self, module_name: str) -> bool:
        return self._runtime is None or self._runtime.home[module_name] == self._runtime.partition

    def _local(self, kind: str) -> Iterator[tuple[str, Any]]:
        self._partition()
        seen: set[int] = set()
        for name, module in self.module.named_modules():
            if not self._is_local(name):
                continue
            if kind == "module":
                yield name, module
                continue
            for key, value in getattr(module, f"_{kind}s").items():
                if value is not None and id(value) not in seen:
                    seen.add(id(value))
                    yield f"{name}.{key}" if name else key, value

    def local_named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Modules of this rank's partition with their names. Partitions the model if that was not done yet."""
        return self._local("module")

    def local_modules(self) -> Iterator[nn.Module]:
        """Modules of this rank's partition."""
        return (module for _, module in self._local("module"))

    def local_named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Parameters of this rank's partition with their names."""
        return self._local("parameter")

    def local_parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of this rank's partition."""
        return (parameter for _, parameter in self._local("parameter"))

    def local_named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Buffers of this rank's partition with their names."""
        return self._local("buffer")

    def local_buffers(self) -> Iterator[torch.Tensor]:
        """Buffers of this rank's partition."""
        return (buffer for _, buffer in self._local("buffer"))

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """All parameters under the user's model's own names; those of other ranks have a shape but no data."""
        return self.module.named_parameters(prefix, recurse, remove_duplicate)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """All buffers under the user's model's own names."""
        return self.module.named_buffers(prefix, recurse, remove_duplicate)

    # ---- state

    def _home_of_key(self, runtime: Runtime) -> dict[str, int]:
        """Home of each entry of the state dict; a name that two modules share belongs to both at one home."""
        homes = {id(m): runtime.home[name] for name, m in zip(runtime.names, runtime.modules, strict=True)}
        result = {}
        for name, module in self.module.named_modules(remove_duplicate=False):
            for key in [*module._parameters, *module._buffers, "_extra_state"]:
                result[f"{name}.{key}" if name else key] = homes[id(module)]
        return result

    def local_state_dict(self) -> dict[str, Any]:
        """The entries of `state_dict()` that live on this rank, and the mark `_smp_is_partial`."""
        self._partition()
        result = dict(self.module.state_dict())
        if self._runtime is not None:
            homes = self._home_of_key(self._runtime)
            result = {key: value for key, value in result.items() if homes.get(key, 0) == self._runtime.partition}
        result[PARTIAL_KEY] = True
        return result

    def state_dict(  # type: ignore[override]
        self, *args: Any, gather_to_rank0: bool = False, **kwargs: Any
    ) -> dict[str, Any]:
        """The whole model's state under the user's model's own names. Collective over the ranks of the model.

        Args:
            gather_to_rank0: other ranks than pipeline rank 0 get an empty dict.
        """
        whole = self.module.state_dict(*args, **kwargs)
        if self._runtime is None:
            return whole
        prefix, homes, here = kwargs.get("prefix", ""), self._home_of_key(self._runtime), self._runtime.partition
        merged: dict[str, Any] = {}
        mine = {key: value for key, value in whole.items() if homes.get(key.removeprefix(prefix), 0) == here}
        for part in allgather(mine, PP_GROUP):
            merged.update(part)
        if gather_to_rank0 and here != 0:
            return {}
        for key in whole:
            whole[key] = merged[key]
        return whole

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, same_partition_load: bool = False
    ) -> Any:
        """Loads a whole state dict, or the partial ones of all ranks (collective then).

        Args:
            strict: missing and unexpected keys are an error.
            same_partition_load: a partial dict was saved under this partition, so ranks need not exchange theirs.

        Raises:
            RuntimeError: keys are missing or unexpected with `strict`, or shapes differ.
        """
        entries = dict(state_dict)
        partial = bool(entries.pop(PARTIAL_KEY, False))
        if partial and not same_partition_load:
            merged: dict[str, Any] = {}
            for part in allgather(entries, PP_GROUP):
                merged.update(part)
            entries = merged
        if self._runtime is None and not partial:
            return self.module.load_state_dict(entries, strict=strict)
        self._partition()
        expected = self.module.state_dict()
        own = set(expected)
        if self._runtime is not None:
            homes = self._home_of_key(self._runtime)
            own = {key for key in expected if homes.get(key, 0) == self._runtime.partition}
        wanted = own if partial and same_partition_load else set(expected)
        missing = [key for key in expected if key in wanted and key not in entries]
        unexpected = [key for key in entries if key not in expected]
        # Shapes of all entries, not only of the own ones: where every rank raises, none waits for another.
        shapes = {
            key: (tuple(entries[key].shape), tuple(value.shape))
            for key, value in expected.items()
            if _are_tensors(entries.get(key), value)
        }
        misfits = [
            f"'{key}' is {given}, not {wanted_shape}"
            for key, (given, wanted_shape) in shapes.items()
            if given != wanted_shape
        ]
        if misfits or (strict and (missing or unexpected)):
            raise RuntimeError(
                f"load_state_dict of {type(self.module).__name__}: missing keys {missing}, unexpected keys {unexpected}, other shapes: "
                f"{', '.join(misfits) or 'none'}; strict=False allows missing and unexpected keys"
            )
        kept = OrderedDict((key, value) for key, value in entries.items() if key in own)
        kept._metadata = getattr(state_dict, "_metadata", None)  # type: ignore[attr-defined]
        self.module.load_state_dict(kept, strict=False)
        return nn.modules.module._IncompatibleKeys(missing, unexpected)


def _are_tensors(*values: Any) -> bool:
    return all(isinstance(value, torch.Tensor) for value in values)
