"""Traces recorded on every rank; what they return is asserted in test_trace.py."""

import json
import sys
from pathlib import Path
from typing import Any

from small_net import distribute, job, make_batch, raised, train_step

import smp
from smp import _C


def _train(model: smp.DistributedModel, steps: int = 1) -> None:
    for _ in range(steps):
        train_step(model, *make_batch())


def traced_step(folder: str, partitions: int) -> dict[str, Any]:
    """One traced step after one that was not: the file, the summary, and what the engine itself counted."""
    path = Path(folder) / "step.json"
    with job(partitions):
        model = distribute()
        _train(model)
        engine = None if partitions == 1 else model._runtime.engine
        before = engine.counts() if engine else {"executed": {}, "moved_bytes": 0, "moved_values": 0}
        with smp.trace(path) as summary:
            _train(model)
        after = engine.counts() if engine else before
        counts = {key: n - before["executed"].get(key, 0) for key, n in after["executed"].items()}
        return {
            "file": json.loads(path.read_text()),
            "summary": summary,
            "text": str(summary),
            "executed": {key: n for key, n in counts.items() if n},
            "sent": [after[key] - before[key] for key in ("moved_values", "moved_bytes")],
        }


def clocks() -> tuple[list[int], list[int]]:
    """Offsets of clocks that are known to be one, and as they are measured."""
    module = sys.modules["smp.trace"]
    with job():
        return module._clock_offsets("one"), module._clock_offsets(f"boot of rank {smp.rank()}")


def off_records_nothing() -> int:
    """Events that are there when a trace starts right after steps without one."""
    with job():
        model = distribute()
        _train(model, 2)
        _C.trace_start()
        return len(_C.trace_stop()["events"])


def misuse(folder: str) -> dict[str, Any]:
    """Wrong uses, each of which must leave the library usable."""
    with job():
        model = distribute()
        facts: dict[str, Any] = {}

        def nested() -> None:
            with smp.trace(), smp.trace():
                pass

        def failing() -> None:
            with smp.trace(Path(folder) / "failed.json"):
                raise KeyError("mine")

        facts["nested"] = raised(nested)
        facts["failing"] = raised(failing)
        facts["file"] = (Path(folder) / "failed.json").exists()
        facts["path"] = (
            raised(lambda: smp.trace(Path(folder) / "none" / "x.json").__enter__()) if smp.rank() == 0 else None
        )
        with smp.trace() as summary:
            _train(model)
        facts["afterwards"] = len(summary.ranks)
        return facts
