"""`import smdistributed.modelparallel.torch as smp` gives the public names of `smp`."""

import smp as _smp
from smp import *  # noqa: F403

__all__ = _smp.__all__
