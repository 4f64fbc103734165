# SPDX-License-Identifier: Apache-2.0
"""bindings/generate.py: what is planted in moec.h reaches every language without a line by hand."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bindings"))
import generate  # noqa: E402

BIAS = "  moec_tensor output_bias;            /* in  [H], optional; dtype of x or f32 */\n"
LAYER = "shared_gate_bias, output_bias, residual; /* in, as moec_experts_args */"
D_LAYER = "d_shared_gate_bias, d_output_bias, d_residual;  /* out */"
TENSOR = [  # what to replace in moec.h, by what: an optional input of the experts and of the layer
    (BIAS, BIAS + "  moec_tensor planted; /* in  [H], a planted one */\n"),
    (LAYER, LAYER.replace("output_bias,", "output_bias, planted,")),
    (D_LAYER, D_LAYER.replace("d_output_bias,", "d_output_bias, d_planted,")),
]
NAMED = {  # what the language's file has then
    "go/raw_args.go": ["Planted: in [H], a planted one\n\tPlanted Tensor",
                       "out.DPlanted = p.tensor(a.DPlanted)"],
    "julia/src/raw.jl": ["- `planted`: in `[H]`, a planted one", "    d_planted::moec_tensor"],
    "python/jax/tables.h": ['{"planted", &moec_experts_args::planted}',
                            '{"planted", &moec_layer_grad_args::d_planted}'],
    "python/moec/_fields.py": ['"output_bias", "planted"', "planted: Array | None = None",
                               '"""[H], a planted one"""'],
    "rust/moec/src/raw_calls.rs": ["/// `moec_layer_args.planted`: `[H]`, a planted one",
                                   "            d_planted,"],
}
PART = "typedef struct moec_matrix {"
PART_STRUCT = """typedef struct moec_planted {
  uint32_t struct_size, scheme;
  moec_tensor scales; /* [E,N], one a row */
  const moec_tensor* per_expert;
  int64_t count;
} moec_planted;
typedef struct moec_matrix {
  /* how the values
   * are coded */
  const moec_planted* planted;"""


@pytest.fixture
def generated(header, tmp_path):
    def run(*changes):
        text = header.read_text()
        for old, new in changes:
            assert old in text, f"moec.h no longer has: {old}"
            text = text.replace(old, new, 1)
        planted = tmp_path / "moec.h"
        planted.write_text(text)
        return generate.generate(planted)
    return run


def test_a_tensor_reaches_every_language(generated):
    files = generated(*TENSOR)
    for name, wanted in NAMED.items():
        for text in wanted:
            assert text in files[name], f"{name} lacks {text}"


def test_a_part_of_a_matrix_reaches_go_rust_and_swig(generated):
    files = generated((PART, PART_STRUCT))
    assert "how the values are coded\n\tPlanted *Planted" in files["go/raw_args.go"]
    assert "gate_up_planted: gate_up.planted = Planted," in files["rust/moec/src/raw_calls.rs"]
    assert "SIZED(moec_planted)" in files["python/moec_lists.i"]
    assert "Count int64" not in files["go/raw_args.go"]  # a list has its length
    assert "PerExpert []Tensor" in files["go/raw_args.go"].split("type Planted struct")[1]
    assert "        list {\n            /// `moec_planted.per_expert`" in (
        files["rust/moec/src/raw_calls.rs"])


def test_an_array_of_a_call_says_who_writes_it(generated):
    with pytest.raises(SystemExit, match="planted is neither `in` nor `out`"):
        generated((BIAS, BIAS + "  moec_tensor planted; /* [H] */\n"))


SCHEME = "  MOEC_SCHEME_GGUF_MXFP4 = 14"


def test_a_constant_reaches_pythons_enums(generated):
    enums = generated((SCHEME, f"  MOEC_SCHEME_PLANTED = 15,\n{SCHEME}"),
                      ("enum moec_quant_flags {", "enum moec_quant_flags {\n  MOEC_QUANT_X = 2,"))
    text = enums["python/moec/_enums.py"]
    assert "    PLANTED = _raw.MOEC_SCHEME_PLANTED\n" in text.split("class Scheme(IntEnum):")[1]
    assert "class QuantFlags(IntFlag):\n    NONE = 0\n    X = _raw.MOEC_QUANT_X\n" in text


@pytest.mark.parametrize(("old", "new", "message"), [
    ("enum moec_scheme {", "enum moec_planted { MOEC_PLANTED = 0 };\nenum moec_scheme {",
     "CLASSES of emit_python_enums.py has no moec_planted"),
    ("enum moec_slot_order {", "enum moec_order_of_slots {", "has no moec_"),
    ("  MOEC_SCHEME_NONE", "  MOEC_NO_SCHEME",
     "MOEC_NO_SCHEME does not begin with MOEC_SCHEME_"),
])
def test_an_enum_without_a_class_is_refused(generated, old, new, message):
    with pytest.raises(SystemExit, match=message):
        generated((old, new))
