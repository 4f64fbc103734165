# SPDX-License-Identifier: Apache-2.0
"""check_shipped.py PATH...: what a library or program that is shipped must not say.

PATH is a wheel or a folder. An entry of RPATH or RUNPATH starts with $ORIGIN: an empty one is the
current folder, and an absolute one is this machine's. A NEEDED or a SONAME has no folder.
"""

import io
import sys
import zipfile
from pathlib import Path

from elftools.common.exceptions import ELFError
from elftools.elf.elffile import ELFFile

PATHS = {"DT_RPATH": "rpath", "DT_RUNPATH": "runpath"}
NAMES = {"DT_NEEDED": "needed", "DT_SONAME": "soname"}


def files(path):
    """(name, bytes) of every file in a wheel or below a folder."""
    if path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file() and not file.is_symlink():
                yield str(file.relative_to(path)), file.read_bytes()
    else:
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                yield name, wheel.read(name)


def faults_of(data):
    """Of one ELF file; nothing for other files and static archives."""
    if not data.startswith(b"\x7fELF"):
        return
    dynamic = ELFFile(io.BytesIO(data)).get_section_by_name(".dynamic")
    for tag in dynamic.iter_tags() if dynamic else ():
        kind = tag.entry.d_tag
        if kind in PATHS:
            text = getattr(tag, PATHS[kind])
            for entry in text.split(":"):
                if entry != "$ORIGIN" and not entry.startswith("$ORIGIN/"):
                    yield f"{kind[3:]} {text!r} has the entry {entry!r}; $ORIGIN/... is right"
        elif kind in NAMES and "/" in getattr(tag, NAMES[kind]):
            yield f"{kind[3:]} {getattr(tag, NAMES[kind])!r} has a folder"


def faults(path):
    """One line a fault."""
    for name, data in files(path):
        try:
            for fault in faults_of(data):
                yield f"{name}: {fault}"
        except ELFError as error:
            yield f"{name}: not readable: {error}"


def main(arguments):
    found = [f"{path}: {fault}" for path in arguments for fault in faults(Path(path))]
    print("\n".join(found), file=sys.stderr, end="\n" if found else "")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
