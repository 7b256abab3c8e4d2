"""`smp.trace`: what every rank did, as one file for Perfetto or chrome://tracing and as a summary."""

import contextlib
import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from . import _C, communication
from .log import logger
from .ranks import WORLD, WORLD_RANK
from .state import state

_CLOCK_ROUNDS = 16
_TRACK_NAMES = {0: "step function", 1: "arrivals", 2: "instructions"}


class _Event(NamedTuple):
    """As `_C.trace_stop` gives it; times in ns of the rank's own clock."""

    kind: str
    name: str
    begin: int
    end: int
    track: int
    microbatch: int
    step: int
    id: int
    peer: int
    bytes: int
    value_bytes: int


@dataclass
class RankSummary:
    """One rank over the time of the trace.

    Attributes:
        seconds: length of the trace.
        busy, waiting, idle: shares of it, which add up to 1: an instruction computes; there are instructions, but the values that
            they need are not there yet; there is no instruction.
        issuing: share of it in which the step function itself ran, on a thread of its own.
        peak_value_bytes: most bytes in the rank's table of values after an instruction.
        instructions: how many of each ran.
    """

    rank: int
    seconds: float
    busy: float
    waiting: float
    idle: float
    issuing: float
    peak_value_bytes: int
    instructions: dict[str, int]


@dataclass
class TraceSummary:
    """What `smp.trace` yields; filled when the `with` block ends, the same on every rank.

    Attributes:
        ranks: one entry for each rank.
        links: (source rank, destination rank): [values, bytes] that went there.
        dropped: events that were too many to keep.
    """

    ranks: list[RankSummary] = field(default_factory=list)
    links: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    dropped: int = 0

    def __str__(self) -> str:
        lines = [f"{'rank':>4} {'busy':>6} {'waiting':>8} {'idle':>6} {'issuing':>8} {'peak values':>12}  instructions"]
        for r in self.ranks:
            counts = ", ".join(f"{count} {name}" for name, count in sorted(r.instructions.items()))
            lines.append(
                f"{r.rank:>4} {r.busy:>6.1%} {r.waiting:>8.1%} {r.idle:>6.1%} {r.issuing:>8.1%} "
                f"{r.peak_value_bytes / 2**20:>8.1f} MiB  {counts}"
            )
        for (source, destination), (values, size) in sorted(self.links.items()):
            lines.append(f"rank {source} to rank {destination}: {values} values, {size / 2**20:.2f} MiB")
        if self.dropped:
            lines.append(f"{self.dropped} events were too many and are missing")
        return "\n".join(lines)


@contextlib.contextmanager
def trace(path: str | os.PathLike[str] | None = None) -> Iterator[TraceSummary]:
    """Records what all ranks do in its `with` block. Collective: every rank enters and leaves it.

    Rank 0 writes one file that https://ui.perfetto.dev and chrome://tracing open: for each rank the instructions with module
    and microbatch, the values that travel as arrows with their bytes, waits and idle time, on one clock.

    Args:
        path: of the file; None for the summary alone.

    Raises:
        SMPUsageError: smp is not initialised, or a trace is being recorded already.
        FileNotFoundError: the folder of the file does not exist or can't be written; on rank 0, before anything runs.

    Example:
        >>> with smp.trace("step.json") as summary:
        ...     train_step(model, x, y)
        >>> print(summary)
    """
    topology = state.require_topology()
    if path is not None and topology.rank == 0 and not os.access(Path(path).absolute().parent, os.W_OK):
        raise FileNotFoundError(f"the folder of the trace {path} does not exist or can't be written: make it first")
    _C.trace_start()
    summary = TraceSummary()
    try:
        yield summary
    except BaseException:
        _C.trace_stop()
        logger.warning("the trace%s was not written, because the code in it raised", f" {path}" if path else "")
        raise
    record = _C.trace_stop()
    record["events"] = [_Event(*event) for event in record["events"]]
    offset = _clock_offsets(_boot_id())[topology.rank]
    record |= {"offset": offset, "pipeline": topology.group("pp")}
    records: list[dict[str, Any]] = communication.allgather(record, WORLD)
    _summarise(records, summary)
    if path is not None and topology.rank == 0:
        Path(path).write_text(json.dumps(_chrome_trace(records)))
    communication.barrier()  # when it returns, the file is there


def _boot_id() -> str:
    """The same for all processes whose clocks are one: those of one boot of one machine. Empty where the system does not say."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return ""


def _clock_offsets(boot_id: str) -> list[int]:
    """What to add to the clock of each rank to get that of rank 0, in ns; where they have no clock in common, off by at most half the
    shortest round trip.
    """
    topology = state.require_topology()
    boots: list[str] = communication.allgather(boot_id, WORLD)
    apart = [rank for rank, boot in enumerate(boots) if rank != 0 and (boot != boots[0] or not boot)]
    offsets = [0] * topology.size
    if topology.rank in apart:
        for _ in range(_CLOCK_ROUNDS):
            communication.recv_from(0, WORLD_RANK)
            communication.send(_C.trace_clock_ns(), 0, WORLD_RANK)
    for rank in apart if topology.rank == 0 else ():
        trips = []
        for _ in range(_CLOCK_ROUNDS):
            begin = _C.trace_clock_ns()
            communication.send(None, rank, WORLD_RANK)
            theirs = communication.recv_from(rank, WORLD_RANK)
            end = _C.trace_clock_ns()
            trips.append((end - begin, (begin + end) // 2 - theirs))
        offsets[rank] = min(trips)[1]
    return communication.allgather(offsets, WORLD)[0]


def _duration(events: list[_Event], kind: str, executor: bool | None = None) -> int:
    return sum(e.end - e.begin for e in events if e.kind == kind and (executor is None or (e.track >= 2) == executor))


def _summarise(records: list[dict[str, Any]], summary: TraceSummary) -> None:
    links: dict[tuple[int, int], list[int]] = defaultdict(lambda: [0, 0])
    for rank, record in enumerate(records):
        events: list[_Event] = record["events"]
        total = max(1, record["end_ns"] - record["begin_ns"])
        busy = _duration(events, "run") - _duration(events, "wait", executor=True)
        waiting = min(_duration(events, "starve"), total - busy)
        issuing = _duration(events, "issue") - _waits_in_issue(events)
        counts: dict[str, int] = defaultdict(int)
        for event in events:
            if event.kind == "run":
                counts[event.name.split(" ", 1)[0]] += 1
            elif event.kind == "send":
                link = links[rank, record["pipeline"][event.peer]]
                link[0] += 1
                link[1] += event.bytes
        summary.ranks.append(
            RankSummary(
                rank,
                total * 1e-9,
                busy / total,
                waiting / total,
                max(0.0, 1 - (busy + waiting) / total),
                issuing / total,
                max((e.value_bytes for e in events), default=0),
                dict(counts),
            )
        )
        summary.dropped += record["dropped"]
    summary.links.update(links)


def _waits_in_issue(events: list[_Event]) -> int:
    spans = [(e.begin, e.end) for e in events if e.kind == "issue"]
    waits = [e for e in events if e.kind == "wait" and e.track == 0]
    return sum(w.end - w.begin for w in waits if any(begin <= w.begin and w.end <= end for begin, end in spans))


def _chrome_trace(records: list[dict[str, Any]]) -> dict[str, Any]:
    """The trace event format: complete events in µs, and a flow arrow for each value that travels."""
    origin = min(record["begin_ns"] + record["offset"] for record in records)
    for record in records:
        record["shift"] = record["offset"] - origin
    rows: list[dict[str, Any]] = []
    for rank, record in enumerate(records):
        rows.append(
            {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": f"rank {rank}"}},
        )
        for track in sorted({e.track for e in record["events"]}):
            name = _TRACK_NAMES.get(track, f"instructions, while one waits ({track - 2})")
            rows.append({"ph": "M", "name": "thread_name", "pid": rank, "tid": track, "args": {"name": name}})
        for event in record["events"]:
            rows.extend(_rows(event, rank, record))
    return {"traceEvents": rows, "displayTimeUnit": "ms", "otherData": {"written": time.strftime("%Y-%m-%d %H:%M:%S")}}


def _rows(event: _Event, rank: int, record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    begin, length = (event.begin + record["shift"]) / 1000, (event.end - event.begin) / 1000
    place = {"pid": rank, "tid": event.track}
    arguments: dict[str, Any] = {"step": event.step} if event.step else {}
    if event.microbatch >= 0:
        arguments["microbatch"] = event.microbatch
    if event.kind in ("send", "receive"):
        peer = record["pipeline"][event.peer]
        arguments |= {"value": event.id, "bytes": event.bytes, "to" if event.kind == "send" else "from": peer}
    yield {"ph": "X", "name": event.name, "cat": event.kind, "ts": begin, "dur": length, "args": arguments, **place}
    if event.kind == "send":
        yield {"ph": "s", "name": "value", "cat": "value", "id": f"{event.id:x}", "ts": begin, **place}
    elif event.kind == "receive":
        yield {"ph": "f", "bp": "e", "name": "value", "cat": "value", "id": f"{event.id:x}", "ts": begin, **place}
    elif event.kind == "run":
        yield {
            "ph": "C",
            "name": "values, bytes",
            "pid": rank,
            "ts": begin + length,
            "args": {"bytes": event.value_bytes},
        }
