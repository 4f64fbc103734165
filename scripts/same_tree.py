# SPDX-License-Identifier: Apache-2.0
"""same_tree.py FROM TO: make the folder TO equal FROM. What is equal already keeps its time, so
that a build in TO compiles only what changed."""

import shutil
import sys
from pathlib import Path


def files(folder):
    return {p.relative_to(folder) for p in folder.rglob("*") if p.is_file()}


def main(source, target):
    target.mkdir(parents=True, exist_ok=True)
    wanted = files(source)
    for name in files(target) - wanted:
        (target / name).unlink()
    for name in wanted:
        old, new = target / name, source / name
        if old.exists() and old.read_bytes() == new.read_bytes():
            continue
        old.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(new, old)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
