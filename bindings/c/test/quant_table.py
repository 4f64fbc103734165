# SPDX-License-Identifier: Apache-2.0
"""tests/golden/quant_cases.json and the headers of its files -> the table of quantised.c: C has no
reader of JSON, so each array is a place in its file.

    python bindings/c/test/quant_table.py >quant_table.h
"""

import json
import pathlib
import struct

GOLDEN = pathlib.Path(__file__).resolve().parents[3] / "tests/golden"
DTYPES = {"F64": "MOEC_F64", "F32": "MOEC_F32", "F16": "MOEC_F16", "BF16": "MOEC_BF16",
          "I64": "MOEC_I64", "I32": "MOEC_I32", "I8": "MOEC_I8", "U8": "MOEC_U8",
          "F8_E4M3": "MOEC_F8_E4M3"}
FILE_ARRAYS = {"x": "x", "d_y": "dy", "ids": "ids", "routing_weights": "weights", "y": "ref.y",
               "d_x": "ref.dx", "d_routing_weights": "ref.dweights",
               "index": "dequant.down_proj.index", "value": "dequant.down_proj.value"}


class File:
    def __init__(self, path):
        self.content = path.read_bytes()
        size = struct.unpack("<Q", self.content[:8])[0]
        self.start = 8 + size
        self.tensors = json.loads(self.content[8 : self.start])

    def place(self, name):
        """The initialiser of a `place`."""
        name, _, key = name.partition("#")
        one = self.tensors[name]
        begin, end = (self.start + offset for offset in one["data_offsets"])
        if key:
            number = json.loads(self.content[begin:end])[key]
            return f"{{0, MOEC_F32, 1, {{1}}, {float(number)!r}f}}"
        shape = ", ".join(map(str, one["shape"])) or "0"
        return f"{{{begin}, {DTYPES[one['dtype']]}, {len(one['shape'])}, {{{shape}}}, 0}}"

    def array(self, name, experts):
        """The initialiser of an `array`: one place, or one for each expert."""
        is_list = "{e}" in name
        names = [name.replace("{e}", str(e)) for e in range(experts if is_list else 1)]
        places = ", ".join(map(self.place, names))
        return f"{{{len(names)}, {int(is_list)}, (const place[]){{{places}}}}}"


def fields(values):
    """Designated initialisers of the numbers of a descriptor."""
    nested = {k: fields(v) if isinstance(v, dict) else str(v) for k, v in values.items()}
    return "{" + ", ".join(f".{name} = {value}" for name, value in nested.items()) + "}"


def matrix(file, json_, experts):
    quant = {k: file.array(v, experts) if isinstance(v, str) else v
             for k, v in json_["quant"].items()}
    parts = {k: file.array(json_[k], experts) for k in ("data", "bias") if k in json_}
    return fields(parts | quant)


def case(json_):
    file, experts = File(GOLDEN / f"quant/{json_['file']}.safetensors"), json_["weights"]
    matrices = {name: matrix(file, one, experts["num_experts"])
                for name, one in json_["matrices"].items()}
    members = {"file": f'"{json_["file"]}"', "experts": json_["experts"], "weights": experts,
               "matrices": matrices, "turned": int(json_["turned"])}
    return fields(members | {name: file.place(of) for name, of in FILE_ARRAYS.items()})


def main():
    cases = json.loads((GOLDEN / "quant_cases.json").read_text())
    print(f"static const double kTolerance = {cases['tolerance']};")
    print("static const quant_case kCases[] = {")
    print(",\n".join(map(case, cases["cases"])))
    print("};")


if __name__ == "__main__":
    main()
