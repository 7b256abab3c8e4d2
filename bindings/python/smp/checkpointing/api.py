"""`checkpoint`, `checkpoint_sequential` and `set_activation_checkpointing`."""

import contextlib
import functools
import inspect
import types
import weakref
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.modules import module as module_globals

from .. import _C
from ..exceptions import SMPUsageError
from ..log import logger
from ..random import with_own_stream
from ..state import state
from .asked import Request, asking, region_mark
from .hooked import call_with_region
from .plan import Plan, call_stack_here, is_plain_sequential, is_region, is_stack, site_on
from .region import Site, run
from .stack import check_strategy

_OF_PYTORCH = frozenset(("use_reentrant", "context_fn", "determinism_check", "debug", "early_stop"))
_sites: "weakref.WeakKeyDictionary[Any, Site]" = weakref.WeakKeyDictionary()


def _plan() -> Plan | None:
    return None if state.model is None else state.model.checkpoints


def checkpoint(module: Callable[..., Any], *args: Any, preserve_rng_state: bool = True, **kwargs: Any) -> Any:
    """Calls a module without keeping what its backward needs: its inputs are kept, and it runs again when backward comes to it.

    To be used in a module's forward. The module lies on one partition with all below it, and runs again where it lives, once for each
    backward. Results and gradients are bit for bit those of a plain call. Hooks of the module run once, buffers that it changes
    (batch norm statistics) end as after one call, and random numbers are drawn again. Code of the module that must not run twice (a
    counter outside of modules, a log) asks `smp.checkpointing.is_recomputing()`.

    Args:
        module: a module, or any callable.
        *args, **kwargs: its arguments; any tree. Tensors must not be changed in place until backward, which is checked.
        preserve_rng_state: False saves the time to keep random states, for modules that draw no random numbers.

    Returns:
        what the module returns, its structure untouched.

    Raises:
        SMPUsageError: the module is split over partitions that were set by hand (a warning, and a plain call, where they were not); and in
            backward, an input was changed in place or the module did not do the same again.

    Example:
        >>> x = smp.checkpointing.checkpoint(self.fc1, x)
    """
    if not callable(module):
        raise SMPUsageError(f"checkpoint got {type(module).__name__}: it takes a module and its arguments")
    _check_arguments(preserve_rng_state, module, kwargs)
    owner = module if isinstance(module, nn.Module) else getattr(module, "__self__", None)
    # Another method of a module is a function like any other.
    is_module = owner is module or getattr(module, "__name__", "") in ("forward", "__call__")
    if _C.in_frame():
        plan = _plan()
        if plan is not None and is_module and isinstance(owner, nn.Module) and not plan.may_be_region(owner):
            return module(*args, **kwargs)
        with asking(region_mark(preserve_rng_state)):
            return module(*args, **kwargs)
    if isinstance(owner, nn.Module) and getattr(module, "__func__", None) is type(owner).__call__:
        module = owner
    if not isinstance(module, nn.Module):
        return run(_site_of_function(module, args, kwargs), module, args, kwargs, preserve_rng_state)
    if is_region(module):
        return module(*args, **kwargs)
    site = _site_of_module(module)
    if type(module).__call__ is nn.Module.__call__ and not _has_hooks(module):
        return run(site, module.forward, args, kwargs, preserve_rng_state)
    return call_with_region(module, site, preserve_rng_state, args, kwargs)


def _check_flag(preserve_rng_state: bool) -> None:
    if not isinstance(preserve_rng_state, bool):
        raise SMPUsageError(
            f"preserve_rng_state got {type(preserve_rng_state).__name__}: it is True or False; name the other arguments (strategy=...)"
        )


def _check_arguments(preserve_rng_state: bool, module: Callable[..., Any], kwargs: dict[str, Any]) -> None:
    """Refuses what `torch.utils.checkpoint.checkpoint` takes and this does not."""
    _check_flag(preserve_rng_state)
    if kwargs.keys().isdisjoint(_OF_PYTORCH):
        return
    known: set[str] = set()
    with contextlib.suppress(ValueError):  # written in C
        known.update(inspect.signature(module.forward if isinstance(module, nn.Module) else module).parameters)
    foreign = sorted(kwargs.keys() & _OF_PYTORCH - known)
    if foreign:
        raise SMPUsageError(
            f"checkpoint got {', '.join(foreign)}: arguments of torch.utils.checkpoint, which mean nothing here; leave them out (shapes and dtypes "
            "are checked always, values with smp.checkpointing.verify())"
        )


def _has_hooks(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module_globals._global_forward_hooks
        or module_globals._global_forward_pre_hooks
        or module_globals._global_backward_hooks
        or module_globals._global_backward_pre_hooks
    )


def _site_of_module(module: nn.Module) -> Site:
    plan = _plan()
    name = None if plan is None else plan.name(module)
    return site_on(
        module, "_smp_site", lambda: Site(f"module {name!r}" if name else f"a {type(module).__name__}", [module])
    )


def _modules_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[nn.Module]:
    """The modules that a function may call: its owner, those it closes over or names, and its arguments."""
    found: list[Any] = [*args, *kwargs.values()]
    while isinstance(function, functools.partial):
        found += [*function.args, *function.keywords.values()]
        function = function.func
    found += [function, getattr(function, "__self__", None)]
    function = getattr(function, "__func__", function)
    if isinstance(function, types.FunctionType):
        for cell in function.__closure__ or ():
            with contextlib.suppress(ValueError):  # not filled yet
                found.append(cell.cell_contents)
        found += [function.__globals__.get(name) for name in function.__code__.co_names]
    return list(dict.fromkeys(m for m in found if isinstance(m, nn.Module)))


def _site_of_function(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Site:
    modules = _modules_of(function, args, kwargs)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    if modules:
        line = getattr(getattr(function, "__code__", None), "co_firstlineno", 0)
        key = f"_smp_site_{name}_{line}_" + "_".join(str(id(m)) for m in modules)
        return site_on(modules[0], key, lambda: Site(f"function {name!r}", modules))
    code: Any = getattr(function, "__code__", type(function))
    site = _sites.get(code)
    if site is None:
        site = _sites[code] = Site(f"function {name!r}", [])
    return site


def checkpoint_sequential(
    sequential: nn.Sequential,
    input: Any,
    strategy: str = "each",
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
) -> Any:
    """Calls a stack of layers in regions, each of which keeps its input only and runs again for backward.

    Args:
        sequential: the layers. Each lies on one partition with all below it; the stack may be spread over several.
        input: a tensor, or a tuple.
        strategy: which neighbours of one partition are a region: 'each' layer alone, 'contiguous' all of them, 'group_N' up to N.
        preserve_rng_state: see `checkpoint`.
        pack_args_as_tuple: True: a tuple reaches a layer as one argument. False: as its arguments, where its forward takes that many.

    Returns:
        what the last layer returns.

    Raises:
        SMPUsageError: no `nn.Sequential`, an unknown strategy, or a layer that is split over partitions that were set by hand.

    Example:
        >>> x = smp.checkpointing.checkpoint_sequential(self.seq, x, strategy="group_2")
    """
    _check_flag(preserve_rng_state)
    if not is_plain_sequential(sequential):
        raise SMPUsageError(
            f"checkpoint_sequential got {type(sequential).__name__}: it takes an nn.Sequential (with its own forward); call other modules by "
            "smp.checkpointing.checkpoint(module, x)"
        )
    request = Request(preserve_rng_state, pack_args_as_tuple, check_strategy(strategy))
    plan = _plan()
    if plan is None or plan.name(sequential) is None:
        return with_own_stream(call_stack_here)(sequential, input, request, "")
    if _C.in_frame() and plan.placement.home(sequential) is not None:
        with asking(request.mark_of_stack()):
            return sequential(input)
    return with_own_stream(plan.call_stack)(sequential, input, request)


def set_activation_checkpointing(
    module: nn.Module,
    preserve_rng_state: bool = True,
    pack_args_as_tuple: bool = False,
    strategy: str = "each",
) -> None:
    """Checkpoints a module of the distributed model in every call, as `checkpoint` would: for models whose code stays as it is.

    To be called on every rank, after `smp.DistributedModel(...)` and before the first step. The log of the partition lists the regions.

    Args:
        module: any module of the model, or a stack (`nn.Sequential`, `nn.ModuleList`, also as `…seq_layers`), whose layers are checkpointed.
        preserve_rng_state: see `checkpoint`.
        pack_args_as_tuple, strategy: for an `nn.Sequential`, see `checkpoint_sequential`. Layers of an `nn.ModuleList` are called by their
            parent, so each is a region.

    Raises:
        SMPUsageError: no distributed model, a module that is not in it, a model that is partitioned already, options that the module does not
            take. When the model is partitioned: a module that is split over partitions that were set by hand.

    Example:
        >>> model = smp.DistributedModel(GPT2LMHeadModel(config))
        >>> smp.set_activation_checkpointing(model.module.transformer.h, strategy="each")
    """
    _check_flag(preserve_rng_state)
    if not isinstance(module, nn.Module):
        raise SMPUsageError(f"set_activation_checkpointing got {type(module).__name__}: it takes a module of the model")
    model: Any = state.model
    if model is None:
        raise SMPUsageError(
            "set_activation_checkpointing was called before smp.DistributedModel(...): wrap the model first"
        )
    plan: Plan = model.checkpoints
    root: nn.Module = model.module
    if module is model:
        module = root
    name = plan.name(module)
    if name is None:
        raise SMPUsageError(
            f"set_activation_checkpointing got a {type(module).__name__} that is not in the model: it takes a module of the DistributedModel "
            "(model.module...)"
        )
    limit = check_strategy(strategy)
    shown = f"module {name!r} ({type(module).__name__})"
    if not is_stack(module) and (pack_args_as_tuple or limit != 1):
        given = f"strategy={strategy!r}" if limit != 1 else "pack_args_as_tuple=True"
        raise SMPUsageError(
            f"set_activation_checkpointing got {given} for {shown}, which is no stack of layers: leave it out"
        )
    if is_stack(module) and not is_plain_sequential(module) and limit != 1 and state.require_topology().rank == 0:
        logger.warning(
            "%s calls its layers itself or through its parent, so each of them is checkpointed alone: strategy=%r has no effect",
            shown,
            strategy,
        )
    model.request_checkpointing(module, Request(preserve_rng_state, pack_args_as_tuple, limit))
