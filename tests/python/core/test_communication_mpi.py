"""Objects between ranks over real MPI."""

import subprocess
from pathlib import Path

import communication_cases
import pytest
from cluster import mpirun, rank_environment

TIMEOUT_S = 150
SCRIPT = str(Path(__file__).parent / "communication_script.py")


def test_every_operation_over_mpi(clusters):
    outcomes = clusters(4).run(communication_cases.exchange)
    # Placement "cluster": replicas are {0, 1} and {2, 3}.
    assert outcomes[3]["in order"] is True
    assert [outcome["pair"] for outcome in outcomes] == [("back", 1), ("to", 0), ("back", 3), ("to", 2)]
    assert all(outcome["world"] == {"seed": 5} for outcome in outcomes)
    assert [outcome.get("replica") for outcome in outcomes] == [2, 3, None, None]
    assert all(outcome["gathered"]["WORLD"] == [0, 1, 2, 3] for outcome in outcomes)
    assert [outcome["gathered"]["MP"] for outcome in outcomes] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [outcome["gathered"]["PP"] for outcome in outcomes] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [outcome["gathered"]["DP"] for outcome in outcomes] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(outcome["waited_s"] >= 0.25 for outcome in outcomes)


@pytest.mark.parametrize("start", ["plain", "mpi4py"])
def test_a_script_with_a_data_loader(start, tmp_path):
    options = ["-m", "mpi4py"] if start == "mpi4py" else []
    result = subprocess.run(
        mpirun(2, *options, SCRIPT, start, str(tmp_path)),
        capture_output=True, text=True, timeout=TIMEOUT_S, env=rank_environment(), check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["OK", "OK"]
