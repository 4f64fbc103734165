# SPDX-License-Identifier: Apache-2.0
"""tests/golden/quant_cases.json and the headers of its files -> the table of golden.c: C has no
reader of JSON, so each array is a place in its file.

    python bindings/c/test/golden_table.py >golden_table.h
"""

import json
import pathlib
import struct

GOLDEN = pathlib.Path(__file__).resolve().parents[3] / "tests/golden"
DTYPES = {"F64": "MOEC_F64", "F32": "MOEC_F32", "F16": "MOEC_F16", "BF16": "MOEC_BF16",
          "I64": "MOEC_I64", "I32": "MOEC_I32", "I8": "MOEC_I8", "U8": "MOEC_U8",
          "F8_E4M3": "MOEC_F8_E4M3"}
INPUTS = {"x": "x", "d_y": "dy", "ids": "ids", "routing_weights": "weights"}
VALUES = {"index": "dequant.down_proj.index", "value": "dequant.down_proj.value"}
OUTPUTS = {"y": "y", "d_x": "dx", "d_routing_weights": "dweights"}
PLAIN = [{"reference": "ref", "adapters": []}]


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
             for k, v in json_.get("quant", {}).items()}
    parts = {k: file.array(json_[k], experts) for k in ("data", "bias") if k in json_}
    return fields(parts | quant)


def adapter(file, json_, reference):
    """Its factors, where they are and where their gradients are."""
    members = {"scale": f"{json_['scale']!r}f"}
    for name in ("gate_up", "down"):
        for kind, prefix, end in (("", "lora", "weight"), ("d_", reference, "grad")):
            path = f"{prefix}.{json_['name']}.{name}_proj.lora_"
            members[kind + name] = {part.lower(): file.place(f"{path}{part}.{end}")
                                    for part in "AB"}
    return fields(members)


def run(file, json_):
    adapters = [adapter(file, one, json_["reference"]) for one in json_["adapters"]]
    listed = f"(const adapter[]){{{', '.join(adapters)}}}" if adapters else "NULL"
    outputs = {name: file.place(f"{json_['reference']}.{of}") for name, of in OUTPUTS.items()}
    return fields({"count": len(adapters), "adapters": listed} | outputs)


def case(json_, folder="", values=VALUES):
    name, experts = folder + json_["file"], json_["weights"]
    file = File(GOLDEN / f"{name}.safetensors")
    matrices = {name: matrix(file, one, experts["num_experts"])
                for name, one in json_["matrices"].items()}
    runs = [run(file, one) for one in json_.get("runs", PLAIN)]
    members = {"file": f'"{name}"', "experts": json_["experts"], "weights": experts,
               "matrices": matrices, "turned": int(json_.get("turned", False)),
               "num_runs": len(runs), "runs": f"(const run[]){{{', '.join(runs)}}}"}
    return fields(members | {name: file.place(of) for name, of in (INPUTS | values).items()})


def main():
    cases = json.loads((GOLDEN / "quant_cases.json").read_text())
    print(f"static const double kTolerance = {cases['tolerance']};")
    print("static const layer kCases[] = {")
    print(",\n".join([case(one, "quant/") for one in cases["cases"]] +
                     [case(one, values={}) for one in cases["adapters"]]))
    print("};")


if __name__ == "__main__":
    main()
