"""Tests compare programs that are allowed to be equal: all run with the settings of tests/environment.txt, and those take effect."""

import json
import os
import subprocess
import sys
from pathlib import Path

import environment
import environment_cases
import pytest
import torch
import torch.nn.functional as F
from cluster import LAUNCHERS, rank_environment

TIMEOUT_S = 150
OTHER_CPU = str(Path(__file__).parents[2] / "scripts" / "other_cpu.sh")


def output_of(*command: str, **variables: str) -> str:
    """What a command prints, in the environment of this process with `variables`; those that are "" are removed."""
    wanted = {name: value for name, value in {**rank_environment(), **variables}.items() if value}
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=wanted, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def check_ranks(outcomes):
    expected = environment.in_effect()
    for rank, outcome in enumerate(outcomes):
        assert outcome["rank"] == rank
        assert outcome["caller"] == [expected] * 2, rank
        assert outcome["module"] == [expected] * 4, rank  # forward and backward of two microbatches


def test_this_process_runs_with_what_the_file_says():
    assert {name: os.environ[name] for name in environment.settings()} == environment.settings()
    found = environment.in_effect()
    threads = int(environment.settings()["OMP_NUM_THREADS"])
    assert (found["threads"], found["threads of MKL"]) == (threads, threads)
    assert (found["MKL_CBWR"], found["MKL_DYNAMIC"]) == ("AUTO", False)


def test_all_threads_of_ranks_run_with_the_settings_of_this_process(clusters):
    check_ranks(clusters(2).run(environment_cases.settings_of_threads))


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_scripts_that_a_launcher_starts_run_with_the_settings_of_this_process(launcher, tmp_path):
    output_of(*LAUNCHERS[launcher](2, environment_cases.__file__, str(tmp_path)))
    check_ranks([json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2)])


@pytest.mark.parametrize("threads", [1, 2])
def test_another_number_of_threads_is_one_setting(threads):
    code = "import environment; environment.apply(); import json; print(json.dumps(environment.in_effect()))"
    found = json.loads(output_of(sys.executable, "-c", code, SMP_TEST_THREADS=str(threads), OMP_NUM_THREADS="4"))
    assert found == {**environment.in_effect(), "threads": threads, "threads of MKL": threads}


def test_settings_that_come_after_pytorch_are_refused():
    code = "import torch, environment; environment.apply()"
    output_of(sys.executable, "-c", code)
    with pytest.raises(AssertionError, match=r"torch was imported before .* MKL_CBWR=AUTO\n"):
        output_of(sys.executable, "-c", code, MKL_CBWR="")


# ---- what the settings are for


def placed(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy whose address is `offset` modulo 64."""
    room = torch.empty(tensor.numel() + 32)
    begin = (offset - room.data_ptr()) % 64 // room.element_size()
    return room[begin : begin + tensor.numel()].view(tensor.shape).copy_(tensor)


def results_by_place() -> dict[str, int]:
    """The number of different results of one product over all places of an operand, by shape."""
    generator = torch.Generator().manual_seed(0)
    counts = {}
    for rows, columns, out in [(1, 6, 6), (2, 6, 6), (3, 6, 6), (5, 6, 18), (7, 32, 64), (5, 64, 100), (64, 64, 64)]:
        x, weight = torch.randn(rows, columns, generator=generator), torch.randn(out, columns, generator=generator)
        products = [F.linear(placed(x, offset), weight).numpy().tobytes() for offset in range(0, 64, 4)]
        counts[f"({rows} x {columns}) ({columns} x {out})"] = len(set(products))
    return counts


def test_products_do_not_depend_on_where_operands_lie():
    assert set(results_by_place().values()) == {1}


def test_on_the_cpu_of_another_vendor_products_do_not_depend_on_where_operands_lie_either():
    code = "import test_environment; print(set(test_environment.results_by_place().values()))"
    assert output_of(OTHER_CPU, sys.executable, "-c", code).strip() == "{1}"


def test_mkl_asks_the_preload_whose_cpu_it_is_on():
    code = (
        "import ctypes, environment, torch; torch.ones(8, 8) @ torch.ones(8, 8);"
        "print(environment.in_effect()['CPU'], ctypes.CDLL(None).smp_other_cpu_times_asked())"
    )
    cpu, asked = output_of(OTHER_CPU, sys.executable, "-c", code).rsplit(maxsplit=1)
    assert cpu == "another vendor's" and int(asked) > 0
