"""Scripts for `smdistributed.modelparallel` find what they import, and run as they are."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cluster import mpirun, rank_environment

import smdistributed.modelparallel
import smdistributed.modelparallel.torch as compatible
import smp

TIMEOUT_S = 240
SAMPLE = Path(__file__).parents[3] / "samples" / "digits" / "train.py"


@pytest.mark.parametrize(
    ("module", "name", "same"),
    [
        ("torch.amp", "GradScaler", smp.amp.GradScaler),
        ("torch.model", "DistributedModel", smp.DistributedModel),
        ("torch.state_mod", "state", smp.state),
        ("torch.exceptions", "SMPUsageError", smp.SMPUsageError),
        ("torch.exceptions", "SMPConfigError", smp.SMPConfigError),
        ("backend.exceptions", "SMPFailureError", smp.SMPFailureError),
    ],
)
def test_import_paths_of_public_scripts_lead_to_the_library(module, name, same):
    assert getattr(importlib.import_module(f"smdistributed.modelparallel.{module}"), name) is same


def test_every_public_name_has_its_compatible_name():
    others = [name for name in smp.__all__ if getattr(compatible, name) is not getattr(smp, name)]
    assert others == ["amp"]
    assert compatible.amp.GradScaler is smp.amp.GradScaler
    for name in (
        "init",
        "step",
        "DistributedModel",
        "DistributedOptimizer",
        "partition",
        "barrier",
        "WORLD",
        "RDP_RANK",
    ):
        assert name in smp.__all__


def test_submodules_are_attributes_after_the_usual_import():
    code = "import smdistributed.modelparallel.torch as smp; print(smp.model.DistributedModel is smp.DistributedModel, smp.state_mod.state is smp.state)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=rank_environment(), check=True
    )
    assert result.stdout.split() == ["True", "True"]


def test_the_version_reads_as_one_that_scripts_know():
    # Scripts compare it: from 1.10 on there are certain calls.
    major, minor = map(int, smdistributed.modelparallel.__version__.split(".")[:2])
    assert (major, minor) >= (1, 10)


@pytest.mark.parametrize("module", ["torch.exceptions", "backend.exceptions"])
def test_launch_toolkits_find_exception_classes(module):
    members = vars(importlib.import_module(f"smdistributed.modelparallel.{module}"))
    found = [value for value in members.values() if isinstance(value, type) and issubclass(value, Exception)]
    assert smp.SMPError in found


def test_the_digits_sample_learns_on_two_partitions(tmp_path):
    parameters = json.dumps({"partitions": 2, "microbatches": 4, "pipeline": "interleaved", "ddp": False})
    result = subprocess.run(
        mpirun(2, str(SAMPLE), "--epochs", "3", "--save", str(tmp_path / "digits.pt"), "--mp_parameters", "partitions=2"),
        capture_output=True, text=True, timeout=TIMEOUT_S, env=rank_environment(SM_HP_MP_PARAMETERS=parameters), check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout + result.stderr
    (accuracy,) = re.findall(r"accuracy ([\d.]+)%\n", result.stdout.split("test loss")[1])
    assert float(accuracy) > 90
    assert "Partition assignments:" in result.stderr
    weights = torch.load(tmp_path / "digits.pt", weights_only=True)
    assert list(weights) == [
        f"{layer}.{kind}" for layer in ("conv1", "conv2", "fc1", "fc2") for kind in ("weight", "bias")
    ]
    assert all(torch.isfinite(value).all() and value.abs().sum() > 0 for value in weights.values())
