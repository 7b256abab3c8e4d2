"""The engine of a partitioned model, and what of it must be Python: running modules, and errors between ranks."""

import functools
import itertools
import pickle
import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import nn
from torch._C import _functorch

from . import _C, trees
from .checkpointing import asked
from .checkpointing.hooked import forward_here
from .checkpointing.plan import RegionForward, call_stack_here
from .checkpointing.region import Site
from .checkpointing.region import run as run_region
from .checkpointing.stack import Run
from .dynamic import is_dynamic
from .exceptions import SMPFailureError, SMPUsageError
from .forwards import ForwardOf, ReplacedForwards
from .log import logger
from .module_state import ModuleState
from .placement import Assignment
from .random import with_own_stream
from .state import state
from .step_patches import step_patches
from .torch_patches import Patches
from .weight_hooks import WeightHooks

# The engine runs such a module where the largest of its tensors lies.
_FOLLOWS_DATA = -1
# Models of one process, one after another: the same number on every rank keeps their messages apart.
_generations = itertools.count(1)


class StepAborted(BaseException):
    """Unwinds the code of a step that failed elsewhere. A BaseException, so that model code does not swallow it."""

    def __init__(self, failure: _C.Failure) -> None:
        super().__init__(failure.describe())
        self.failure = failure


def describe_error(error: BaseException) -> tuple[str, bytes]:
    """An exception as text (with its traceback) and as bytes for other ranks (empty when it does not pickle)."""
    text = "".join(traceback.format_exception(error)).rstrip()
    try:
        payload = pickle.dumps(error)
        pickle.loads(payload)
    except Exception:
        payload = b""
    return text, payload


def reraise(failure: _C.Failure, cause: BaseException | None = None) -> NoReturn:
    """Raises what ended a step, on any rank: the original type where it pickles, with a note that says where it came from."""
    where = f"rank {failure.rank}"
    if failure.microbatch >= 0:
        where += f", microbatch {failure.microbatch}"
    where += f", {failure.where or 'in the step function'}"
    ended = f"smp: this ended step {failure.step} on all ranks; it was raised on {where}"
    try:
        error: BaseException | None = pickle.loads(failure.payload) if failure.payload else None
    except Exception:
        error = None
    if error is not None:
        ended += f":\n{failure.message}"
    else:
        # What was raised stands last in the text.
        last = failure.message.splitlines()[-1]
        error = SMPFailureError(failure.message if last == failure.message else f"{last}\n{failure.message}")
    if failure.payload or failure.where or failure.microbatch >= 0:  # else the message itself says where
        error.add_note(ended)
    raise error from cause


class _Host:
    """Called by the engine's threads."""

    def __init__(self, runtime: "Runtime") -> None:
        self._runtime = runtime
        self._told_of_lost_change = False

    def run(
        self, index: int, tree: bytes, tensors: list[torch.Tensor], training: bytes
    ) -> tuple[bytes, list[torch.Tensor]]:
        runtime = self._runtime
        subtree = runtime.subtrees[index]
        flags, mark = training[: len(subtree)], training[len(subtree) :]
        for module, flag in zip(subtree, flags, strict=True):
            if module.training != bool(flag):
                module.training = bool(flag)
        args, kwargs = trees.unpack(tree, tensors, runtime.modules)
        before = self._contents(index, args, kwargs)
        runtime.weight_hooks.run(runtime.modules[index], args)
        forward = runtime.forward_of_call(index, mark)
        result = forward(*args, **kwargs)
        if before is not None and before != self._contents(index, args, kwargs):
            self._warn_of_lost_change(index, args, kwargs)
        tree, tensors = trees.pack(result, runtime.module_numbers, f"the result of module {runtime.names[index]!r}")
        if runtime.buffers[index]:
            # Another microbatch may change a buffer before this value of it is used.
            owned = {b.untyped_storage()._cdata for b in runtime.buffers[index] if not _C.is_remote(b)}
            tensors = [t.clone() if not _C.is_remote(t) and t.untyped_storage()._cdata in owned else t for t in tensors]
        return tree, tensors

    def _contents(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the arguments hold, where they hold objects that a module could change; None where they don't, or that was said."""
        if self._told_of_lost_change or not trees.may_change((*args, *kwargs.values())):
            return None
        tree, tensors = trees.pack((args, kwargs), self._runtime.module_numbers, "arguments")
        return tree, [id(tensor) for tensor in tensors]

    def _warn_of_lost_change(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._told_of_lost_change = True
        kinds = {type(value).__name__ for value in (*args, *kwargs.values()) if trees.may_change((value,))}
        logger.warning(
            "module %r changed an argument (%s): modules get a copy of what is no tensor, so the change is lost. Return what changes; for "
            "the key-value cache of a Hugging Face model pass use_cache=False",
            self._runtime.names[index],
            ", ".join(sorted(kinds)),
        )

    def describe(self, error: BaseException) -> tuple[str, bytes]:
        return describe_error(error)

    def aborted(self, failure: _C.Failure) -> BaseException:
        return StepAborted(failure)


def hooks_of(module: nn.Module) -> tuple[int, ...]:
    """The hooks of a module, by the numbers that they got when they were set."""
    f, p, b, q = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
    return (*f, *p, *b, *q) if f or p or b or q else ()


class Runtime:
    """One partitioned model: its modules by number, their shells, and the engine of this rank.

    Not collective, but every rank must make one for the same model and assignment.
    """

    def __init__(
        self,
        module: nn.Module,
        assignment: Assignment,
        hooks: Mapping[nn.Module, tuple[int, ...]],
        runs: Sequence[tuple[str, Run, int]],
    ) -> None:
        """`hooks`: those that are part of the model, on every rank. `runs`: modules with their name and home that are not in the model's own
        tree, but have children there.
        """
        cfg, topology = state.require_cfg(), state.require_topology()
        named = dict(module.named_modules()) | {name: run for name, run, _ in runs}
        homes_by_name = assignment.home | {name: home for name, _, home in runs}
        self.names = list(named)
        self.modules = list(named.values())
        self.module_numbers = {id(m): i for i, m in enumerate(self.modules)}
        self.subtrees = [list(m.modules()) for m in self.modules]
        self.forwards: list[Callable[..., Any]] = [m.forward for m in self.modules]
        self.home = homes_by_name
        homes = {id(m): self.home[name] for name, m in named.items()}
        self.partition = topology.pp_rank
        self._rng_by_module = cfg.rng_by_module

        owners = Counter(id(p) for m in self.modules for p in m._parameters.values() if p is not None)
        parameters: dict[int, tuple[str, torch.Tensor, int]] = {}
        for name, submodule in named.items():
            for key, parameter in submodule._parameters.items():
                if parameter is not None and id(parameter) not in parameters:
                    full_name = f"{name}.{key}" if name else key
                    parameters[id(parameter)] = (full_name, parameter, self.home[name])
        numbers = {key: i for i, key in enumerate(parameters)}

        infos: list[tuple[Any, ...]] = []
        self.buffers = [list(m.buffers()) for m in self.modules]
        self._inline = []
        self._containers: set[int] = set()
        for name, submodule in named.items():
            # A module without parameters and buffers that nobody placed has no home: it runs where its data lies.
            states = [*submodule.parameters(), *submodule.buffers()]
            container = len({homes[id(m)] for m in submodule.modules()}) > 1
            follows = name != "" and not states and not container and name not in assignment.manual
            owned = sorted({numbers[id(p)] for p in submodule.parameters()})
            has_buffers = bool(self.buffers[len(infos)])
            where = _FOLLOWS_DATA if follows else self.home[name]
            if container:
                self._containers.add(len(infos))
            infos.append((name, where, container, is_dynamic(submodule), has_buffers, owned))
            self._inline.append(container and self.home[name] == self.partition)

        self.parameters = list(parameters.values())
        self.elsewhere = ModuleState(
            (name, named[name]) for name, where, *_ in infos if where not in (_FOLLOWS_DATA, self.partition)
        )
        self._shells = [self._shell(index) for index in range(len(self.modules))]
        self._replaced = ReplacedForwards(zip(self.modules, self._shells, strict=True))
        self._hooks = [hooks.get(m, ()) for m in self.modules]
        self._insides = [[self.module_numbers[id(m)] for m in subtree[1:]] for subtree in self.subtrees]
        self._in_pieces: set[int] = set()
        self._sites: dict[int, Site] = {}
        for full_name, parameter, home in self.parameters:
            if home != self.partition:
                _C.vacate(
                    parameter,
                    f"parameter '{full_name}' lives on partition {home}, not on this rank (partition {self.partition}): read it "
                    "on its own rank (model.local_parameters()), or all together with model.state_dict()",
                )
        self.engine = _C.Engine(
            state.transport,
            _Host(self),
            cfg.pipeline,
            cfg.active_microbatches,
            cfg.stall_timeout,
            cfg.rng_by_module,
            topology.group("pp"),
            infos,
            self.parameters,
            [i for i, (_, p, _) in enumerate(self.parameters) if owners[id(p)] > 1],
            next(_generations),
        )

        self.weight_hooks = WeightHooks(self._issues_call_of)
        whole_model = [parameter for _, parameter, _ in self.parameters]
        self._patches = Patches(*step_patches(self.engine.fetch, whole_model, self.weight_hooks))
        for _, run, _ in runs:
            run.issues = functools.partial(self._issues_call_of, run)

    def _shell(self, index: int) -> Callable[..., Any]:
        """`forward` of a module: issues an instruction in the frame of a container, else runs as ever."""
        original, module = self.forwards[index], self.modules[index]
        run_here = with_own_stream(original) if self._rng_by_module else original
        inline = self._inline[index]
        in_frame = _C.in_frame

        def call(*args: Any, **kwargs: Any) -> Any:
            if inline or not in_frame() or self._is_hooked_inside(index):
                return forward_here(module, run_here, args, kwargs)
            return self._call(index, args, kwargs)

        forward = ForwardOf(module, call)
        forward.smp_looks = True
        return forward

    def forward_of_call(self, index: int, mark: bytes) -> Callable[..., Any]:
        """What a call of a module runs here: its forward, as a region where the caller asked for that. Where the module is split, what it
        calls is asked in turn.
        """
        forward, module = self.forwards[index], self.modules[index]
        request = asked.Request.of_mark(mark)
        if request is not None and isinstance(module, nn.Sequential):
            return functools.partial(call_stack_here, module, request=request, name=self.names[index])
        if mark == asked.NO_REGION or isinstance(forward, RegionForward):
            return forward
        if index in self._containers:
            return asked.asking(mark)(forward)
        site = self._sites.get(index)
        if site is None:
            site = self._sites[index] = Site(f"module {self.names[index]!r}", [module])
        return lambda *args, **kwargs: run_region(site, forward, args, kwargs, mark == asked.REGION)

    def _issues_call_of(self, module: nn.Module) -> bool:
        index = self.module_numbers.get(id(module))
        return index is not None and not self._inline[index] and _C.in_frame() and not self._is_hooked_inside(index)

    def _is_hooked_inside(self, index: int) -> bool:
        """Has code of this rank hooked into a module inside this one since the model was distributed? Its home knows nothing of that,
        so the module then runs in pieces: its `forward` is glue, the hooked module a call of its own, and the hook sees its result.
        """
        modules, known, shells = self.modules, self._hooks, self._shells
        for i in self._insides[index]:
            module = modules[i]
            if hooks_of(module) != known[i] or module.__dict__.get("forward") is not shells[i]:
                if index not in self._in_pieces:
                    self._in_pieces.add(index)
                    self.elsewhere.forget(self.modules[index])
                    logger.info(
                        "module %r runs in pieces, each a call of its own, because of a hook in %r that was set after the model was "
                        "distributed (to capture outputs, say)",
                        self.names[index],
                        self.names[i],
                    )
                return True
        return False

    def _call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _functorch.peek_interpreter_stack() is not None:
            raise SMPUsageError(
                f"module {self.names[index]!r} was called inside torch.func.grad, vmap or another transform, but it runs on another rank or "
                "thread, which knows nothing of the transform: use the transform inside one module"
            )
        tree, tensors = trees.pack(
            (args, kwargs), self.module_numbers, f"the arguments of module {self.names[index]!r}"
        )
        training = bytes([m.training for m in self.subtrees[index]]) + asked.mark()
        tree, tensors = self.engine.call(index, tree, tensors, training)
        return trees.unpack(tree, tensors, self.modules)

    def update_dynamic(self, changed: nn.Module) -> None:
        """For a mark that was set after the model was distributed."""
        for index, subtree in enumerate(self.subtrees):
            if any(module is changed for module in subtree):
                self.engine.set_dynamic(index, is_dynamic(self.modules[index]))

    def close(self) -> None:
        """Stops the engine and gives the modules their own `forward` back. Vacated parameters stay vacated."""
        self.engine.close()
        self._replaced.close()
        self._patches.close()
