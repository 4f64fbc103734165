# SPDX-License-Identifier: Apache-2.0
"""Tables of the pages, made from what they tell about: the families' table, moec.h, the formats of
src/quant, the kernels that are compiled, and the committed speeds. Links are relative to the
repository."""

import json
import re
import sys
from pathlib import Path

import header
import python_static

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
import report_ep  # noqa: E402
import report_tables  # noqa: E402

HEADER = ROOT / "capi/include/moec/moec.h"


def table(titles, rows):
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * len(titles)]
    return lines + [f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"
                    for row in rows]


# ---- families ----

SHARED = {"NONE": "none", "ADD": "added", "SIGMOID_GATE": "sigmoid gate",
          "SOFTMAX2": "softmax of two"}
RULES = {"SOFTMAX_SELECTED": "softmax of the selected",
         "SIGMOID_SELECTED": "sigmoid of the selected"}
SCORES = {"SOFTMAX": "softmax", "SIGMOID": "sigmoid", "SQRT_SOFTPLUS": "root of softplus"}
SELECTIONS = {"GROUP_TOPK": "groups", "SPARSE_MIXER": "SparseMixer"}


def named(value, words=None):
    """A value of a row in words; of a Key, the key of config.json that decides."""
    if hasattr(value, "names"):
        return f"`{value.names[0]}`"
    return (words or {}).get(value.name, value.name.lower())


def router_text(family):
    router = family.router
    rule = router.get("weight_rule")
    texts = [named(rule, RULES) if rule else named(router["score"], SCORES)
             if "score" in router else ""]
    selection = router.get("selection")
    if selection is not None:
        texts.append(named(selection, SELECTIONS))
    if "select_bias" in family.tensors:
        texts.append("selection bias")
    norm = router.get("norm")
    if hasattr(norm, "names"):
        texts.append(f"normalised if {named(norm)}")
    elif norm is not None and norm.name != "NONE":
        texts.append("normalised")
    if "scale" in router:
        texts.append(f"x {named(router['scale'])}")
    return ", ".join(filter(None, texts))


def family_of(case, rows):
    """The first model_type of the row that a golden case belongs to: of the same name, or the
    longest name of which one begins with the other."""
    types = {name: row.model_types[0] for row in rows for name in row.model_types}
    fitting = [name for name in types if name == case or name.startswith(f"{case}_")
               or case.startswith(f"{name}_")]
    if not fitting:
        raise ValueError(f"no row of moec/families.py has the golden case {case}")
    return types[case if case in types else max(fitting, key=len)]


def families():
    import without_library
    without_library.install()
    from moec.families import FAMILIES

    golden = json.loads((ROOT / "tests/golden/cases.json").read_text())["cases"]
    checked = {family_of(case["family"], FAMILIES) for case in golden}
    rows = []
    for family in FAMILIES:
        kind = family.activation.get("kind")
        rows.append([
            ", ".join(f"`{one}`" for one in family.model_types), router_text(family),
            named(kind), SHARED[family.shared.name],
            f"`{next(iter(family.layouts[0].names.values()))}`",
            "yes" if family.model_types[0] in checked else ""])
    return table(["`model_type`", "router", "activation", "shared expert", "first tensor",
                  "golden"], sorted(rows, key=lambda row: row[0].strip("`")))


# ---- formats ----

SCHEME = re.compile(r"(?:/\*((?:(?!\*/).)*)\*/\s*)?MOEC_SCHEME_(\w+) = \d+,?"
                    r"(?: /\* ([^\n]*?) \*/)?", re.DOTALL)


def schemes(text):
    """{name: (what it reads, who writes such files)} of moec.h, all but NONE."""
    body = text[text.index("enum moec_scheme {"):]
    found = {}
    for above, name, behind in SCHEME.findall(body[:body.index("\n};")]):
        if name == "NONE":
            continue
        said = re.fullmatch(r"(?:(.*); )?by (.*)", behind)
        if not said:
            raise ValueError(f"moec.h says behind MOEC_SCHEME_{name} {behind or 'nothing'}; "
                             "`by` and who writes such files is needed")
        about = [line.strip(" *") for line in above.split("\n")]
        found[name] = (" ".join([*about, said[1] or ""]).strip(), said[2])
    return found


def format_list(name, file="quant/format.h"):
    """The classes of a list in a file of src."""
    text = (ROOT / "src" / file).read_text()
    found = re.search(rf"using {name} = (?:quant::)?FormatList<(.*?)>;", text, re.DOTALL)[1]
    return [one.strip().removeprefix("quant::") for one in found.split(",")]


def hopper_formats():
    """{class: where Hopper's kernels take its matrices}"""
    lines = format_list("LineFormats", "backend/cuda/sm90/row_gemm_problem.h")
    return {**{one: "where a row has one scale" for one in format_list("ChannelFormats")},
            **{one: "where blocks end with rows" for one in lines}}


def tensor_cores():
    """Classes whose codes the portable kernels multiply on tensor cores."""
    return set(format_list("ChunkFormats", "backend/cuda/sm80/mma_coded.cu"))


def orientation(text):
    return ("IN_OUT" if re.search(r"\bIN_OUT\b", text.split(":")[0]) else
            "OUT_IN" if "OUT_IN" in text.split(":")[0] else "either")


def formats():
    """The list of format.h has the order of moec.h (tests/unit/format_test.cpp)."""
    cores, hopper, rows, last = tensor_cores(), hopper_formats(), [], ""
    texts, classes = schemes(HEADER.read_text()), format_list("Formats")
    if len(texts) != len(classes):
        raise ValueError(f"moec.h has {len(texts)} schemes, {', '.join(texts)}; src/quant/format.h "
                         f"has {len(classes)} formats, {', '.join(classes)}")
    for (name, (text, writer)), source in zip(texts.items(), classes, strict=True):
        last = orientation(text) if not text.startswith("the same") and text else last
        rows.append([f"`{name}`", writer, last, "read in place, or packed",
                     "tensor cores" if source in cores else "values",
                     hopper.get(source, "portable kernels")])
    return table(["scheme", "written by", "orientation", "CPU", "portable CUDA", "Hopper"], rows)


def scheme_texts():
    texts = schemes(HEADER.read_text())
    return table(["scheme", "codes and scales; value"],
                 [[f"`{name}`", plain(text)] for name, (text, _) in texts.items() if text])


def plain(text):
    """A comment's text as Markdown shows it letter by letter; `code` stays code."""
    pieces = text.split("`")
    pieces[::2] = [re.sub(r"([\\*_\[\]<>])", r"\\\1", piece) for piece in pieces[::2]]
    return "`".join(pieces)


# ---- moec.h ----

def conventions():
    return table(["", "holds for every function"],
                 [[f"**{word}**", plain(text)] for word, text in
                  header.conventions(HEADER.read_text())])


def c_sections():
    """A heading for each section of moec.h, and what Breathe makes of its group."""
    found = [(0, "words and tensors", ""), *header.sections(HEADER.read_text())]
    return [line for number, name, about in found for line in (
        f"## {name[0].upper()}{name[1:]}", "", plain(about), "",
        f"```{{doxygengroup}} section{number}", ":content-only:", ":members:", ":undoc-members:",
        "```", "")]


ADVICE = {  # what a user does about each code
    "NOT_READY": "Nothing: ask again later.",
    "INVALID_ARG": "The text names the field, the value and the range. Structs are filled by "
                   "`moec_struct_init`, so that fields not set are 0.",
    "INVALID_STATE": "Bind weights, build the plan, or create the layer with a `save` policy "
                     "before the call.",
    "ABI": "The program was compiled for another header, or a struct was not initialised: call "
           "`moec_struct_init`; compare `moec_abi_version()` with `MOEC_ABI_VERSION`.",
    "SHAPE": "The text has both shapes. In Julia sizes are reversed.",
    "DTYPE": "The text names the types that fit. fp32 matrices beside 16-bit rows are the one mix.",
    "LAYOUT": "Make the array compact (`contiguous()`), or declare the matrix `IN_OUT`.",
    "DEVICE": "Put the array where the context is: `Context.array`, `DeviceArray`, "
              "`moec_tensor_copy`. Nothing is copied behind your back.",
    "UNSUPPORTED": "A legal wish that this version does not have; the text says what it has.",
    "OUT_OF_MEMORY": "Fewer tokens a call, `save` = `INPUT`, or another `workspace_limit`.",
    "WORKSPACE": "Ask `moec_layer_query` (or `*need`) for the size at this number of tokens.",
    "NO_BACKEND": "`moec info`, or `moec_backend_describe`, says what the machine lacks.",
    "BACKEND_ABI": "libmoec and libmoec_cuda are of two builds: install both anew.",
    "WOULD_SYNC": "A stream is being captured: move the copy to pageable memory, or the `_sync` "
                  "call, out of the capture.",
    "WOULD_ALLOC": "Make the same call once before capturing, call `moec_context_reserve`, or "
                   "give a workspace.",
    "CUDA": "`native_code` is the driver's `cudaError_t`. Later calls may fail, too.",
    "COMM": "Another rank was refused, or a transport failed: the text names the rank. Look at its "
            "own error first.",
    "TIMEOUT": "A rank did not come in time: it stopped, or calls other functions. Comm and ep are "
               "broken; make new ones.",
    "CALLBACK": "Your thread pool or allocator returned an error: `native_code` is its value.",
    "FORKED": "Create the context in the child. In Python: start workers with `spawn`.",
    "OVERFLOW": "Fewer tokens a call: an index would not fit.",
    "ALIAS": "Give the output memory of its own; only `y` may be the residual.",
    "MISMATCH": "Use the plan, the saved buffer and the weights of the same descriptors, and of "
                "the same forward.",
    "CORRUPT": "Write the file again; it is cut short, changed, or of another version.",
    "INTERNAL": "A fault of moec: please report it with the text.",
}
def statuses():
    import without_library
    without_library.install()
    from moec import MoecError, _errors

    text = HEADER.read_text()
    body = text[text.index("enum moec_status_code {"):]
    body = body[:body.index("};")]
    advice, rows = dict(ADVICE), []
    for name, value, about in re.findall(
            r"MOEC_((?:E|S)_\w+) = (-?\d+),?(?: +/\* (.*?) \*/)?", body):
        raised = _errors._BY_CODE.get(int(value), MoecError).__name__ if int(value) < 0 else ""
        rows.append([f"`{name}` ({value}) {raised}".strip(), plain(about), advice.pop(name[2:])])
    if advice:
        raise ValueError(f"moec.h has no status {', '.join(advice)}")
    return table(["code, Python's class", "means", "what to do"], rows)


# ---- speeds ----

def results():
    return report_tables.Results(ROOT, ".")


TABLES = {
    "families": families,
    "formats": formats,
    "schemes": scheme_texts,
    "conventions": conventions,
    "statuses": statuses,
    "C sections": c_sections,
    "moec.torch": lambda: python_static.reference("torch"),
    "moec.transformers": lambda: python_static.reference("transformers"),
    "moec.jax": lambda: python_static.reference("jax"),
    "headline": lambda: report_tables.headline(results()) + report_ep.ep_headline(results()),
    "seven layers": lambda: report_tables.seven_layers(results()),
    "GPU": lambda: report_tables.gpu_tables(results()),
    "codes": lambda: report_tables.codes_tables(results()),
    "ranks": lambda: report_ep.ep_tables(results()),
    "ranks headline": lambda: report_ep.ep_headline(results()),
    "CPU": lambda: report_tables.cpu_tables(results()),
    "models": lambda: report_tables.model_tables(results()),
}
