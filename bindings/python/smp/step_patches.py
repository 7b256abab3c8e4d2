"""What some functions of PyTorch mean while a partitioned model exists: random state, the text of a tensor, a norm over all gradients."""

import functools
from collections.abc import Callable, Collection, Generator, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch.nn.utils import clip_grad, get_total_norm

from . import _C
from .checkpointing.asked import asking, region_mark
from .communication import allgather
from .exceptions import SMPUsageError
from .log import logger
from .ranks import PP_GROUP
from .state import state


class _StreamOrDefault:
    """The generator that `torch.get_rng_state`, `torch.set_rng_state`, `torch.manual_seed` and `torch.random.fork_rng` work on: in a step
    function the microbatch's own stream, so that recomputation there draws the same again; elsewhere the default generator.
    """

    def __init__(self, default: torch.Generator) -> None:
        self._default = default

    def __getattr__(self, name: str) -> Any:
        return getattr(_C.own_stream() or self._default, name)


class _NormsOverAllRanks:
    """The two halves of `torch.nn.utils.clip_grad_norm_`, for parameters whose gradients lie on several ranks: the norm of them all,
    which is what it returns, and what every rank clips by. Collective over the ranks of the model then.
    """

    def __init__(self, parameters: Collection[torch.Tensor]) -> None:
        self._known = {id(p) for p in parameters}
        self._halves: tuple[Any, Any] = (clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_)
        self._norm_type, self._must_be_finite = 2.0, False
        clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_ = self._norm_here, self._clip

    def _norm_here(
        self, tensors: Any, norm_type: float = 2.0, error_if_nonfinite: bool = False, foreach: bool | None = None
    ) -> torch.Tensor:
        self._norm_type, self._must_be_finite = float(norm_type), error_if_nonfinite
        return self._halves[0](tensors, norm_type, False, foreach)

    def _clip(self, parameters: Any, max_norm: float, total_norm: torch.Tensor, foreach: bool | None = None) -> None:
        if any(id(p) in self._known for p in parameters):
            total_norm.copy_(self._norm_everywhere(parameters, foreach))
        if self._must_be_finite:
            self._halves[0]([total_norm], self._norm_type, True, foreach)
        self._halves[1](parameters, max_norm, total_norm, foreach)

    def _norm_everywhere(self, parameters: Sequence[torch.Tensor], foreach: bool | None) -> torch.Tensor:
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

    def close(self) -> None:
        clip_grad._get_total_norm, clip_grad._clip_grads_with_norm_ = self._halves


class RefusedBackward:
    """`loss.backward()` is an error in a step function: it would not divide by the number of microbatches, nor wait its turn beside modules.

    Attributes:
        original: torch.autograd.backward itself.
    """

    def __init__(self, is_in_step_function: Callable[[], bool]) -> None:
        self._is_in_step_function = is_in_step_function
        self.original = torch.autograd.backward
        torch.autograd.backward = self._backward

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        # A pass inside a pass is somebody's recomputation.
        if torch._C._current_graph_task_id() == -1 and self._is_in_step_function():
            raise SMPUsageError(
                "backward() of a tensor was called in a step: call model.backward(loss) instead, which averages over microbatches and "
                "runs on all partitions (model.backward(tensor, gradient) where there is a gradient)"
            )
        self.original(*args, **kwargs)

    def close(self) -> None:
        torch.autograd.backward = self.original


class _GradientsOfLocalTensors:
    """`torch.autograd.grad` in a step also reaches tensors of this process that modules elsewhere used."""

    def __init__(self) -> None:
        self._original = torch.autograd._engine_run_backward
        setattr(torch.autograd, "_engine_run_backward", self._run)  # noqa: B010

    def _run(self, outputs: Sequence[Any], *args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
        _, _, _, inputs, *_ = args
        if accumulate_grad or not _C.in_frame():
            return self._original(outputs, *args, accumulate_grad=accumulate_grad, **kwargs)
        with _C.OpenLifts(outputs, inputs):
            return self._original(outputs, *args, accumulate_grad=accumulate_grad, **kwargs)

    def close(self) -> None:
        torch.autograd._engine_run_backward = self._original


class _NativeCheckpoints:
    """`torch.utils.checkpoint.checkpoint` in a step function or a container: the calls inside are regions where their modules run, and the
    function itself runs once. Elsewhere it is as ever.
    """

    def __init__(self) -> None:
        self._told_of_policy = False
        self._original: Any = torch.utils.checkpoint.CheckpointFunction
        self._original_generator: Any = torch.utils.checkpoint._checkpoint_without_reentrant_generator
        torch.utils.checkpoint.CheckpointFunction = self  # type: ignore[assignment, misc]
        setattr(torch.utils.checkpoint, "_checkpoint_without_reentrant_generator", self._generator)  # noqa: B010

    def apply(self, function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        if not _C.in_frame():
            return self._original.apply(function, preserve_rng_state, *args)
        with asking(region_mark(preserve_rng_state)):
            return function(*args)

    def _generator(
        self,
        function: Callable[..., Any],
        preserve_rng_state: bool = True,
        context_fn: Any = torch.utils.checkpoint.noop_context_fn,
        *args: Any,
        **kwargs: Any,
    ) -> Generator[None, None, None]:
        if not _C.in_frame():
            return (yield from self._original_generator(function, preserve_rng_state, context_fn, *args, **kwargs))
        if context_fn is not torch.utils.checkpoint.noop_context_fn and not self._told_of_policy:
            self._told_of_policy = True
            logger.warning(
                "torch.utils.checkpoint got a context_fn (selective checkpointing), which has no effect where the modules inside may lie on other "
                "ranks: each of them runs again as a whole. Use it inside one of them"
            )
        with asking(region_mark(preserve_rng_state)):
            yield

    def close(self) -> None:
        torch.utils.checkpoint.CheckpointFunction = self._original  # type: ignore[misc]
        torch.utils.checkpoint._checkpoint_without_reentrant_generator = self._original_generator


class StepPatches:
    """Installed by the model, taken back by `close`."""

    def __init__(self, fetch: Callable[[torch.Tensor], torch.Tensor], parameters: Collection[torch.Tensor]) -> None:
        self._norms = _NormsOverAllRanks(parameters)
        self._gradients = _GradientsOfLocalTensors()
        self._checkpoints = _NativeCheckpoints()
        self._fetch = fetch
        self._default = torch.random.default_generator
        self._text = torch._tensor_str._str
        # torch takes the place of a new tensor from the dispatch keys of an old one, which are ours for a remote one.
        self._makers = {name: getattr(torch.Tensor, name) for name in ("new_tensor", "new")}
        for name, make in self._makers.items():
            setattr(torch.Tensor, name, self._like_local(make))
        torch.random.default_generator = _StreamOrDefault(self._default)  # type: ignore[assignment]
        setattr(torch._tensor_str, "_str", self._text_of)  # noqa: B010

    @staticmethod
    def _like_local(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(make)
        def made(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            return make(torch.empty(0, dtype=tensor.dtype) if _C.is_elsewhere(tensor) else tensor, *args, **kwargs)

        return made

    def _text_of(self, tensor: torch.Tensor, **options: Any) -> str:
        if not _C.is_remote(tensor):
            return self._text(tensor, **options)
        if not _C.in_frame():
            return f"tensor(<on another partition>, size={tuple(tensor.shape)}, dtype={tensor.dtype})"
        return self._text(self._fetch(tensor), **options)

    def close(self) -> None:
        self._norms.close()
        self._gradients.close()
        self._checkpoints.close()
        for name, make in self._makers.items():
            setattr(torch.Tensor, name, make)
        torch.random.default_generator = self._default
        torch._tensor_str._str = self._text
