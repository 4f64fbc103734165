# SPDX-License-Identifier: Apache-2.0
"""moec in Hugging Face transformers. Importing this registers the experts implementation "moec":

    import moec.transformers
    model = AutoModelForCausalLM.from_pretrained(name, experts_implementation="moec")

enable(model) does the same to a model that is built, covers blocks that transformers does not
dispatch (Llama-4), returns what now runs on moec and raises if a MoE block is left out.

Quantised loads keep experts packed: bitsandbytes' 4 bits (load_in_4bit), gpt-oss's MXFP4, and
checkpoints of compressed-tensors, AWQ and GPTQ.
report(model) says what is packed; save_merged(model, folder) writes plain values for everyone.
convert_adapter(model, folder, target) rewrites adapters of PEFT before 0.19.1.

With transformers 5.23 and later DistributedConfig(ep_implementation="moec") parts the experts of a
model between processes, see _parallel.
"""

from importlib.util import find_spec

from . import _bnb, _mxfp4, _per_expert
from ._convert import convert_adapter
from ._enable import enable, refresh
from ._experts import experts_forward
from ._report import report
from ._save import save_merged

if find_spec("transformers.distributed.expert_parallel"):  # transformers 5.23 and later
    from . import _parallel as _parallel

_bnb.register()
_mxfp4.register()
_per_expert.register()

__all__ = ["convert_adapter", "enable", "experts_forward", "refresh", "report", "save_merged"]
