"""`smp.launch`: starts ranks on this machine from a script, without a launcher."""

import contextlib
import io
import multiprocessing
import os
import pickle
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, cast

import torch
import torch.distributed as dist

from .exceptions import SMPFailureError, SMPUsageError
from .launchers import find_launch
from .process import mark_failed

# When one rank has failed the others learn of it through the library, and may say what they know before they are ended.
_LAST_WORDS_S = 10.0
# The first byte of what a rank answers.
_RETURNED, _RAISED = b"+", b"-"
# Set in the environment of a rank that smp.launch has started.
_MARK = "SMP_LAUNCHED"


def launch(
    function: Callable[..., Any], ranks: int, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> list[Any]:
    """Runs `function(*args, **kwargs)` on `ranks` new processes of this machine, which `smp.init` joins.

    The processes are fresh: they import the script, so the call belongs under `if __name__ == "__main__":`. Function,
    arguments and results must pickle. Blocks until all ranks have ended.

    Args:
        function: a function at the top of a module. It calls `smp.init` first.
        ranks: number of processes.
        args, kwargs: what each of them gets.

    Returns:
        What the function returned on each rank, in the order of ranks.

    Raises:
        SMPUsageError: the number of ranks is not at least 1, something does not pickle, this process is itself a rank, or the ranks
            can't import what it runs: an interactive session, a notebook, `python -c` or a script from standard input.
        Exception: the first one that was raised on a rank, with a note that says where. The other ranks are ended.
        SMPFailureError: a rank was killed or left by `sys.exit`, or raised what does not pickle.

    Example:
        >>> def train():
        ...     smp.init({"partitions": 2})
        ...     ...
        >>> if __name__ == "__main__":
        ...     smp.launch(train, ranks=2)
    """
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise SMPUsageError(f"smp.launch was asked for {ranks!r} ranks: it must be a whole number of at least 1")
    if find_launch().size > 1 or _MARK in os.environ:
        raise SMPUsageError(
            "smp.launch was called in a process that is itself a rank: call it once, in the main process, under "
            '`if __name__ == "__main__":`, since the ranks import the script'
        )
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise SMPUsageError(f"smp.launch got args={args!r}: it must be a sequence, so one argument is args=({args!r},)")
    try:
        task = pickle.dumps((function, tuple(args), dict(kwargs or {})))
    except Exception as error:
        raise SMPUsageError(
            f"smp.launch cannot send {function!r} and its arguments to the ranks ({error}): they must pickle, so the function stands "
            "at the top of a module"
        ) from error
    _check_importable(task)
    return _Ranks(ranks).run(task)


class _ImportedOnly(pickle.Unpickler):
    """Refuses what `__main__` defines."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "__main__":
            raise SMPUsageError(
                f"smp.launch was asked for {name!r}, which was defined in an interactive session, a notebook or `python -c`: the ranks are "
                "fresh processes and can't import it. Write it to a file, say train.py, and `import train`, or run that file as a script"
            )
        return super().find_class(module, name)


def _check_importable(task: bytes) -> None:
    """Raises SMPUsageError where the ranks could not import this process's `__main__` though they need it."""
    main = sys.modules["__main__"]
    if getattr(main, "__spec__", None) is not None:  # python -m
        return
    path = getattr(main, "__file__", None)
    if path is None:
        _ImportedOnly(io.BytesIO(task)).load()
    elif not os.path.exists(path):
        raise SMPUsageError(
            f"smp.launch was called by the script {path!r}, which is no file: the ranks are fresh processes that import the script. Save it "
            "as a file and run that; a script from standard input can't be launched"
        )


class _Ranks:
    def __init__(self, size: int) -> None:
        self._size = size
        self._store = dist.TCPStore(
            "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=300)
        )
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._pipes: list[Connection] = []
        # What torchrun would set: the script finds it while it is imported, torch its number of threads.
        common = {
            "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self._store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "OMP_NUM_THREADS": str(max(1, torch.get_num_threads() // size)), _MARK: "1",
        }  # fmt: skip
        for rank in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_rank, args=(theirs,), name=f"smp-rank-{rank}")
            with _environment({**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}):
                process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, task: bytes) -> list[Any]:
        answers: dict[int, bytes] = {}
        first_failure: int | None = None
        end: float | None = None
        try:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):  # it has ended already: below
                    pipe.send_bytes(task)
            waiting: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(self._pipes)}
            while waiting:
                ready = wait(list(waiting), None if end is None else max(0.0, end - time.monotonic()))
                if not ready:
                    break
                for pipe in (cast(Connection, each) for each in ready):
                    rank = waiting.pop(pipe)
                    answers[rank] = _receive(pipe)
                    if first_failure is None and not answers[rank].startswith(_RETURNED):
                        first_failure, end = rank, time.monotonic() + _LAST_WORDS_S
            if first_failure is not None:
                self._raise(first_failure, answers[first_failure])
            for process in self._processes:
                process.join()
            return [pickle.loads(answers[rank][1:]) for rank in range(self._size)]
        finally:
            for process in self._processes:
                process.terminate()
            for process in self._processes:
                process.join(_LAST_WORDS_S)
                if process.is_alive():
                    process.kill()

    def _raise(self, rank: int, answer: bytes) -> NoReturn:
        if not answer:
            self._processes[rank].join(_LAST_WORDS_S)
            code = self._processes[rank].exitcode
            how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
            raise SMPFailureError(f"rank {rank} of smp.launch {how} before its function returned; see its own output")
        error, text = pickle.loads(answer[1:])
        if error is None:
            raise SMPFailureError(f"rank {rank} of smp.launch failed:\n{text}")
        error.add_note(f"smp: raised on rank {rank} of smp.launch:\n{text}")
        raise error


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Variables for a process that is started in here."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _run_rank(pipe: Connection) -> None:
    """What each new process does."""
    threading.Thread(target=_end_with_parent, name="smp-parent", daemon=True).start()
    try:
        function, args, kwargs = pickle.loads(pipe.recv_bytes())
        answer = _RETURNED + pickle.dumps(function(*args, **kwargs))
    except BaseException as error:
        mark_failed()
        pipe.send_bytes(_RAISED + _dump(error, traceback.format_exc().rstrip()))
        if not isinstance(error, Exception):
            raise
    else:
        pipe.send_bytes(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _receive(pipe: Connection) -> bytes:
    try:
        return pipe.recv_bytes()
    except (EOFError, OSError):
        return b""


def _dump(error: BaseException, text: str) -> bytes:
    if not isinstance(error, Exception):  # it would end the caller's process too
        return pickle.dumps((None, text))
    try:
        answer = pickle.dumps((error, text))
        pickle.loads(answer)
    except Exception:
        return pickle.dumps((None, text))
    return answer
