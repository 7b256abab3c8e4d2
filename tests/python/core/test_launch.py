"""smp.launch: results come back, and what goes wrong is raised here."""

import multiprocessing
import subprocess
import sys

import launch_cases
import pytest
from cluster import rank_environment

import smp


@pytest.fixture(autouse=True)
def _no_process_stays_behind():
    yield
    assert multiprocessing.active_children() == []


def test_results_come_in_the_order_of_ranks():
    found = smp.launch(launch_cases.place_and, 3, args=("a",), kwargs={"times": 2})
    assert found == [(rank, 3, rank, 3, "aa") for rank in range(3)]
    tensors = smp.launch(launch_cases.tensor_of_rank, ranks=2)
    assert [tensor.unique().tolist() for tensor in tensors] == [[0.0], [1.0]]


def test_one_rank_and_a_function_that_does_not_use_the_library():
    assert smp.launch(launch_cases.place_and, 1, args=(7,)) == [(0, 1, 0, 1, 7)]
    assert smp.launch(launch_cases.without_library, 2, args=([1],)) == [[1], [1]]


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [
        ("raise", LookupError, ["no such thing", "rank 1", "fail_on_rank_1"]),
        ("unreadable", smp.SMPFailureError, ["UnreadableError: this and that", "rank 1"]),
        ("exit", smp.SMPFailureError, ["SystemExit: 3", "rank 1"]),
        ("interrupt", smp.SMPFailureError, ["KeyboardInterrupt", "rank 1"]),
        ("kill", smp.SMPFailureError, ["rank 1", "signal 9"]),
    ],
)
def test_the_first_failure_is_raised_here(how, kind, words):
    with pytest.raises(kind) as error:
        smp.launch(launch_cases.fail_on_rank_1, 2, args=(how,))
    text = "\n".join([str(error.value), *getattr(error.value, "__notes__", [])])
    assert [word for word in words if word not in text] == [], text


def test_a_result_that_does_not_pickle_is_named():
    with pytest.raises(Exception, match="pickle"):
        smp.launch(launch_cases.unpicklable_result, 1)


@pytest.mark.parametrize("ranks", [0, -1, 1.5, True, "2"])
def test_a_wrong_number_of_ranks_is_refused(ranks):
    with pytest.raises(smp.SMPUsageError, match="at least 1"):
        smp.launch(launch_cases.without_library, ranks, (0,))


def test_a_function_that_does_not_pickle_is_refused():
    with pytest.raises(smp.SMPUsageError, match="top of a module"):
        smp.launch(lambda: 0, 2)


@pytest.mark.parametrize("args", [3, "text"])
def test_arguments_that_are_no_sequence_are_refused(args):
    with pytest.raises(smp.SMPUsageError, match="must be a sequence"):
        smp.launch(launch_cases.without_library, 2, args)


def test_a_rank_can_not_launch():
    with pytest.raises(smp.SMPUsageError, match="itself a rank"):
        smp.launch(launch_cases.launch_again, 2)


def test_a_script_without_a_guard_is_told_so(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import smp\nimport launch_cases\nsmp.launch(launch_cases.without_library, 2, (0,))\n")
    result = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=rank_environment(), timeout=120, check=False
    )
    assert result.returncode != 0
    assert '`if __name__ == "__main__":`' in result.stderr


SESSION = "import smp\ndef train(): pass\nsmp.launch(train, ranks=2)\n"


@pytest.mark.parametrize(
    ("options", "text", "words"),
    [
        (["-c", SESSION], "", ["SMPUsageError", "'train'", "can't import it", "to a file"]),
        (["-i"], SESSION.replace("pass\n", "pass\n\n"), ["SMPUsageError", "'train'", "can't import it", "to a file"]),
        (["-"], SESSION, ["SMPUsageError", "'<stdin>'", "Save it as a file"]),
    ],
    ids=["command", "interactive", "standard input"],
)
def test_what_no_rank_can_import_is_refused_before_they_start(options, text, words):
    result = subprocess.run(
        [sys.executable, *options],
        input=text,
        capture_output=True,
        text=True,
        env=rank_environment(),
        timeout=120,
        check=False,
    )
    assert [word for word in words if word not in result.stderr] == [], result.stderr
    assert "spawn_main" not in result.stderr


def test_a_session_can_launch_what_it_has_imported():
    code = "import smp, launch_cases; print(smp.launch(launch_cases.without_library, 2, (7,)))"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=rank_environment(), timeout=120, check=True
    )
    assert result.stdout.split() == ["[7,", "7]"]
