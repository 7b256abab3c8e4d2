"""Breaks the checkpointing engine on purpose, one patch at a time, and shows that tests fail.

scripts/mutations.sh [names of patches]

Works on a copy of the sources under build/mutations, which it compiles beside everything else. The first line of each patch names the
tests that must fail. Exits with 1 when one of them passes, or when the tests fail on the unbroken copy.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
sys.path.insert(0, str(ROOT / "tests" / "python"))
import environment as test_environment  # noqa: E402

WORK = ROOT / "build" / "mutations"
SOURCE, BUILD, PACKAGE = WORK / "source", WORK / "build", WORK / "package"
TESTS = ("test_field_bugs.py", "test_state.py")


def run(*command: str, **options: object) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **options)  # type: ignore[call-overload]


def copy_sources() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    for name in tracked.splitlines():
        source, copy = ROOT / name, SOURCE / name
        # What has not changed keeps its time, and is not compiled again.
        if source.is_file() and (not copy.is_file() or copy.read_bytes() != source.read_bytes()):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy)


def build() -> None:
    cache = (ROOT / "build" / "editable" / "CMakeCache.txt").read_text()
    keep = ("Python_EXECUTABLE", "CMAKE_CXX_COMPILER_LAUNCHER")
    settings = [f"-D{m[1]}={m[2]}" for m in re.finditer(r"^(\w+):\w+=(.*)$", cache, re.M) if m[1] in keep]
    run("cmake", "-S", str(SOURCE), "-B", str(BUILD), "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", *settings)
    run("cmake", "--build", str(BUILD))
    run("cmake", "--install", str(BUILD), "--component", "python", "--prefix", str(PACKAGE))
    shutil.copytree(SOURCE / "bindings" / "python", PACKAGE, dirs_exist_ok=True)


def failing_tests() -> set[str]:
    """Names of the tests that fail with the package that was built."""
    environment = {**os.environ, **test_environment.settings(), "PYTHONPATH": str(PACKAGE)}
    code = (
        "import sys; sys.meta_path = [f for f in sys.meta_path if 'Redirecting' not in type(f).__name__];"  # of the editable install
        "package = sys.argv.pop(1); sys.path.insert(0, package); import smp, pytest; assert package in smp.__file__, smp.__file__;"
        "sys.exit(pytest.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, str(PACKAGE), "-q", "-p", "no:cacheprovider", "--tb=no"]
    command += [str(SOURCE / "tests/python/checkpointing" / name) for name in TESTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    found = set(re.findall(r"^(?:FAILED|ERROR) \S+::(\w+)", done.stdout, re.M))
    if done.returncode not in (0, 1) or (done.returncode == 1 and not found):
        raise RuntimeError(f"the tests did not run:\n{done.stdout}\n{done.stderr}")
    return found


def main() -> int:
    patches = sorted(FOLDER.glob("*.patch"))
    if sys.argv[1:]:
        patches = [patch for patch in patches if patch.stem in sys.argv[1:]]
    copy_sources()
    build()
    if broken := failing_tests():
        print(f"unbroken: {len(broken)} tests fail: {', '.join(sorted(broken))}")
        return 1
    print("unbroken: all tests pass", flush=True)
    missed = 0
    for patch in patches:
        expected = set(re.findall(r"test_\w+", patch.read_text().splitlines()[0]))
        run("patch", "-p1", "-i", str(patch), cwd=SOURCE)
        build()
        found = failing_tests()
        run("patch", "-p1", "-R", "-i", str(patch), cwd=SOURCE)
        verdict = "found" if expected and expected <= found else f"MISSED by {', '.join(expected - found) or 'nothing'}"
        missed += not verdict.startswith("found")
        print(f"{patch.stem}: {verdict}; {len(found)} tests fail: {', '.join(sorted(found))}", flush=True)
    print(f"{len(patches) - missed} of {len(patches)} mutations found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
