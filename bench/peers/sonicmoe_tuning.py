# SPDX-License-Identifier: Apache-2.0
"""How SonicMoE's own tuner judged its tiles, kept beside the results: its search takes 15 to 180
seconds a shape and number of tokens, and says what it was measured with.

    python bench/peers/sonicmoe_tuning.py pack CACHE bench/results/h200/sonicmoe_tuning.json
    python bench/peers/sonicmoe_tuning.py unpack bench/results/h200/sonicmoe_tuning.json CACHE

CACHE is what QUACK_CACHE_DIR names (with QUACK_CACHE_AUTOTUNING=1). The folder of a search is a
hash of the tuner's version, the arguments and the tiles that it chose from: another version
searches anew.
"""

import json
import math
import pathlib
import sys

SUFFIX = ".autotune.json"


def pack(cache, file):
    tiles, rows = {}, []
    for path in sorted(cache.glob(f"*/*{SUFFIX}")):
        search = json.loads(path.read_text())
        times = {tiles.setdefault(tile, len(tiles)): round(ms[0], 4)
                 for tile, ms in search["configs_timings"] if math.isfinite(ms[0])}
        rows.append(dict(kernel=path.name.removesuffix(SUFFIX), folder=path.parent.name,
                         key=search["key"], ms=sorted(times.items(), key=lambda item: item[1])))
    head = json.dumps(list(tiles), indent=1)
    lines = ",\n".join(" " + json.dumps(row) for row in rows)
    file.write_text(f'{{"tiles": {head},\n"searches": [\n{lines}\n]}}\n')
    print(f"{len(rows)} searches: {file}")


def unpack(file, cache):
    kept = json.loads(file.read_text())
    for row in kept["searches"]:
        folder = cache / row["folder"]
        folder.mkdir(parents=True, exist_ok=True)
        times = [(kept["tiles"][tile], [ms, ms, ms]) for tile, ms in row["ms"]]
        text = json.dumps({"key": row["key"], "configs_timings": times})
        (folder / (row["kernel"] + SUFFIX)).write_text(text)
    print(f"{len(kept['searches'])} searches: {cache}")


if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in ("pack", "unpack"):
        sys.exit(__doc__)
    {"pack": pack, "unpack": unpack}[sys.argv[1]](*map(pathlib.Path, sys.argv[2:]))
