#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""run_ctest.py BUILD_DIR [ctest options...]: run CTest and count test cases.

A program that left a JUnit file in BUILD_DIR/results (GoogleTest and pytest do) counts as its
cases, any other as one. Prints the slowest programs, the skipped cases, and
`N passed, M failed, K skipped`.
"""

import os
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path


def run(build, options):
    """Run ctest; return its exit code and the <testcase> of each program."""
    junit = build / "results" / "ctest.junit"
    shutil.rmtree(junit.parent, ignore_errors=True)
    junit.parent.mkdir(parents=True)
    jobs = str(len(os.sched_getaffinity(0)))
    command = ["ctest", "--test-dir", str(build), "--output-on-failure", "--no-tests=error"]
    command += ["--timeout", "600", "-j", jobs, "--output-junit", str(junit), *options]
    code = subprocess.run(command).returncode
    return code, ElementTree.parse(junit).getroot().findall("testcase") if junit.exists() else []


def outcome(case):
    """passed, failed or skipped, of a <testcase> by ctest, GoogleTest or pytest."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    skipped = case.find("skipped")
    if skipped is not None and "Unable to find executable" in skipped.get("message", ""):
        return "failed"
    return "skipped" if skipped is not None or case.get("result") == "skipped" else "passed"


def count(build, programs):
    totals = {"passed": 0, "failed": 0, "skipped": 0}
    for program in programs:
        name = program.get("name")
        details = build / "results" / f"{name}.xml"
        cases = list(ElementTree.parse(details).iter("testcase")) if details.exists() else []
        if not cases or (outcome(program) == "failed" and "failed" not in map(outcome, cases)):
            cases.append(program)
        for case in cases:
            totals[outcome(case)] += 1
            if outcome(case) == "skipped":
                print(f"skipped: {name} {case.get('name') if case is not program else ''}")
    return totals


def main():
    build = Path(sys.argv[1]).resolve()
    code, programs = run(build, sys.argv[2:])
    totals = count(build, programs)
    print("slowest:")
    for program in sorted(programs, key=lambda p: -float(p.get("time", 0)))[:8]:
        print(f"  {float(program.get('time', 0)):7.1f} s  {program.get('name')}")
    print(f"{totals['passed']} passed, {totals['failed']} failed, {totals['skipped']} skipped")
    return code or int(totals["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
