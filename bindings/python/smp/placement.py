"""Which partition each module of a model is placed on: by hand, or balanced automatically.

By hand means `auto_partition: False` and marks, set by `smp.partition(i)` around the creation of modules or by
`smp.set_partition(module, i)` afterwards. Otherwise marks are ignored and the model is split so that the partitions
hold about the same number of parameter bytes.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from . import _C
from .checkpointing.plan import Plan
from .config import Config
from .exceptions import SMPUsageError
from .log import logger
from .state import state
from .torch_patches import Patch, Patches, reached, reaches

# Kept in the module's own __dict__, so that a deep copy or an unpickled module keeps it.
_MARK = "_smp_partition"
_NOT_MARKED = -1
# A line of the report names this many runs of modules at most; the full map is in `PartitionReport.assignment`.
_MAX_NAMES = 16


@dataclass(frozen=True)
class PartitionSummary:
    """One partition of a report.

    Attributes:
        index: the partition.
        modules: its topmost modules: those that lie there with all that is below them, while their parent does not.
            Runs are collapsed (`transformer.h.0-5`). A module that is split over partitions appears as
            `name (own parameters)` where it owns parameters itself.
        parameters: number of parameter elements; a shared parameter counts once.
        share: their part of the model's parameters, 0 to 1.
        regions: the modules that are checkpointed there by `smp.set_activation_checkpointing`, collapsed in the same way.
    """

    index: int
    modules: tuple[str, ...]
    parameters: int
    share: float
    regions: tuple[str, ...] = ()

    def __str__(self) -> str:
        checkpointed = f" | checkpointed: {_shorten(self.regions)}" if self.regions else ""
        return (
            f"partition {self.index}: {_shorten(self.modules) or 'no modules'} | "
            f"{self.parameters:,} parameters, {self.share:.1%}{checkpointed}"
        )


def _shorten(names: tuple[str, ...]) -> str:
    more = [f"and {len(names) - _MAX_NAMES} more"] if len(names) > _MAX_NAMES else []
    return ", ".join([*names[:_MAX_NAMES], *more])


@dataclass(frozen=True)
class PartitionReport:
    """Where the modules of a model went. `str()` gives the block that is logged.

    Attributes:
        partitions: one summary for each partition, in order.
        assignment: the partition of each module, by its name in `named_modules()`; '' is the model itself.
    """

    partitions: tuple[PartitionSummary, ...]
    assignment: dict[str, int]

    def __str__(self) -> str:
        return "\n".join(["Partition assignments:", *(f"  {summary}" for summary in self.partitions)])


@dataclass(frozen=True)
class Assignment:
    """The decision where each module lives.

    Attributes:
        home: the partition of each module, by its name in `named_modules()`; '' is the model itself.
        manual: the modules that carry a mark of the user which was followed.
        report: the same for people.
    """

    home: dict[str, int]
    manual: set[str]
    report: PartitionReport


# Marks by hand.


class _OpenContexts(threading.local):
    """The partitions of the `smp.partition` contexts that this thread is in, innermost last."""

    def __init__(self) -> None:
        self.indices: list[int] = []


_contexts = _OpenContexts()


class _MarkedInit(Patch):
    """`nn.Module.__init__` marks the module for the innermost `smp.partition` context that this thread is in."""

    def __init__(self, mark: Callable[[nn.Module], None]) -> None:
        self._mark = mark

    def replacements(self) -> dict[str, Callable[[Any], Any]]:
        return {"torch.nn:Module.__init__": self._over_init}

    def _over_init(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def marking_init(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            self._mark(module)

        return marking_init

    @classmethod
    def rehearsal(cls) -> "_MarkedInit":
        return cls(reached)

    def examples(self) -> dict[str, Callable[[], bool]]:
        return {"torch.nn.Module()": lambda: reaches(nn.Module)}


def _mark(module: nn.Module) -> None:
    if _contexts.indices:
        module.__dict__[_MARK] = _contexts.indices[-1]


class _InitHook:
    """Replaces `nn.Module.__init__` while any thread is inside `smp.partition`, so that it costs nothing outside."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._patches: Patches | None = None
        self._replacement: Any = None

    def acquire(self) -> None:
        with self._lock:
            if self._users == 0:
                self._patches = Patches(_MarkedInit(_mark))
                self._replacement = nn.Module.__init__
            self._users += 1

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            # Somebody else's later hook stays: it may still call ours, which marks nothing outside of contexts.
            if self._users == 0 and self._patches is not None and nn.Module.__init__ is self._replacement:
                self._patches.close()


_init_hook = _InitHook()


def _check_index(index: int, call: str) -> None:
    if isinstance(index, bool) or not isinstance(index, int) or index < 0:
        raise SMPUsageError(f"{call} got the partition {index!r}: it must be an integer of at least 0")
    if state.cfg is not None and index >= state.cfg.partitions:
        raise SMPUsageError(
            f"{call} got the partition {index}: it must be below the number of partitions, {state.cfg.partitions}; "
            "use a lower one or set partitions higher"
        )


@contextmanager
def _marking(index: int) -> Iterator[None]:
    _init_hook.acquire()
    _contexts.indices.append(index)
    try:
        yield
    finally:
        _contexts.indices.pop()
        _init_hook.release()


def partition(index: int) -> AbstractContextManager[None]:
    """Context manager: modules created inside (by this thread) go to partition `index`; the innermost context wins.

    Followed when the configuration has `auto_partition: False`, ignored otherwise. Modules that are created outside
    of any context inherit the place of their nearest marked ancestor, or go to `default_partition`.

    Raises:
        SMPUsageError: `index` is no integer from 0 to partitions - 1 (checked here once smp is initialised).

    Example:
        >>> with smp.partition(1):
        ...     self.decoder = nn.Linear(512, 10)
    """
    _check_index(index, "smp.partition")
    return _marking(index)


def set_partition(module: nn.Module, index: int) -> None:
    """Places a module that exists on partition `index`, with all below it that is not marked itself.

    Like `smp.partition`, for models that are created elsewhere. To be called before the model is partitioned. Followed when the
    configuration has `auto_partition: False`.

    Raises:
        SMPUsageError: `module` is no module, `index` is out of range, or the model is partitioned already.

    Example:
        >>> for i, block in enumerate(model.transformer.h):
        ...     smp.set_partition(block, 0 if i < 6 else 1)
    """
    if not isinstance(module, nn.Module):
        raise SMPUsageError(f"smp.set_partition got {type(module).__name__}: it must be a torch.nn.Module")
    _check_index(index, "smp.set_partition")
    if getattr(state.model, "partitioned", False):
        raise SMPUsageError(
            "smp.set_partition was called after the model was partitioned: call it before the first step"
        )
    module.__dict__[_MARK] = index


# The decision.


def _parent_name(name: str) -> str:
    return name.rpartition(".")[0]


def _make_tree(modules: dict[str, nn.Module]) -> "_C.ModuleTree":
    """The module tree in the order of registration, which stands for the order of execution."""
    tree = _C.ModuleTree()
    numbers: dict[str, int] = {}
    for name, module in modules.items():
        parameters = []
        for parameter_name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if is_lazy(parameter):
                raise SMPUsageError(
                    f"the parameter {parameter_name!r} of module {name!r} ({type(module).__name__}) has no shape yet: "
                    "the partition needs its size; run the model once before wrapping it"
                )
            parameters.append((id(parameter), parameter.numel() * parameter.element_size()))
        numbers[name] = tree.add(name, numbers[_parent_name(name)] if name else -1, parameters)
    return tree


def assign(module: nn.Module, cfg: Config, checkpoints: Plan | None = None) -> Assignment:
    """Decides the partition of each module. Every rank comes to the same decision by itself; nothing communicates.

    The report becomes `smp.get_partition_report()`; rank 0 logs it.

    Args:
        checkpoints: is told where modules are, and gives the report its regions.

    Raises:
        SMPUsageError: marks are out of range or split modules that share a parameter, a parameter has no shape yet, or a module that is
            placed by hand and to be checkpointed is split.
    """
    modules = dict(module.named_modules())
    tree = _make_tree(modules)
    manual: set[str] = set()
    marked = [name for name, submodule in modules.items() if submodule.__dict__.get(_MARK, _NOT_MARKED) != _NOT_MARKED]
    if cfg.auto_partition and marked and (state.topology is None or state.topology.rank == 0):
        logger.warning(
            "%d modules are placed by hand (%r first), which has no effect while auto_partition is True: set auto_partition to False in smp.init",
            len(marked),
            marked[0],
        )
    if cfg.auto_partition:
        homes = _C.partition_tree(tree, cfg.partitions, cfg.memory_weight)
    else:
        marks = [submodule.__dict__.get(_MARK, _NOT_MARKED) for submodule in modules.values()]
        homes = _C.place_by_hand(tree, marks, cfg.default_partition, cfg.partitions)
        manual = {name for name, mark in zip(modules, marks, strict=True) if mark != _NOT_MARKED}
    home = dict(zip(modules, homes, strict=True))

    if checkpoints is not None:
        checkpoints.place(home, by_hand=not cfg.auto_partition)
    report = make_report(modules, home, cfg.partitions, checkpoints.regions if checkpoints is not None else ())
    state.partition_report = report
    if state.topology is None or state.topology.rank == 0:
        _log(report)
    return Assignment(home, manual, report)


# The report.


def _collapse(names: list[str]) -> tuple[str, ...]:
    """Joins runs of numbered siblings: `h.0`, `h.1`, `h.2` become `h.0-2`."""

    def run_key(item: tuple[int, str]) -> tuple[Any, ...]:
        position, name = item
        prefix, _, last = name.rpartition(".")
        # Within a run, number and position grow together.
        return (prefix, int(last) - position) if last.isdecimal() else (name,)

    result = []
    for _, items in itertools.groupby(enumerate(names), key=run_key):
        run = [name for _, name in items]
        result.append(run[0] if len(run) == 1 else f"{run[0]}-{run[-1].rpartition('.')[2]}")
    return tuple(result)


def _topmost_modules(modules: dict[str, nn.Module], home: dict[str, int], partitions: int) -> list[list[str]]:
    """For each partition the modules that lie there as a whole while their parent is split, and split owners."""
    is_whole = dict.fromkeys(modules, True)
    for name in reversed(modules):
        parent = _parent_name(name)
        if name and (not is_whole[name] or home[name] != home[parent]):
            is_whole[parent] = False

    result: list[list[str]] = [[] for _ in range(partitions)]
    for name, module in modules.items():
        if name and is_whole[_parent_name(name)]:
            continue
        if is_whole[name]:
            result[home[name]].append(name or "the whole model")
        elif any(parameter is not None for parameter in module._parameters.values()):
            result[home[name]].append(f"{name or 'the model'} (own parameters)")
    return result


def make_report(
    modules: dict[str, nn.Module], home: dict[str, int], partitions: int, regions: Sequence[tuple[int, str]] = ()
) -> PartitionReport:
    """Sums up where modules went. A parameter counts once, at the first module that owns it. `regions`: partition and name."""
    counts = [0] * partitions
    seen: set[int] = set()
    for name, module in modules.items():
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                counts[home[name]] += parameter.numel()
    total = max(sum(counts), 1)
    names = _topmost_modules(modules, home, partitions)
    checkpointed = [_collapse([name for where, name in regions if where == i]) for i in range(partitions)]
    summaries = (
        PartitionSummary(i, _collapse(names[i]), count, count / total, checkpointed[i])
        for i, count in enumerate(counts)
    )
    return PartitionReport(tuple(summaries), dict(home))


def _log(report: PartitionReport) -> None:
    logger.info("%s", report)
    logger.debug("%s", "\n".join(f"{name or 'the model'}: {home}" for name, home in report.assignment.items()))
    empty = [summary.index for summary in report.partitions if summary.parameters == 0]
    if empty:
        logger.warning(
            "partitions without parameters: %s of %d; their ranks have nothing to hold. Set partitions lower, or place "
            "modules on them",
            ", ".join(map(str, empty)),
            len(report.partitions),
        )


def get_partition_report() -> PartitionReport:
    """Where the modules of the model went.

    Raises:
        SMPUsageError: no model has been partitioned yet.

    Example:
        >>> smp.get_partition_report().assignment["transformer.h.11"]
        1
    """
    if state.partition_report is None:
        raise SMPUsageError("no model has been partitioned yet: the first step does it; ask after that")
    return state.partition_report
