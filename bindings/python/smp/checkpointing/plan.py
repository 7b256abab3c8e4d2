"""What `set_activation_checkpointing` asked for of a model, and the regions that this gives once its modules have homes."""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeGuard

from torch import nn

from .. import _C
from ..exceptions import SMPUsageError
from ..forwards import ForwardOf, ReplacedForwards
from ..log import logger
from .asked import Request, asking, region_mark
from .region import Site, run
from .stack import Run, call_layer, chain, groups


def is_plain_sequential(module: nn.Module) -> TypeGuard[nn.Sequential]:
    """Calls its layers one after another, and nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def is_stack(module: nn.Module) -> bool:
    """Is it checkpointed layer by layer?"""
    return isinstance(module, nn.Sequential | nn.ModuleList | nn.ModuleDict)


def site_on(module: nn.Module, key: str, make: Callable[[], Site]) -> Site:
    """A site that lives and dies with the module. Copies of the module make their own."""
    site = module.__dict__.get(key)
    if site is None:
        site = module.__dict__[key] = make()
    return site


class RegionForward(ForwardOf):
    """`forward` of a module, as a region in every call."""

    def __init__(self, module: nn.Module, site: Site, preserve_rng_state: bool) -> None:
        forward = module.forward
        super().__init__(module, lambda *args, **kwargs: run(site, forward, args, kwargs, preserve_rng_state))


def is_region(module: nn.Module) -> bool:
    """Is the module's own forward checkpointed already?"""
    forward = module.__dict__.get("forward")
    while forward is not None and not isinstance(forward, RegionForward):
        forward = getattr(forward, "__wrapped__", None)
    return forward is not None


class Placement:
    """Where modules are, for the rule that a region lies on one partition.

    Args:
        names: of all modules of the model.
        homes: partition of each module by name; empty with one partition.
        by_hand: the user placed the modules: a region that is split is then an error.
    """

    def __init__(self, names: Mapping[nn.Module, str], homes: Mapping[str, int], by_hand: bool) -> None:
        self.names, self._homes, self._by_hand = names, homes, by_hand
        self._told: set[nn.Module] = set()
        self._known: dict[nn.Module, int | None] = {}

    def home(self, module: nn.Module) -> int | None:
        """The one partition of a module with all below it, None where it is split."""
        if module not in self._known:
            homes = {self._homes.get(self.names[m], 0) for m in module.modules() if m in self.names}
            self._known[module] = homes.pop() if len(homes) == 1 else None
        return self._known[module]

    def check(self, module: nn.Module) -> int | None:
        """`home`; a split module is an error where it was placed by hand, and a warning, once, where it was not.

        Raises:
            SMPUsageError: as said.
        """
        home = self.home(module)
        if home is None and module not in self._told:
            name = self.names[module]
            shown = f"module {name!r}" if name else "the model"
            own = self._homes[name]
            below = {self.names[m]: self._homes[self.names[m]] for m in module.modules() if m in self.names}
            others = [
                f"{key!r} on {value}"
                for key, value in below.items()
                if value != own and below.get(key.rpartition(".")[0], own) != value
            ]
            more = f" and {len(others) - 3} more" if len(others) > 3 else ""
            text = (
                f"{shown} can't be checkpointed, since it is split over partitions {sorted(set(below.values()))}: it is on {own}, but "
                f"{', '.join(others[:3])}{more}. A checkpointed module lies on one partition with all below it: checkpoint its children instead"
            )
            if self._by_hand:
                raise SMPUsageError(f"{text}, or place them together with smp.set_partition")
            self._told.add(module)
            text += "; it runs without checkpointing"
            warnings.warn(text, stacklevel=2)
            logger.warning("%s", text)
        return home


class Plan:
    """The checkpointing of one model."""

    def __init__(self, model: nn.Module) -> None:
        self._names = {module: name for name, module in model.named_modules()}
        self._requests: dict[nn.Module, Request] = {}
        self._replaced: ReplacedForwards | None = None
        self._runs: list[tuple[str, Run, int]] = []
        self._run_of: dict[nn.Module, list[tuple[range, Run]]] = {}
        self.placement = Placement(self._names, {}, by_hand=False)
        self.regions: list[tuple[int, str]] = []

    def name(self, module: nn.Module) -> str | None:
        return self._names.get(module)

    def may_be_region(self, module: nn.Module) -> bool:
        """False for a module of the model that is split. Raises SMPUsageError where it was placed by hand."""
        return module not in self._names or self.placement.check(module) is not None

    def request(self, module: nn.Module, request: Request) -> None:
        self._requests[module] = request

    def place(self, homes: Mapping[str, int], by_hand: bool) -> None:
        """Decides the regions.

        Raises:
            SMPUsageError: a module that the user placed by hand is split.
        """
        self.placement = Placement(self._names, homes, by_hand)
        self._make_runs(homes)
        self.install()

    def install(self) -> None:
        """Gives the modules their checkpointed `forward`."""
        self.close()
        replacements: dict[nn.Module, Callable[..., Any]] = {}
        self.regions = []
        for module, request in self._requests.items():
            if is_plain_sequential(module):
                replacements |= self._of_sequential(module, request)
            else:
                for layer in module.children() if is_stack(module) else [module]:
                    replacements |= self._of_module(layer, request)
        self.regions = list(dict.fromkeys(self.regions))
        self._replaced = ReplacedForwards(replacements.items())

    def close(self) -> None:
        """Gives the modules their own `forward` back."""
        if self._replaced is not None:
            self._replaced.close()
            self._replaced = None

    def runs(self) -> Sequence[tuple[str, Run, int]]:
        """Modules beside those of the model: neighbours in split stacks, which a region may hold together."""
        return self._runs

    def _of_module(self, module: nn.Module, request: Request) -> dict[nn.Module, Callable[..., Any]]:
        home = self.placement.check(module)
        if home is None:
            return {}
        name = self._names[module]
        self.regions.append((home, name or "the whole model"))
        site = Site(f"module {name!r}" if name else "the model", [module])
        return {module: RegionForward(module, site, request.preserve_rng_state)}

    def _of_sequential(self, stack: nn.Sequential, request: Request) -> dict[nn.Module, Callable[..., Any]]:
        layers = list(stack)
        homes = [self.placement.check(layer) for layer in layers]
        replacements: dict[nn.Module, Callable[..., Any]] = {}
        for group in groups(homes, request.limit):
            if len(group) == 1:
                replacements |= self._of_module(layers[group[0]], request)
            else:
                home = homes[group[0]]
                first, last = self._names[layers[group[0]]], self._names[layers[group[-1]]]
                self.regions.append((0 if home is None else home, f"{first} to {last.rpartition('.')[2]}"))

        def forward(value: Any) -> Any:
            return self.call_stack(stack, value, request)

        return replacements | {stack: ForwardOf(stack, forward)}

    # ---- stacks

    def _make_runs(self, homes: Mapping[str, int]) -> None:
        for stack, name in self._names.items():
            if not is_plain_sequential(stack) or self.placement.home(stack) is not None:
                continue
            layers = list(stack)
            places = [self.placement.home(layer) for layer in layers]
            for group in groups(places, None):
                # Layers that share parameters are calls of their own: the order in which gradients add up would be another one.
                owned = [p for i in group for p in layers[i].parameters()]
                if len(group) > 1 and len(owned) == len({id(p) for p in owned}):
                    run_of_layers = Run([layers[i] for i in group], name or "the model", group.start)
                    self._runs.append(
                        (f"{name}[{group.start}:{group.stop}]", run_of_layers, homes[self._names[layers[group.start]]])
                    )
                    self._run_of.setdefault(stack, []).append((group, run_of_layers))

    def call_stack(self, stack: nn.Sequential, value: Any, request: Request) -> Any:
        """Runs a stack, in regions."""
        if not _C.in_frame():
            return call_stack_here(stack, value, request, self._names.get(stack, "") or "the model")
        layers = list(stack)
        homes = [self.placement.check(layer) for layer in layers]
        for group in groups(homes, request.limit):
            whole = homes[group.start] is not None
            value = self._call_group(stack, [layers[i] for i in group], group, value, request, whole)
        return value

    def _call_group(
        self, stack: nn.Sequential, layers: list[nn.Module], group: range, value: Any, request: Request, whole: bool
    ) -> Any:
        if not whole:
            return chain(layers, value, request.pack_args_as_tuple)
        for those, run_module in self._run_of.get(stack, []) if len(group) > 1 else []:
            if those.start <= group.start and group.stop <= those.stop and run_module.issues():
                first, last = group.start - those.start, group.stop - those.start
                return run_module.call(value, first, last, request.preserve_rng_state, request.pack_args_as_tuple)
        with asking(region_mark(request.preserve_rng_state)):
            return chain(layers, value, request.pack_args_as_tuple)


def call_stack_here(stack: nn.Sequential, value: Any, request: Request, name: str) -> Any:
    """Runs a stack in this process, in regions."""
    layers = list(stack)
    for group in groups([0] * len(layers), request.limit):
        members = [layers[i] for i in group]
        if len(group) == 1 and is_region(members[0]):
            value = call_layer(members[0], value, request.pack_args_as_tuple)
            continue
        where = f"layers {group.start} to {group.stop - 1}" if len(group) > 1 else f"layer {group.start}"
        key = f"_smp_site_{group.start}_{group.stop}"
        site = site_on(stack, key, functools.partial(Site, f"{where} of {name or 'a stack'}", members))
        value = run(site, chain, (members, value, request.pack_args_as_tuple), {}, request.preserve_rng_state)
    return value
