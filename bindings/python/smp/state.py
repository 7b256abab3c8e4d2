"""What the process knows after `smp.init`: one object, `smp.state`."""

from typing import TYPE_CHECKING, Any

from .exceptions import SMPUsageError

if TYPE_CHECKING:
    from . import _C
    from .config import Config
    from .placement import PartitionReport


class State:
    """The one model-parallel job of this process. All attributes are None before `smp.init`.

    Attributes:
        cfg: the effective configuration; `smp.state.cfg.microbatches`.
        topology: where this rank stands.
        transport: moves messages between ranks; None with one rank.
        communicator: objects between scripts, on top of the transport; None with one rank.
        model: the `DistributedModel`, once there is one.
        partition_report: where the modules of the model went, once it is partitioned.
        step: the name of the step that runs, None outside of steps.
        microbatch: the microbatch whose step function runs, None outside a step and on ranks that follow one.
    """

    def __init__(self) -> None:
        self.cfg: Config | None = None
        self.topology: _C.Topology | None = None
        self.transport: _C.Transport | None = None
        self.communicator: _C.Communicator | None = None
        self.model: Any = None
        self.partition_report: PartitionReport | None = None
        self.step: str | None = None
        self.microbatch: int | None = None

    @property
    def initialized(self) -> bool:
        return self.topology is not None

    def require_topology(self) -> "_C.Topology":
        """The topology. Raises SMPUsageError before `smp.init`."""
        if self.topology is None:
            raise _not_initialized()
        return self.topology

    def require_cfg(self) -> "Config":
        """The configuration. Raises SMPUsageError before `smp.init`."""
        if self.cfg is None:
            raise _not_initialized()
        return self.cfg


def _not_initialized() -> SMPUsageError:
    return SMPUsageError("smp is not initialised: call smp.init() first")


state = State()
