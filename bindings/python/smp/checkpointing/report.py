"""Standing figures of the regions of this rank."""

from dataclasses import dataclass

from .. import _C

_reports: "list[_C.RegionReport]" = []


def keep(report: "_C.RegionReport") -> None:
    _reports.append(report)


@dataclass(frozen=True)
class Report:
    """The regions that were entered on this rank.

    Attributes:
        regions: one for each, with `name`, `calls`, `recomputes`, `saved_bytes` (what one call would have kept without checkpointing,
            inputs and parameters aside), `input_bytes` (what it keeps instead) and `recompute_s` (seconds, of all calls).
    """

    regions: "tuple[_C.RegionReport, ...]"

    def __str__(self) -> str:
        lines = [f"{'region':40} {'calls':>8} {'again':>8} {'saved MiB':>10} {'kept MiB':>10} {'again s':>9}"]
        lines += [
            f"{r.name:40} {r.calls:8} {r.recomputes:8} {r.saved_bytes / 2**20:10.2f} {r.input_bytes / 2**20:10.2f} {r.recompute_s:9.3f}"
            for r in self.regions
        ]
        return "\n".join(lines)


def report() -> Report:
    """What the regions of this rank have done so far.

    Example:
        >>> print(smp.checkpointing.report())
    """
    return Report(tuple(r for r in _reports if r.calls > 0))
