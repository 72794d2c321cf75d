"""Models of many kinds as whole steps, to plan, constrain, compile and compare.

`case("llama_scan", size="tiny")` has `.step`, `.args` (shapes), `.make(key)` and `.layouts(mesh)`.
"""

from . import dlrm, gpt2, llama, mamba, mlp, moe, resnet, serving, t5, unet, vit
from ._case import Case as Case, Hooks as Hooks, training_case
from ._layouts import Layout as Layout


_TRAINED = {
    "mlp": mlp.MODEL,
    "gpt2": gpt2.MODEL,
    "llama_scan": llama.SCANNED,
    "llama_unrolled": llama.UNROLLED,
    "moe": moe.BY_EINSUM,
    "moe_index": moe.BY_INDEX,
    "vit": vit.MODEL,
    "resnet": resnet.MODEL,
    "unet": unet.MODEL,
    "t5": t5.MODEL,
    "mamba": mamba.ASSOCIATIVE,
    "mamba_loop": mamba.LOOP,
    "dlrm": dlrm.MODEL,
}
_SERVED = {"llama_prefill": serving.prefill_case, "llama_decode": serving.decode_case}

NAMES = (*_TRAINED, *_SERVED)
"""The cases there are."""


def case(name: str, size: str = "tiny") -> Case:
    """The case of a name, at a size: "tiny", "bench", or another that its file has."""
    if name in _SERVED:
        return _SERVED[name](size)
    return training_case(name, size, _TRAINED[name])
