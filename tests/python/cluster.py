"""Runs functions on several ranks from a test.

One launch of `mpirun` serves many tests: its ranks import a function by name, run it all together, and give back what each
returned. A launch that dies, or that does not answer in time, is replaced for the next test. Tasks and results travel as
files, so that nothing but the library under test speaks MPI.
"""

import contextlib
import faulthandler
import importlib
import itertools
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import environment

FOLDER = Path(__file__).parent
TIMEOUT_S = 180
_POLL_S = 0.005
_FOLDERS = ("", "pipeline", "core", "hugging_face", "checkpointing")
_KEEP = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "HF_HUB_OFFLINE": "1",
}


def rank_environment(*first: str, **extra: str) -> dict[str, str]:
    """The environment of ranks that a test starts; `first` are folders that imports look into before all others."""
    search = os.pathsep.join(
        [*first, *(str(FOLDER / name) for name in _FOLDERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    return {**os.environ, **environment.settings(), **_KEEP, "PYTHONPATH": search, **extra}


def mpirun(ranks: int, *command: str) -> list[str]:
    """The command line of a launch over MPI."""
    return ["mpirun", "--oversubscribe", "-np", str(ranks), sys.executable, *command]


def torchrun(ranks: int, *command: str) -> list[str]:
    """The command line of a launch over TCP. When a rank has ended it leaves the others a second for what they have to say."""
    options = ["--standalone", "--nproc-per-node", str(ranks), "--monitor-interval", "1"]
    return [sys.executable, "-m", "torch.distributed.run", *options, *command]


LAUNCHERS = {"mpirun": mpirun, "torchrun": torchrun}


class RankError(AssertionError):
    """A function raised on at least one rank. The message holds every rank's traceback."""


class Cluster:
    """A launch of `ranks` processes that run one function after another. `first` as in rank_environment()."""

    def __init__(self, ranks: int, *first: str) -> None:
        self.ranks = ranks
        self._first = first
        self._folder = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._tasks = itertools.count()

    def _start(self) -> subprocess.Popen[bytes]:
        self._folder = Path(tempfile.mkdtemp(prefix="smp-cluster-"))
        self._tasks = itertools.count()
        with open(self._folder / "log", "w") as log:
            return subprocess.Popen(
                mpirun(self.ranks, str(FOLDER / "cluster.py"), str(self._folder), str(os.getpid())),
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=rank_environment(*self._first), cwd=FOLDER,
            )  # fmt: skip

    def run(self, function: Any, *args: Any, **kwargs: Any) -> list[Any]:
        """What `function(*args, **kwargs)`, a function at the top of a module, returned on each rank.

        Raises:
            RankError: it raised on a rank, the launch died, or it took longer than TIMEOUT_S. The message holds the end of
                the launch's log; after a timeout with the stack of every thread.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = self._start()
        task = next(self._tasks)
        _write(self._folder / f"task{task}", (function.__module__, function.__qualname__, args, kwargs))
        answers = [self._folder / f"result{task}.{rank}" for rank in range(self.ranks)]
        end = time.monotonic() + TIMEOUT_S
        while not all(answer.exists() for answer in answers):
            died = self._process.poll() is not None
            if died or time.monotonic() > end:
                log = self.stop()
                reason = "died" if died else f"did not answer within {TIMEOUT_S} s"
                raise RankError(f"{function.__qualname__}: the launch of {self.ranks} ranks {reason}:\n{log}")
            time.sleep(_POLL_S)
        results = [pickle.loads(answer.read_bytes()) for answer in answers]
        failures = [f"rank {rank}:\n{value}" for rank, (ok, value) in enumerate(results) if not ok]
        if failures:
            self.stop()
            raise RankError("\n".join(failures))
        return [value for _, value in results]

    def stop(self) -> str:
        """Ends the launch and gives the end of its log, with the stacks of the ranks that still ran."""
        if self._process is None:
            return ""
        for pid in self._folder.glob("pid*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid.read_text()), signal.SIGUSR1)
        time.sleep(0.1)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = None
        log = (self._folder / "log").read_text(errors="replace")[-20000:]
        shutil.rmtree(self._folder)
        return log


def _write(path: Path, content: Any) -> None:
    """Writes a file that whoever waits for it never sees half written."""
    draft = path.with_name(path.name + ".draft")
    draft.write_bytes(pickle.dumps(content))
    draft.rename(path)


def _serve(folder: Path, parent: int, rank: int) -> None:
    """What each rank of a launch does. Ranks that wait sleep: other tests need the cores."""
    for count in itertools.count():
        task = folder / f"task{count}"
        while not task.exists():
            os.kill(parent, 0)  # raises once the tests are gone
            time.sleep(_POLL_S)
        module, name, args, kwargs = pickle.loads(task.read_bytes())
        try:
            function = importlib.import_module(module)
            for part in name.split("."):
                function = getattr(function, part)
            result = (True, function(*args, **kwargs))
        except BaseException:
            result = (False, traceback.format_exc())
        _write(folder / f"result{count}.{rank}", result)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    own_rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
    Path(sys.argv[1], f"pid{own_rank}").write_text(str(os.getpid()))
    _serve(Path(sys.argv[1]), int(sys.argv[2]), own_rank)
