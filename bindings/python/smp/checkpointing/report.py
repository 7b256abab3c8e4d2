"""Standing figures of the regions of this rank."""

import weakref
from dataclasses import dataclass
from typing import Any

from .. import _C

# Weak: of a model that is gone there is nothing to tell.
_sites: list[weakref.ref[Any]] = []


def keep(site: Any) -> None:
    """Reports of this place, as long as it exists."""
    _sites.append(weakref.ref(site, _sites.remove))


def _size(count: int) -> str:
    return f"{count / 2**20:.1f} MiB" if count >= 2**20 else f"{count / 2**10:.1f} KiB"


@dataclass(frozen=True)
class Report:
    """The regions that were entered on this rank with gradients on, of all models of the process that are alive.

    Attributes:
        regions: one for each, with `name`, `calls`, `recomputes`, `saved_bytes` (what one call would have kept without checkpointing,
            inputs and parameters aside), `input_bytes` (what it keeps instead) and `recompute_s` (seconds, of all calls).
    """

    regions: "tuple[_C.RegionReport, ...]"

    def __str__(self) -> str:
        lines = [f"{'':40} {'':8} {'':8} {'bytes of a call':>23}"]
        lines += [f"{'region':40} {'calls':>8} {'again':>8} {'without':>11} {'kept':>11} {'again s':>9}"]
        lines += [
            f"{r.name:40} {r.calls:8} {r.recomputes:8} {_size(r.saved_bytes):>11} {_size(r.input_bytes):>11} {r.recompute_s:9.3f}"
            for r in self.regions
        ]
        return "\n".join(lines)


def report() -> Report:
    """What the regions of this rank have done so far.

    Example:
        >>> print(smp.checkpointing.report())
    """
    reports = [site.report for site in (ref() for ref in _sites) if site is not None]
    return Report(tuple(report for report in reports if report.calls > 0))
