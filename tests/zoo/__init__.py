"""Models of many kinds as whole steps, to plan, constrain, compile and compare.

`case("llama_scan", size="tiny")` has `.step`, `.args` (shapes), `.make(key)` and `.layouts(mesh)`.
"""

from . import gpt2, llama, mlp, moe
from ._case import Case as Case, Hooks as Hooks, training_case
from ._layouts import Layout as Layout


_TRAINED = {
    "mlp": mlp.MODEL,
    "gpt2": gpt2.MODEL,
    "llama_scan": llama.SCANNED,
    "llama_unrolled": llama.UNROLLED,
    "moe": moe.BY_EINSUM,
    "moe_index": moe.BY_INDEX,
}

NAMES = tuple(_TRAINED)
"""The cases there are."""


def case(name: str, size: str = "tiny") -> Case:
    """The case of a name, at a size: "tiny", "bench", or another that its file has."""
    return training_case(name, size, _TRAINED[name])
