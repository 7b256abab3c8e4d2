"""`@smp.step`: runs a function once for each microbatch, over all partitions."""

import contextlib
import functools
import pickle
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, overload

import torch

from . import _C, trees
from .exceptions import SMPUsageError
from .runtime import Runtime, StepAborted, describe_error, reraise
from .split import Splitter
from .state import state
from .step_output import merge

# The issuing thread and the one that runs modules share the interpreter's lock on partition 0. With Python's default of 5 ms
# each operator of a module could wait that long for the lock.
_SWITCH_INTERVAL_S = 5e-5


@contextlib.contextmanager
def _short_switch_interval() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


class StepFunction:
    """A decorated step function. It never binds `self`: as an attribute of a class it stays the plain function."""

    def __init__(
        self,
        function: Callable[..., Any],
        non_split_inputs: Collection[str] = (),
        input_split_axes: Mapping[str, int] | None = None,
        detach_outputs: bool = True,
    ) -> None:
        if isinstance(function, staticmethod):
            function = function.__func__
        if not callable(function):
            raise SMPUsageError(f"@smp.step got {type(function).__name__}: it decorates a function")
        functools.update_wrapper(self, function)
        self._function = function
        self._splitter = Splitter(function, non_split_inputs, input_split_axes or {})
        self._detach_outputs = detach_outputs
        self._name = f"{function.__module__}.{getattr(function, '__qualname__', type(function).__name__)}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step. Collective over the ranks of a model; the arguments of ranks other than pipeline rank 0 are ignored.

        Returns what the function returned: each tensor as a `StepOutput`, any other leaf as a list with one entry for each
        microbatch, in the containers that the function used. The same on every rank.

        Raises:
            SMPUsageError: a batch does not divide by the number of microbatches, or steps are nested.
            Exception: what the function or a module raised on any rank.
        """
        cfg = state.require_cfg()
        if state.step is not None:
            raise SMPUsageError(f"step {self._name} was called inside step {state.step}: steps can't be nested")
        model = state.model
        runtime = model.prepare_step() if model is not None else None
        state.step = self._name
        try:
            if runtime is None:
                key = _C.draw_key() if cfg.rng_by_module else None
                return merge([self._run_plain(args, kwargs, i, cfg.microbatches, key) for i in range(cfg.microbatches)])
            if runtime.partition == 0:
                with _short_switch_interval():
                    return self._drive(runtime, args, kwargs, cfg.microbatches)
            return self._follow(runtime)
        finally:
            state.step = state.microbatch = None

    def _body(self, args: tuple[Any, ...], kwargs: dict[str, Any], index: int, count: int) -> Any:
        state.microbatch = index
        args, kwargs = self._splitter.microbatch(args, kwargs, index, count)
        return self._function(*args, **kwargs)

    def _run_plain(self, args: tuple[Any, ...], kwargs: dict[str, Any], index: int, count: int, key: int | None) -> Any:
        with contextlib.nullcontext() if key is None else _C.PlainMicrobatch(key, index):
            result = self._body(args, kwargs, index, count)
        if not self._detach_outputs:
            return result
        tree, tensors = trees.pack(result, {}, f"the result of step {self._name}")
        return trees.unpack(tree, [t.detach() for t in tensors], ())

    def _drive(self, runtime: Runtime, args: tuple[Any, ...], kwargs: dict[str, Any], count: int) -> Any:
        engine = runtime.engine
        results: list[tuple[bytes, list[int]]] = []
        try:
            runtime.elsewhere.begin_step()
            engine.begin_step(self._name)
            for index in range(count):
                engine.begin_microbatch(index)
                result = self._body(args, kwargs, index, count)
                tree, tensors = trees.pack(result, runtime.module_numbers, f"the result of step {self._name}")
                with torch.no_grad():
                    results.append((tree, [engine.begin_fetch(t) for t in tensors]))
                del result, tensors
                engine.end_microbatch()
            runtime.elsewhere.end_step()
            outputs = []
            for tree, arrivals in results:
                outputs.append(trees.unpack(tree, [engine.end_fetch(a) for a in arrivals], runtime.modules))
            engine.finish_microbatches()
            merged = merge(outputs)
            engine.end_step(pickle.dumps(merged, protocol=5))
            return merged
        except StepAborted as aborted:
            engine.leave_failed_step()
            reraise(aborted.failure)
        except BaseException as error:
            self._abort(engine, error)
            raise

    def _follow(self, runtime: Runtime) -> Any:
        try:
            runtime.elsewhere.begin_step()
            outputs = runtime.engine.follow_step(self._name)
            runtime.elsewhere.end_step()
        except StepAborted as aborted:
            reraise(aborted.failure)
        except BaseException as error:
            self._abort(runtime.engine, error)
            raise
        try:
            return pickle.loads(outputs)
        except Exception as error:
            error.add_note(f"smp: what step {self._name} returned came to this rank, but can't be unpickled here")
            raise

    def _abort(self, engine: "_C.Engine", error: BaseException) -> None:
        failure = _C.Failure()
        failure.step = engine.step
        failure.rank = state.require_topology().rank
        failure.microbatch = -1 if state.microbatch is None else state.microbatch
        failure.message, failure.payload = describe_error(error)
        engine.abort(failure)
        engine.leave_failed_step()


@overload
def step(function: Callable[..., Any], /) -> StepFunction: ...


@overload
def step(
    *,
    non_split_inputs: Collection[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> Callable[[Callable[..., Any]], StepFunction]: ...


def step(
    function: Callable[..., Any] | None = None,
    /,
    *,
    non_split_inputs: Collection[str] = (),
    input_split_axes: Mapping[str, int] | None = None,
    detach_outputs: bool = True,
) -> StepFunction | Callable[[Callable[..., Any]], StepFunction]:
    """Decorates a training or evaluation step, which then runs once for each microbatch.

    Each tensor argument, also inside lists, tuples, dicts and sets, is cut along its batch axis into `microbatches` equal
    parts; an object with a method `smp_slice(num_mb, mb, axis)` is cut by that; anything else is passed as it is.

    Args:
        non_split_inputs: names of arguments that every microbatch gets whole.
        input_split_axes: batch axis of an argument, by name; 0 otherwise.
        detach_outputs: False keeps the autograd graph of returned tensors, with one partition; with more, the graph ends with
            the step and returned tensors are detached always.

    Example:
        >>> @smp.step
        ... def train_step(model, x, y):
        ...     loss = F.cross_entropy(model(x), y)
        ...     model.backward(loss)
        ...     return loss
    """
    if function is not None:
        return StepFunction(function)
    return lambda decorated: StepFunction(decorated, non_split_inputs, input_split_axes, detach_outputs)
