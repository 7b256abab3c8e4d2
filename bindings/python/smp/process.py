"""`smp.init`: joins the ranks of a launch, and leaves them at the end of the process."""

import atexit
import os
import sys
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from . import _C, communication, rendezvous
from .config import load_config
from .exceptions import SMPUsageError
from .launchers import find_launch
from .state import state

# A rank that fails stays so long, that the others can say what they know before the launcher ends them.
_LAST_WORDS_S = 1.0


class _Process:
    """What lives as long as the process: the transport (MPI can be started once only) and whether the script failed."""

    def __init__(self) -> None:
        self.transport: _C.Transport | None = None
        self.communicator: _C.Communicator | None = None
        self.pid = os.getpid()
        self.started = False
        self.failed = False

    def start(self) -> None:
        if self.started:
            return
        launch = find_launch()
        if launch.size > 1:
            self.transport = _C.make_mpi_transport() if launch.store is None else rendezvous.connect(launch)
            self.communicator = _C.Communicator(self.transport)
        self.started = True
        previous = sys.excepthook

        def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> Any:
            self.failed = True
            previous(kind, error, trace)

        sys.excepthook = hook
        atexit.register(self.stop)

    def stop(self) -> None:
        """Leaves the launch: collective when the script went well, alone when it did not."""
        if os.getpid() != self.pid:  # a forked process, of a DataLoader say, is no rank
            return
        if state.model is not None:
            state.model.close()
        if self.transport is None or self.communicator is None:
            return
        if self.failed:
            time.sleep(_LAST_WORDS_S)
            self.transport.abandon()
        else:
            self.communicator.leave()
            self.transport.close()


_process = _Process()


def mark_failed() -> None:
    """For whoever catches what a script raised: the process then leaves the launch as after an error."""
    _process.failed = True


def init(config: Mapping[str, Any] | None = None) -> None:
    """Reads the configuration and joins the other ranks of the launch. Collective; the first library call of a script.

    Args:
        config: configuration keys. Those in the environment variable SM_HP_MP_PARAMETERS (JSON) win over them.

    Raises:
        SMPConfigError: a value is not allowed. The message gives key, value, rule and remedy, on every rank.
        SMPUsageError: the number of ranks does not fit the configuration, or smp is initialised already.

    Example:
        >>> smp.init({"partitions": 2, "microbatches": 8})
    """
    if state.initialized:
        raise SMPUsageError(
            "smp.init was called twice: once is enough; smp.shutdown() forgets the model and the configuration before another"
        )
    cfg = load_config(config)
    _process.start()
    transport = _process.transport
    rank, size = (transport.rank, transport.size) if transport is not None else (0, 1)
    state.topology = _C.Topology(rank, size, cfg.partitions, cfg.tensor_parallel_degree, cfg.placement_strategy)
    state.cfg = cfg
    if transport is not None:
        state.transport = transport
        state.communicator = _process.communicator


def shutdown() -> None:
    """Forgets the model and the configuration, so that `smp.init` can be called again. Collective.

    The ranks stay joined; they part at the end of the process.
    """
    if not state.initialized:
        return
    communication.barrier()
    if state.model is not None:
        state.model.close()
    communication.barrier()
    state.__init__()  # type: ignore[misc]
