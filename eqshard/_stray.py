"""Which arrays lie on devices where they should not."""

from collections.abc import Iterable
from typing import Any

import jax
from jax.core import Tracer

from ._errors import ShardingError
from ._tree import shown, some


class StrayError(ShardingError):
    """An array lies on other devices than the ones that a computation is to run on."""


def is_placed(x: Any) -> bool:
    """Whether `x` is an array that JAX would not move by itself."""
    return isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.committed


def check_devices(named: Iterable[tuple[str, Any]], devices: frozenset[Any], what: str) -> None:
    """Raises if an array lies elsewhere, with the names of all that do.

    **Arguments:**

    - `what`: whose devices those are, for the message.
    """
    strays = [(path, x) for path, x in named if is_placed(x) and x.sharding.device_set != devices]
    if not strays:
        return
    lines = [f"{shown(path)} on {_devices_text(x.sharding.device_set)}" for path, x in strays]
    raise StrayError(
        f"{len(strays)} array{'s' * (len(strays) > 1)} on other devices than {what}, {_devices_text(devices)}: "
        f"{some(lines)}.\n  Lay them out first with `eqshard.apply(plan, tree)` or `eqshard.replicate(tree, mesh)`."
    )


def _devices_text(devices: Iterable[Any]) -> str:
    found = sorted(devices, key=lambda d: d.id)
    ids = [d.id for d in found]
    run = ids == list(range(ids[0], ids[0] + len(ids))) and len(ids) > 2
    return f"{found[0].platform} " + (f"{ids[0]} to {ids[-1]}" if run else some(map(str, ids), 8))
