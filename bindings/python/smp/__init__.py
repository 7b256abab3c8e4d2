"""smp: model-parallel training of any PyTorch model.

Wrap the model in `smp.DistributedModel`, decorate the training step with `@smp.step`, and start one process for each
partition with `torchrun --nproc-per-node N script.py` or `mpirun -np N python script.py`.
"""

import torch

from ._built_with import TORCH_VERSION

# LibTorch's C++ interface changes with each minor version; builds for the CPU and for a GPU of one version have the same.
if torch.__version__.split(".")[:2] != TORCH_VERSION.split(".")[:2]:
    raise ImportError(
        f"smp was built with torch {TORCH_VERSION}, but torch {torch.__version__} is installed: install torch "
        f"{'.'.join(TORCH_VERSION.split('.')[:2])}, or build smp again with this one"
    )

from . import amp, checkpointing, log
from .checkpointing import checkpoint, checkpoint_sequential, set_activation_checkpointing
from .communication import allgather, barrier, broadcast, dp_barrier, mp_barrier, recv_from, send
from .dynamic import set_dynamic
from .exceptions import SMPConfigError, SMPError, SMPFailureError, SMPUsageError
from .launch import launch
from .model import DistributedModel
from .optimizer import DistributedOptimizer
from .placement import PartitionReport, get_partition_report, partition, set_partition
from .process import init, shutdown
from .ranks import (
    DP_GROUP,
    DP_RANK,
    MP_GROUP,
    MP_RANK,
    PP_GROUP,
    PP_RANK,
    RDP_GROUP,
    RDP_RANK,
    TP_GROUP,
    TP_RANK,
    WORLD,
    WORLD_RANK,
    CommGroup,
    RankType,
    dp_rank,
    dp_size,
    get_dp_group,
    get_dp_process_group,
    get_mp_group,
    get_mp_process_group,
    get_pp_group,
    get_pp_process_group,
    get_rdp_group,
    get_rdp_process_group,
    get_tp_group,
    get_tp_process_group,
    get_world_process_group,
    is_initialized,
    is_tracing,
    local_rank,
    local_size,
    mp_rank,
    mp_size,
    num_microbatches,
    pp_rank,
    pp_size,
    rank,
    rdp_rank,
    rdp_size,
    size,
    tp_rank,
    tp_size,
)
from .state import state
from .step import StepFunction, step
from .step_output import StepOutput
from .trace import RankSummary, TraceSummary, trace

__version__ = "0.1.0"

log.configure()

__all__ = [
    "DP_GROUP", "DP_RANK", "MP_GROUP", "MP_RANK", "PP_GROUP", "PP_RANK", "RDP_GROUP", "RDP_RANK", "TP_GROUP", "TP_RANK", "WORLD", "WORLD_RANK",
    "CommGroup", "DistributedModel", "DistributedOptimizer", "PartitionReport", "RankSummary", "RankType", "SMPConfigError", "SMPError",
    "SMPFailureError", "SMPUsageError", "StepFunction", "StepOutput", "TraceSummary", "allgather", "amp", "barrier", "broadcast", "checkpoint",
    "checkpoint_sequential", "checkpointing",
    "dp_barrier", "dp_rank", "dp_size", "get_dp_group", "get_dp_process_group", "get_mp_group", "get_mp_process_group", "get_partition_report",
    "get_pp_group", "get_pp_process_group", "get_rdp_group", "get_rdp_process_group", "get_tp_group", "get_tp_process_group",
    "get_world_process_group", "init", "is_initialized", "is_tracing", "launch", "local_rank", "local_size", "mp_barrier", "mp_rank", "mp_size",
    "num_microbatches", "partition", "pp_rank", "pp_size", "rank", "rdp_rank", "rdp_size", "recv_from", "send", "set_activation_checkpointing",
    "set_dynamic", "set_partition", "shutdown", "size", "state", "step", "tp_rank", "tp_size", "trace",
]  # fmt: skip
