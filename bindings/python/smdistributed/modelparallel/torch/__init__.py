"""`import smdistributed.modelparallel.torch as smp` gives the public names of `smp`."""

import smp as _smp
from smp import *  # noqa: F403

# Scripts reach these as attributes too: `smp.model.DistributedModel`.
from . import exceptions, model, state_mod  # noqa: F401

__all__ = _smp.__all__
