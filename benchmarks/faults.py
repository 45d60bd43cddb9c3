"""All faults, again and again: how long until each is noticed, all processes are gone, it serves again.

    python -m benchmarks.faults --rounds 10 --out faults [--workers 2]

A round is all tests that make faults, those that are run by hand too; the times are what the tests note.
Rounds that --out holds already count, so that a series may be stopped and go on. Prints a Markdown table: one
line per fault, lowest / median / highest of each time in seconds that its note names; failed tests.
"""

import argparse
import re
import statistics
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from xml.etree import ElementTree

from harness.waiting import NOTE_PROPERTY

ROOT = Path(__file__).resolve().parents[1]
SET = (
    "tests/process/job/test_recovery.py",
    "tests/e2e/test_restarts.py",
    "tests/e2e/test_elastic.py",
    "tests/e2e/test_faults.py",
    "tests/e2e/test_clients.py",
    "tests/e2e/test_coordinator.py",
    "tests/e2e/test_probes.py",
    "tests/process/job/test_probe_port.py",
)
ROUND_S = 3600
"""A round that takes longer is ended, and is no round."""
TIME = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.])")
"""In a note; whole numbers in it belong to the fault's name."""

Notes = Iterable[tuple[str, str]]
"""A test's name, and what it has noted."""


def run(report: Path, workers: int) -> None:
    """One round, whose JUnit report is there only when it is complete."""
    part = report.with_suffix(".part")
    command = [sys.executable, "-m", "pytest", "-m", "", "-n", str(workers)]
    command += ["--dist", "loadfile", "--no-loadscope-reorder", "-q"]
    command += [f"--junitxml={part}", "-o", "junit_family=xunit1", *SET]
    with report.with_suffix(".log").open("w") as log:
        subprocess.run(command, cwd=ROOT, stdout=log, stderr=log, timeout=ROUND_S, check=False)
    part.rename(report)


def read(reports: Sequence[Path]) -> tuple[list[tuple[str, str]], Counter[str], Counter[tuple[str, str]]]:
    """All notes, how many tests passed, failed and were skipped, and how often each one did not pass."""
    notes, outcomes, troubles = [], Counter[str](), Counter[tuple[str, str]]()
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
            kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
            outcome = "failed" if kinds & {"failure", "error"} else "skipped" if kinds else "passed"
            outcomes[outcome] += 1
            if outcome != "passed":
                troubles[outcome, name] += 1
            found = (one for one in case.iter("property") if one.get("name") == NOTE_PROPERTY)
            notes += [(name, str(one.get("value"))) for one in found]
    return notes, outcomes, troubles


def table(notes: Notes) -> Iterator[str]:
    """Lines of Markdown."""
    times: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    for name, note in notes:
        seen = [float(text) for text in TIME.findall(note)]
        times[name.partition("::")[0], TIME.sub("#", note)].append(seen)
    yield "| of | runs | lowest / median / highest |"
    yield "|---|---|---|"
    for (module, text), rows in sorted(times.items()):
        for column in zip(*rows, strict=True):
            figures = (min(column), statistics.median(column), max(column))
            text = text.replace("#", " / ".join(f"{figure:.2f}" for figure in figures), 1)
        yield f"| {module} | {len(rows)} | {text} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True, help="folder of the rounds' reports")
    parser.add_argument("--workers", type=int, default=2, help="tests at the same time")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    reports = [asked.out / f"round{number}.xml" for number in range(asked.rounds)]
    for report in reports:
        if not report.exists():
            run(report.resolve(), asked.workers)
    notes, outcomes, troubles = read(reports)
    print(f"{asked.rounds} rounds, {asked.workers} tests at a time: {dict(outcomes)}\n")
    print("\n".join(table(notes)))
    for (outcome, name), times in sorted(troubles.items()):
        print(f"\n{outcome} {times} times: {name}")


if __name__ == "__main__":
    main()
