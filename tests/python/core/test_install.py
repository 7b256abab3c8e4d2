"""What `import smp` finds and says: in a checkout, with and without the package, and beside another PyTorch."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]


def run(code, *options):
    return subprocess.run(
        [sys.executable, *options, "-c", code], cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )


def test_in_a_checkout_without_the_package_the_import_says_that_there_is_none():
    done = run("import smp", "-S")  # without site-packages
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'smp'"


def test_python_that_starts_in_the_checkout_finds_the_installed_package():
    done = run("import smp; print(smp.__version__)")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0.1.0"


def import_beside(version):
    return run(f"import torch; torch.__version__ = {version!r}; import smp")


def test_another_minor_version_of_pytorch_is_an_error_that_names_both():
    done = import_beside("2.3.1+cu121")
    message = done.stderr.splitlines()[-1]
    ours = torch.__version__
    assert message == (
        f"ImportError: smp was built with torch {ours}, but torch 2.3.1+cu121 is installed: install torch "
        f"{'.'.join(ours.split('.')[:2])}, or build smp again with this one"
    )


@pytest.mark.parametrize("build", ["", "+cpu", "+cu130"])
def test_other_builds_and_patch_releases_of_the_same_minor_version_are_taken(build):
    done = import_beside(".".join(torch.__version__.split(".")[:2]) + ".99" + build)
    assert done.returncode == 0, done.stderr
