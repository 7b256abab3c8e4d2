"""Runs functions on several ranks from a test.

One launch of `mpirun` serves many tests: its ranks import a function by name, run it all together, and give back what each
returned. A launch that dies, or that does not answer in time, is replaced for the next test.
"""

import importlib
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TIMEOUT_S = 180
_FOLDERS = ("", "pipeline", "smp", "hugging_face")
_KEEP = {
    "OMP_NUM_THREADS": "1",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "HF_HUB_OFFLINE": "1",
}


def rank_environment(*first: str, **extra: str) -> dict[str, str]:
    """The environment of ranks that a test starts; `first` are folders that imports look into before all others."""
    search = os.pathsep.join(
        [*first, *(str(FOLDER / name) for name in _FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return {**os.environ, **_KEEP, "PYTHONPATH": search, **extra}


def mpirun(ranks: int, *command: str) -> list[str]:
    """The command line of a launch."""
    return ["mpirun", "--oversubscribe", "-np", str(ranks), sys.executable, *command]


class RankError(AssertionError):
    """A function raised on at least one rank. The message holds every rank's traceback."""


class Cluster:
    """A launch of `ranks` processes that run one function after another. `first` as in rank_environment()."""

    def __init__(self, ranks: int, *first: str) -> None:
        self.ranks = ranks
        self._first = first
        self._folder = Path(tempfile.mkdtemp(prefix="smp-cluster-"))
        self._process: subprocess.Popen[str] | None = None
        self._count = 0

    def _start(self) -> subprocess.Popen[str]:
        log = open(self._folder / "log", "a")  # noqa: SIM115
        return subprocess.Popen(
            mpirun(self.ranks, str(FOLDER / "cluster.py"), str(self._folder)),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=rank_environment(*self._first), cwd=FOLDER,
        )  # fmt: skip

    def run(self, function: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """What `function(*args, **kwargs)`, a function at the top of a module, returned on each rank.

        Raises:
            RankError: it raised on a rank, the launch died, or it took longer than TIMEOUT_S.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        self._count += 1
        (self._folder / "task").write_bytes(pickle.dumps((function.__module__, function.__qualname__, args, kwargs)))
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(f"{self._count}\n")
            self._process.stdin.flush()
            answer = self._wait_for_answer()
        except OSError:
            answer = ""
        if answer.strip() != str(self._count):
            log = (self._folder / "log").read_text()[-4000:]
            self.close()
            raise RankError(f"{function.__qualname__} on {self.ranks} ranks did not finish:\n{log}")
        results = [pickle.loads((self._folder / f"result{rank}").read_bytes()) for rank in range(self.ranks)]
        failures = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(results) if not ok]
        if failures:
            self.close()
            raise RankError("\n".join(failures))
        return [value for _, value in results]

    def _wait_for_answer(self) -> str:
        import select

        assert self._process is not None and self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], TIMEOUT_S)
        return self._process.stdout.readline() if ready else ""

    def close(self) -> None:
        """Ends the launch."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


def _next_line(world: Any) -> str:
    """The next line of rank 0's input, on every rank. Ranks that wait sleep: other tests need the cores."""
    if world.rank == 0:
        line = sys.stdin.readline()
        for rank in range(1, world.size):
            world.send(line, rank)
        return line
    while not world.iprobe(0):
        time.sleep(0.005)
    return world.recv(source=0)


def _serve(folder: Path) -> None:
    """What each rank of a launch does."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    while True:
        line = _next_line(world)
        if not line:
            return
        module, name, args, kwargs = pickle.loads((folder / "task").read_bytes())
        try:
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            result = (True, function(*args, **kwargs))
        except BaseException:
            result = (False, traceback.format_exc())
        (folder / f"result{world.rank}").write_bytes(pickle.dumps(result))
        world.barrier()
        if world.rank == 0:
            print(line.strip(), flush=True)


if __name__ == "__main__":
    import torch

    torch.set_num_threads(1)
    _serve(Path(sys.argv[1]))
