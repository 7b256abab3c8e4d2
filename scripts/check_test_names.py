"""Compares the tests that the runners find with tests/test_names.txt, so that none is lost without notice.

A test can vanish while everything stays green: a glob that misses a folder, a renamed function, a stray `-k`.
"""

import argparse
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES_FILE = ROOT / "tests" / "test_names.txt"


def output_of(command: list[str]) -> str:
    result = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if result.returncode != 0:
        # The end says what went wrong; before it stands the list of all tests.
        last_lines = (result.stdout + result.stderr).splitlines()[-30:]
        sys.exit("\n".join([f"{' '.join(command)} failed with {result.returncode}:", *last_lines]))
    return result.stdout


def gtest_names(binary: Path) -> list[str]:
    """Names as `binary:Suite.test`, from the two-level listing that GoogleTest prints."""
    names = []
    suite = ""
    for line in output_of([str(binary), "--gtest_list_tests"]).splitlines():
        name = line.split("#")[0].rstrip()
        if line.startswith("  "):
            names.append(f"{binary.name}:{suite}{name.strip()}")
        elif name.endswith("."):
            suite = name
    return names


def pytest_names() -> list[str]:
    listing = output_of([sys.executable, "-m", "pytest", "tests/python", "--collect-only", "-q", "--no-header"])
    return [line for line in listing.splitlines() if "::" in line]


def collected_names(build: Path) -> list[str]:
    binaries = sorted(path for path in (build / "tests" / "cpp").glob("smp_*_test") if path.is_file())
    names = [name for binary in binaries for name in gtest_names(binary)]
    return sorted(names + pytest_names())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, required=True, help="build folder with the C++ tests")
    parser.add_argument("--update", action="store_true", help="rewrite the list instead of comparing")
    arguments = parser.parse_args()

    found = collected_names(arguments.build)
    if arguments.update:
        NAMES_FILE.write_text("".join(f"{name}\n" for name in found))
        print(f"{NAMES_FILE.relative_to(ROOT)}: {len(found)} tests")
        return

    expected = NAMES_FILE.read_text().splitlines() if NAMES_FILE.exists() else []
    lost = sorted(set(expected) - set(found))
    new = sorted(set(found) - set(expected))
    for title, names in (("in the list but not found", lost), ("found but not in the list", new)):
        if names:
            print(f"{len(names)} tests {title}:", *names, sep="\n  ")
    if lost or new:
        sys.exit("Test names differ from tests/test_names.txt. If this is meant, run `make update-test-names`.")
    print(f"{len(found)} tests, as listed in tests/test_names.txt")


if __name__ == "__main__":
    main()
