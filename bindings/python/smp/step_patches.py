"""What some functions of PyTorch mean while a partitioned model exists: random state, the text of a tensor, a norm over all gradients."""

import functools
import inspect
import sys
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import nn
from torch.nn.utils import get_total_norm

from . import _C
from .checkpointing import asked
from .communication import allgather
from .exceptions import SMPUsageError
from .log import logger
from .ranks import PP_GROUP
from .state import state
from .torch_patches import Patch, reached, reaches
from .torch_versions import place_of_checkpoint_generator, reader_of_checkpoint_options
from .weight_hooks import WeightHooks

# Many modules hold the function itself, as it was when they were imported.
_imported_checkpoint = torch.utils.checkpoint.checkpoint


class RefusedBackward(Patch):
    """`loss.backward()` is an error in a step function: it would not divide by the number of microbatches, nor wait its turn beside modules.

    Attributes:
        original: torch.autograd.backward itself.
    """

    original: Callable[..., None]

    def __init__(self, is_in_step_function: Callable[[], bool]) -> None:
        self._is_in_step_function = is_in_step_function

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        return {"torch.autograd:backward": self._over_backward}

    def _over_backward(self, original: Callable[..., None]) -> Callable[..., None]:
        self.original = original

        def backward(*args: Any, **kwargs: Any) -> None:
            # A pass inside a pass is somebody's recomputation.
            if torch._C._current_graph_task_id() == -1 and self._is_in_step_function():
                raise SMPUsageError(
                    "backward() of a tensor was called in a step: call model.backward(loss) instead, which averages over microbatches and "
                    "runs on all partitions (model.backward(tensor, gradient) where there is a gradient)"
                )
            original(*args, **kwargs)

        return backward

    @classmethod
    def rehearsal(cls) -> "RefusedBackward":
        return cls(reached)

    def examples(self) -> dict[str, Callable[[], bool]]:
        return {"torch.Tensor.backward": lambda: reaches(torch.zeros((), device="cpu").backward)}


class _NormsOverAllRanks(Patch):
    """The two halves of `torch.nn.utils.clip_grad_norm_`, for parameters whose gradients lie on several ranks: the norm of them all,
    which is what it returns, and what every rank clips by. Collective over the ranks of the model then.
    """

    _total: Callable[..., torch.Tensor]
    _clip: Callable[..., None]

    def __init__(
        self, parameters: Collection[torch.Tensor], norm_everywhere: Callable[..., torch.Tensor] | None = None
    ) -> None:
        self._known = {id(p) for p in parameters}
        self._norm_everywhere = norm_everywhere or self._gather_norms
        self._norm_type, self._must_be_finite = 2.0, False

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "torch.nn.utils.clip_grad:_get_total_norm": self._over_total,
            "torch.nn.utils.clip_grad:_clip_grads_with_norm_": self._over_clip,
        }

    def _over_total(self, original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        self._total = original
        return self._norm_here

    def _over_clip(self, original: Callable[..., None]) -> Callable[..., None]:
        self._clip = original
        return self._clip_by_norm_everywhere

    def _norm_here(
        self, tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        self._norm_type, self._must_be_finite = float(norm_type), error_if_nonfinite
        return self._total(tensors, norm_type, False, foreach)

    def _clip_by_norm_everywhere(
        self, parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None
    ) -> None:
        if any(id(p) in self._known for p in parameters):
            total_norm.copy_(self._norm_everywhere(parameters, foreach))
        if self._must_be_finite:
            self._total([total_norm], self._norm_type, True, foreach)
        self._clip(parameters, max_norm, total_norm, foreach)

    def _gather_norms(self, parameters: Sequence[torch.Tensor], foreach: bool | None) -> torch.Tensor:
        rank = state.require_topology().pp_rank
        norms = {
            (i, rank): get_total_norm([p.grad], self._norm_type, False, foreach)
            for i, p in enumerate(parameters)
            if p.grad is not None
        }
        mine = {key: norm for key, norm in norms.items() if id(parameters[key[0]]) in self._known}
        for theirs in allgather(mine, PP_GROUP):
            norms.update(theirs)
        # In the order of the parameters, as one process would.
        ordered = [norms[key] for key in sorted(norms)]
        return torch.linalg.vector_norm(torch.stack(ordered), self._norm_type) if ordered else torch.tensor(0.0)

    @classmethod
    def rehearsal(cls) -> "_NormsOverAllRanks":
        return cls((), lambda parameters, foreach: torch.full((), 2.0, device="cpu"))

    def examples(self) -> dict[str, Callable[[], bool]]:
        def comes_here() -> bool:
            parameter = torch.zeros(1, device="cpu")
            parameter.grad = torch.ones(1, device="cpu")
            self._known = {id(parameter)}
            norm = nn.utils.clip_grad_norm_([parameter], 1.0, 3.0, error_if_nonfinite=True)
            return float(norm) == 2.0 and self._norm_type == 3.0 and self._must_be_finite

        return {"torch.nn.utils.clip_grad_norm_": comes_here}


class _GradientsOfLocalTensors(Patch):
    """`torch.autograd.grad` in a step also reaches tensors of this process that modules elsewhere used."""

    def __init__(self, in_frame: Callable[[], bool] = _C.in_frame, open_lifts: Any = _C.OpenLifts) -> None:
        self._in_frame, self._open_lifts = in_frame, open_lifts

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        return {"torch.autograd:_engine_run_backward": self._over_run}

    def _over_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def run(outputs: Sequence[Any], *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
            _, _, _, inputs, *_ = args
            if accumulate_grad or not self._in_frame():
                return original(outputs, *args, accumulate_grad=accumulate_grad, **kwargs)
            with self._open_lifts(outputs, inputs):
                return original(outputs, *args, accumulate_grad=accumulate_grad, **kwargs)

        return run

    @classmethod
    def rehearsal(cls) -> "_GradientsOfLocalTensors":
        return cls(lambda: True)

    def examples(self) -> dict[str, Callable[[], bool]]:
        def comes_here() -> bool:
            root, wanted = (torch.zeros((), device="cpu", requires_grad=True) for _ in range(2))
            seen: list[Any] = []

            def open_lifts(outputs: Any, inputs: Any) -> Any:
                seen.extend((*outputs, *inputs))
                return reached()  # the engine, which would start threads, has nothing to do

            self._open_lifts = open_lifts
            return reaches(torch.autograd.grad, root, wanted) and seen[0] is root and seen[1] is wanted

        return {"torch.autograd.grad": comes_here}


class _NativeCheckpoints(Patch):
    """`torch.utils.checkpoint.checkpoint` in a step function or a container: the calls inside are regions where their modules run, and the
    function itself runs once. Elsewhere it is as ever.

    What is replaced is looked up when `checkpoint` is called, so it also serves code that imported that by name.
    """

    def __init__(self, in_frame: Callable[[], bool] = _C.in_frame) -> None:
        self._in_frame = in_frame
        self._told_of_policy = False

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        return {
            "torch.utils.checkpoint:CheckpointFunction.apply": self._over_apply,
            place_of_checkpoint_generator(): self._over_generator,
        }

    def _over_apply(self, original: Callable[..., Any]) -> Any:
        owner = torch.utils.checkpoint.CheckpointFunction

        def apply(kind: Any, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
            if kind is not owner:  # somebody's subclass
                return super(owner, kind).apply(function, preserve_rng_state, *args)  # type: ignore[misc]
            if not self._in_frame():
                return original(function, preserve_rng_state, *args)
            with asked.asking(asked.region_mark(preserve_rng_state)):
                return function(*args)

        return classmethod(apply)

    def _over_generator(self, original: Callable[..., Any]) -> Callable[..., Any]:
        options = reader_of_checkpoint_options(original)

        @functools.wraps(original)
        def generator(*args: Any, **kwargs: Any) -> Any:
            return self._region(*options(*args, **kwargs)) if self._in_frame() else original(*args, **kwargs)

        return generator

    def _region(self, preserve_rng_state: bool, context_fn: Any) -> Generator[None, None, None]:
        if context_fn is not torch.utils.checkpoint.noop_context_fn and not self._told_of_policy:
            self._told_of_policy = True
            logger.warning(
                "torch.utils.checkpoint got a context_fn (selective checkpointing), which has no effect where the modules inside may lie on other "
                "ranks: each of them runs again as a whole. Use it inside one of them"
            )
        with asked.asking(asked.region_mark(preserve_rng_state)):
            yield

    @classmethod
    def rehearsal(cls) -> "_NativeCheckpoints":
        return cls(lambda: True)

    def examples(self) -> dict[str, Callable[[], bool]]:
        def makes_regions(use_reentrant: bool) -> bool:
            return all(
                _cheap(checkpoint)(asked.mark, use_reentrant=use_reentrant, preserve_rng_state=preserve)
                == asked.region_mark(preserve)
                for checkpoint in (_imported_checkpoint, torch.utils.checkpoint.checkpoint)
                for preserve in (True, False)
            )

        return {
            f"torch.utils.checkpoint.checkpoint(use_reentrant={use_reentrant})": functools.partial(
                makes_regions, use_reentrant
            )
            for use_reentrant in (False, True)
        }


def _cheap(checkpoint: Callable[..., Any]) -> Callable[..., Any]:
    # Its first call imports torch._dynamo, which takes seconds, to keep it away from what is under the decorator.
    return checkpoint if "torch._dynamo" in sys.modules else inspect.unwrap(checkpoint)


class _StreamOrDefault:
    def __init__(self, default: torch.Generator, own_stream: Callable[[], Any]) -> None:
        self._default, self._own_stream = default, own_stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own_stream() or self._default, name)


class _RandomState(Patch):
    """The generator that `torch.get_rng_state`, `torch.set_rng_state`, `torch.manual_seed` and `torch.random.fork_rng` work on: in a step
    function the microbatch's own stream, so that recomputation there draws the same again; elsewhere the default generator.
    """

    def __init__(self, own_stream: Callable[[], Any] = _C.own_stream) -> None:
        self._own_stream = own_stream

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        return {"torch.random:default_generator": lambda default: _StreamOrDefault(default, self._own_stream)}

    @classmethod
    def rehearsal(cls) -> "_RandomState":
        return cls(reached)

    def examples(self) -> dict[str, Callable[[], bool]]:
        def sets() -> bool:
            # Harmless where it does not come here.
            return reaches(torch.set_rng_state, torch.default_generator.get_state())

        return {"torch.get_rng_state": lambda: reaches(torch.get_rng_state), "torch.set_rng_state": sets}


class _Text(Patch):
    """The text of a remote tensor."""

    def __init__(
        self, fetch: Callable[[torch.Tensor], torch.Tensor], is_remote: Callable[[torch.Tensor], bool] = _C.is_remote
    ) -> None:
        self._fetch, self._is_remote = fetch, is_remote

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        return {"torch._tensor_str:_str": self._over_str}

    def _over_str(self, original: Callable[..., str]) -> Callable[..., str]:
        def text(tensor: torch.Tensor, **options: Any) -> str:
            if not self._is_remote(tensor):
                return original(tensor, **options)
            if not _C.in_frame():
                return f"tensor(<on another partition>, size={tuple(tensor.shape)}, dtype={tensor.dtype})"
            return original(self._fetch(tensor), **options)

        return text

    @classmethod
    def rehearsal(cls) -> "_Text":
        return cls(reached, reached)

    def examples(self) -> dict[str, Callable[[], bool]]:
        return {"repr of a torch.Tensor": lambda: reaches(repr, torch.zeros(1, device="cpu"))}


class _NewTensors(Patch):
    """`new_tensor` and `new` take the place of the new tensor from the dispatch keys of the old one, which are ours for a remote one."""

    def __init__(self, is_elsewhere: Callable[[torch.Tensor], bool] = _C.is_elsewhere) -> None:
        self._is_elsewhere = is_elsewhere

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        return {"torch:Tensor.new_tensor": self._like_local, "torch:Tensor.new": self._like_local}

    def _like_local(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def made(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return make(torch.empty(0, dtype=tensor.dtype) if self._is_elsewhere(tensor) else tensor, *args, **kwargs)

        return made

    @classmethod
    def rehearsal(cls) -> "_NewTensors":
        return cls(reached)

    def examples(self) -> dict[str, Callable[[], bool]]:
        tensor = torch.zeros(1, device="cpu")
        return {
            "torch.Tensor.new_tensor": lambda: reaches(tensor.new_tensor, [1.0]),
            "torch.Tensor.new": lambda: reaches(tensor.new, 1),
        }


# What `step_patches` gives.
STEP_PATCHES: tuple[type[Patch], ...] = (
    _NormsOverAllRanks,
    _GradientsOfLocalTensors,
    _NativeCheckpoints,
    _RandomState,
    _Text,
    _NewTensors,
    WeightHooks,
)


def step_patches(
    fetch: Callable[[torch.Tensor], torch.Tensor], parameters: Collection[torch.Tensor], weight_hooks: WeightHooks
) -> list[Patch]:
    """Those of a model with several partitions. `fetch`: the value of a remote tensor. `parameters`: of the whole model."""
    return [
        _NormsOverAllRanks(parameters),
        _GradientsOfLocalTensors(),
        _NativeCheckpoints(),
        _RandomState(),
        _Text(fetch),
        _NewTensors(),
        weight_hooks,
    ]
