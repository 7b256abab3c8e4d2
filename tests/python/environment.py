"""The settings under which two programs are allowed to give the same bits: those of tests/environment.txt, for every process of a test."""

import ctypes
import os
import sys
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent.parent / "environment.txt"
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_KINDS_OF_CBWR = {1: "not set", 2: "AUTO", 3: "COMPATIBLE"}


def settings() -> dict[str, str]:
    """The variables that all processes get. SMP_TEST_THREADS, where it is set, replaces the number of threads."""
    lines = [line.strip() for line in FILE.read_text().splitlines()]
    found = dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
    threads = os.environ.get("SMP_TEST_THREADS")
    return found if threads is None else {**found, **dict.fromkeys(_THREADS, str(int(threads)))}


def apply() -> None:
    """Gives this process, and those that it starts, the settings.

    Raises:
        RuntimeError: PyTorch is loaded already, and was without them.
    """
    missing = {name: value for name, value in settings().items() if os.environ.get(name) != value}
    if missing and "torch" in sys.modules:
        wanted = " ".join(f"{name}={value}" for name, value in missing.items())
        raise RuntimeError(
            f"torch was imported before the settings of {FILE} were made, and has read others: start this process with {wanted}"
        )
    os.environ.update(missing)


def in_effect() -> dict[str, Any]:
    """What the calling thread really runs with, asked of PyTorch and of the MKL inside it."""
    import torch

    mkl = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    cbwr = mkl.mkl_serv_cbwr_get(-1)  # everything
    asks = getattr(ctypes.CDLL(None), "mkl_serv_intel_cpu_true", mkl.mkl_serv_intel_cpu_true)  # a preload comes first
    return {
        "threads": torch.get_num_threads(),
        "threads of MKL": mkl.mkl_get_max_threads(),
        "MKL_DYNAMIC": bool(mkl.mkl_serv_get_dynamic()),
        "MKL_CBWR": _KINDS_OF_CBWR.get(cbwr, cbwr),
        "ATen": torch.backends.cpu.get_cpu_capability(),
        "CPU": "Intel's" if asks() else "another vendor's",
    }
