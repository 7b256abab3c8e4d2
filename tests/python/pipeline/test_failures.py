"""What goes wrong is named on every rank, no process stays behind, and a launch that caught it goes on."""

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import failure_cases
import pytest
from cluster import LAUNCHERS, rank_environment

START_S = 180  # importing torch on every rank, on a busy machine
END_S = 30  # from the first step, which fails soon, to the end of the last process


class Launch:
    """A script of failure_cases.py on two ranks, until its end.

    Attributes:
        code: exit code of the launch.
        output: what each rank wrote, by rank.
        text: all that, and what the launcher wrote, for messages.
    """

    def __init__(self, name, folder, launcher):
        self._mark = f"SMP_TEST_LAUNCH={folder}\0".encode()
        process = subprocess.Popen(
            LAUNCHERS[launcher](2, failure_cases.__file__, name, str(folder)),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=rank_environment(SMP_TEST_LAUNCH=str(folder)),
        )  # fmt: skip
        hopeless = threading.Timer(START_S + END_S, self._kill)
        hopeless.start()
        lines, started = [], time.monotonic()
        for line in process.stdout:
            lines.append(line)
            if "start" in line or "interrupt" in line:
                started = time.monotonic()
            if "interrupt" in line:
                process.send_signal(signal.SIGINT)
        self.code = process.wait()
        took_s = time.monotonic() - started
        hopeless.cancel()
        self.output = [(folder / f"rank{rank}").read_text() for rank in range(2)]
        self.text = "\n".join(
            [*(f"rank {rank}:\n{text}" for rank, text in enumerate(self.output)), f"{launcher}:\n", *lines]
        )
        assert took_s < END_S, f"the launch took {took_s:.0f} s to end:\n{self.text}"

    def _kill(self):
        for process in self.left_behind():
            os.kill(int(process), signal.SIGKILL)

    def left_behind(self):
        """Processes of this launch that still run."""

        def environment(process):
            try:
                return Path(f"/proc/{process}/environ").read_bytes()
            except OSError:  # it has just ended
                return b""

        return [process for process in filter(str.isdecimal, os.listdir("/proc")) if self._mark in environment(process)]


@pytest.fixture
def launch(tmp_path):
    """`launch(name, launcher)`: a script that fails, after a check that the launch says so and left no process."""

    def run(name, launcher="mpirun"):
        result = Launch(name, tmp_path, launcher)
        deadline = time.monotonic() + END_S
        while result.left_behind() and time.monotonic() < deadline:
            time.sleep(0.1)
        assert result.left_behind() == [], result.text
        assert result.code != 0, result.text
        assert "reached the end" not in result.text or "one step more" in name or "alone" in name, result.text
        return result

    return run


def check_words(result, ranks, words):
    for rank in ranks:
        missing = [word for word in words if word not in result.output[rank]]
        assert not missing, f"rank {rank} does not say {missing}:\n{result.text}"


EXCEPTIONS = {
    "forward on rank 0": ["ValueError: too much", "module 'first'", "rank 0", "microbatch 2"],
    "forward on rank 1": ["ValueError: too much", "module 'second'", "rank 1", "microbatch 2"],
    "backward on rank 0": ["ArithmeticError: bad gradient", "module 'first'", "rank 0", "microbatch 2"],
    "backward on rank 1": ["ArithmeticError: bad gradient", "module 'second'", "rank 1", "microbatch 2"],
    "step function": ["LookupError: no such thing"],
    "odd batch": ["SMPUsageError", "argument 'x'", "(7, 4)", "microbatches = 4"],
}


@pytest.mark.parametrize("name", sorted(EXCEPTIONS))
def test_an_exception_in_a_step_ends_all_ranks(launch, name):
    check_words(launch(name), (0, 1), EXCEPTIONS[name])


def test_an_exception_in_a_step_ends_all_ranks_of_torchrun(launch):
    name = "forward on rank 1"
    check_words(launch(name, "torchrun"), (0, 1), EXCEPTIONS[name])


def test_different_steps_are_named(launch):
    result = launch("different steps")
    check_words(result, (0, 1), ["train_step", "other_step"])


@pytest.mark.parametrize("name", ["rank 0 has one step more", "rank 1 has one step more"])
def test_a_different_number_of_steps_ends_the_launch(launch, name):
    waiting = int(name[5])
    check_words(launch(name), [waiting], [f"rank {1 - waiting}"])


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("name", ["rank 0 exits", "rank 1 exits", "rank 1 exits with 3"])
def test_a_rank_that_exits_early_ends_the_others(launch, name, launcher):
    leaving = int(name[5])
    check_words(launch(name, launcher), [1 - leaving], [f"rank {leaving}"])


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("what", ["asks for the weights", "begins the first step"])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_makes_a_collective_call_alone_hears_that_the_other_has_ended(launch, rank, what, launcher):
    result = launch(f"rank {rank} alone {what}", launcher)
    check_words(result, [rank], ["SMPFailureError", f"the script of rank {1 - rank} has ended"])


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_exception_between_steps_ends_the_other_ranks(launch, launcher):
    result = launch("rank 1 raises between steps", launcher)
    check_words(result, [1], ["EOFError: the data ended"])
    check_words(result, [0], ["rank 1"])


def test_a_wrong_configuration_is_named_on_all_ranks(launch):
    check_words(launch("wrong configuration"), (0, 1), ["SMPConfigError", "'microbatches' is 0"])


def test_a_number_of_ranks_that_does_not_fit_is_named_on_all_ranks(launch):
    check_words(launch("wrong number of ranks"), (0, 1), ["SMPUsageError", "2", "3"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_ends_the_launch(launch, rank):
    assert "signal 9" in launch(f"rank {rank} is killed").text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_by_the_others_over_tcp(launch, rank):
    result = launch(f"rank {rank} is killed", "torchrun")
    assert "SIGKILL" in result.text
    check_words(result, [1 - rank], ["SMPFailureError", f"rank {rank} left without a word"])


def test_a_result_that_a_rank_cannot_build_fails_there_and_nowhere_later(clusters):
    here, there = clusters(2).run(failure_cases.result_of_rank_0_alone)
    assert here["errors"] == [None, None]
    for error in there["errors"]:
        assert error[0] == "nothing to build it from" and "can't be unpickled here" in error[1]
    assert here["losses"] == there["losses"] == [True, True]


def test_a_module_that_never_returns_is_named_on_every_rank(launch):
    words = ["made no progress on any rank", "stall_timeout is 3", "CALL of module 'second', microbatch 2, which runs"]
    check_words(launch("rank 1 hangs"), (0, 1), words)


def test_a_module_of_partition_0_that_never_returns_is_named_on_every_rank(launch):
    check_words(launch("rank 0 hangs"), (0, 1), ["made no progress", "CALL of module 'first', microbatch 2 runs for"])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_rank_is_named_by_the_other(launch, rank):
    check_words(
        launch(f"rank {rank} is stopped"),
        [1 - rank],
        ["made no progress", f"rank {rank} does not answer: it is stopped"],
    )


def test_long_pauses_of_the_script_are_no_stall(clusters):
    assert clusters(2).run(failure_cases.slow_but_not_stalled) == [[True, True]] * 2


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_interrupt_ends_the_launch(launch, launcher):
    launch("interrupt", launcher)


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("rank", [0, 1])
def test_an_interrupt_of_one_rank_is_named_on_all(launch, rank, launcher):
    result = launch(f"rank {rank} is interrupted", launcher)
    check_words(result, [rank], ["KeyboardInterrupt"])
    check_words(result, [1 - rank], ["KeyboardInterrupt", f"raised on rank {rank}"])


RECOVERABLE = {
    ("forward", 0): ("ValueError", "too much", "rank 0, microbatch 2, CALL of module 'first'"),
    ("forward", 1): ("ValueError", "too much", "rank 1, microbatch 2, CALL of module 'second'"),
    ("forward swallowed", 1): ("ValueError", "too much", "rank 1, microbatch 2, CALL of module 'second'"),
    ("backward", 0): ("ArithmeticError", "bad gradient", "rank 0, microbatch 2, BACKWARD of module 'first'"),
    ("backward", 1): ("ArithmeticError", "bad gradient", "rank 1, microbatch 2, BACKWARD of module 'second'"),
    ("unpicklable", 1): (
        "SMPFailureError",
        "UnpicklableError: broken at home",
        "rank 1, microbatch 2, CALL of module 'second'",
    ),
    ("exit", 1): ("SystemExit", "7", "rank 1, microbatch 2, CALL of module 'second'"),
    ("step function", None): ("LookupError", "no such thing", "rank 0, microbatch 2"),
    ("odd batch", None): ("SMPUsageError", "(7, 4)", ""),
}


@pytest.mark.parametrize(("how", "partition"), sorted(RECOVERABLE, key=str))
def test_a_failed_step_is_named_and_steps_after_it_are_exact(clusters, how, partition):
    kind, text, note = RECOVERABLE[how, partition]
    for rank, outcome in enumerate(clusters(2).run(failure_cases.recoverable, how, partition)):
        error = outcome["error"]
        assert error is not None, f"nothing was raised on rank {rank}"
        assert error[0] == kind and text in error[1], error
        came_from_here = how in ("step function", "odd batch") and rank == 0
        assert came_from_here or note in error[2], error
        assert outcome["losses"] == [True] * 3
        assert all(outcome["weights"])
        assert (outcome["left"]["values"], outcome["left"]["calls"], outcome["left"]["frames"]) == (0, 0, 0)
