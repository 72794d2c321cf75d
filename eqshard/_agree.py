"""Whether all processes hold the same: compared through the coordinator, with a time limit, never by a collective."""

import hashlib
import json
import math
import time
import zlib
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from jax._src import distributed  # the coordinator's key-value store; JAX has no public way to it
from jax.sharding import NamedSharding

from ._errors import ProcessError
from ._layout import spec_of
from ._plan import ShardingPlan
from ._put import is_global, is_key, is_tracing
from ._spec import spec_text
from ._tree import array_leaves, dtype_name, some, Tree, type_text
from ._value import digest, Value


_MOST = 1_000_000  # bytes of details that a process publishes
_SMALL = 2**18  # elements of an argument whose values are compared
_LEFT = "left"  # said by a process that has stopped waiting
PATIENCE = 300.0
"""Seconds that a process waits for the others before an action of all of them, unless told otherwise."""


def check_processes(x: ShardingPlan | Value | Tree, *, timeout: float | int = 30.0) -> None:
    """Raises, in every process, unless all processes hold the same plan, mesh, names, or tree of arrays.

    To be called once by every process, before the first step: programs that differ wait for each other for ever.
    Nothing is computed on devices, so a process that is late, dead, or elsewhere cannot make the others hang: it is
    named when the time is over. With one process there is nothing to compare.

    ```python
    import eqshard, jax.numpy as jnp
    plan = eqshard.replicated_plan({"w": jnp.ones(8)}, eqshard.MeshSpec(data=8))
    eqshard.check_processes(plan)
    ```

    **Arguments:**

    - `x`: a `ShardingPlan`, `MeshSpec` or `PartitionAxis`; or a tree, of which paths, shapes, dtypes and layouts are
        compared, and the values of those arrays that the process can read by itself.
    - `timeout`: seconds to wait for the slowest process.

    **Raises:**

    - `ProcessError`: processes differ, or one did not answer in time. Says which, and in what they differ.
    """
    if jax.process_count() == 1:
        return
    facts = _facts(x)
    agree(type(x).__name__ if isinstance(x, Value) else "tree", facts, timeout=timeout)


def agree_to(action: str, facts: dict[str, str], devices: Iterable[Any], *, timeout: float | int = PATIENCE) -> None:
    """Raises, in every process that has one of `devices`, unless all are about to do the same with collectives.

    All actions share a channel, so that a process that gathers meets those that apply, and each is told.
    """
    members = tuple(sorted({d.process_index for d in devices}))
    if len(members) > 1 and jax.process_index() in members:
        what = f"arguments of `{action}`"
        agree(what, {"the next call": f"`{action}`", **facts}, channel="action", timeout=timeout, members=members)


def agree_to_move(
    action: str, moves: Iterable[tuple[str, Any, NamedSharding | None]], *, timeout: float | int = PATIENCE
) -> None:
    """`agree_to`, for arrays over several processes that go from their layouts to others, or to the hosts."""
    if jax.process_count() == 1 or is_tracing():
        return
    across = [(path, x, to) for path, x, to in moves if is_global(x)]
    facts = {
        f"`{path}`": _leaf_text(x) + ("" if to is None else f" to {spec_text(to.spec)} on {dict(to.mesh.shape)}")
        for path, x, to in across
    }
    agree_to(action, facts, {d for _, x, _ in across for d in x.sharding.device_set}, timeout=timeout)


def argument_facts(args: Tree) -> dict[str, str]:
    """What can be compared of arguments that every process must pass alike; values only of small arrays."""
    small = {path: x for path, x in array_leaves(args) if math.prod(x.shape) <= _SMALL}
    rest = {path: type_text(tuple(x.shape), dtype_name(x)) for path, x in array_leaves(args) if path not in small}
    return {f"argument `{path}`": _leaf_text(x) for path, x in small.items()} | {
        f"argument `{path}`": text for path, text in rest.items()
    }


def agree(
    what: str,
    facts: dict[str, str],
    *,
    channel: str = "check",
    timeout: float | int = 30.0,
    members: tuple[int, ...] | None = None,
) -> None:
    """Compares `facts` over the processes; those of one `channel` must ask in the same order."""
    members = tuple(range(jax.process_count())) if members is None else members
    if len(members) < jax.process_count():
        channel = f"{channel}/of/{'-'.join(map(str, members))}"
    told = exchange(channel, f"{what} {digest(facts)}", timeout, members)
    # Those that came and stopped waiting are to blame only if everybody came.
    missing = [i for i in members if i not in told] or [i for i in members if told[i] == _LEFT]
    if missing:
        raise ProcessError(
            f"{_processes(missing)} of {len(members)} did not reach the check of the {what} within "
            f"{timeout:g} s; {_processes(set(members) - set(missing))} did. It died, is slower than that, or does "
            "something else."
        )
    groups: dict[str, list[int]] = {}
    for i, text in sorted(told.items()):
        groups.setdefault(text, []).append(i)
    if len(groups) > 1:
        raise ProcessError(_disagreement(what, facts, list(groups.values()), channel, timeout, members))


def exchange(channel: str, text: str, timeout: float | int, members: tuple[int, ...] | None = None) -> dict[int, str]:
    """What each process says, as far as it does within the time.

    How often a channel was used is counted by the coordinator, not here. A process that has everybody's answer knows
    that everybody is past the round before, and removes what it said then. One that stops waiting says so: who comes
    later must not go on alone.
    """
    client, me = _client(), jax.process_index()
    expected = jax.process_count() if members is None else len(members)
    try:
        turn = client.key_value_increment(f"eqshard/{channel}/turn/{me}", 1)
        folder = f"eqshard/{channel}/said/{turn}/"
        client.key_value_set(f"{folder}{me}", text)
        told = _poll(client, folder, time.monotonic() + timeout, expected)
        if len(told) == expected:
            client.key_value_delete(f"eqshard/{channel}/said/{turn - 1}/{me}")
        else:
            client.key_value_set(f"{folder}{me}", _LEFT, allow_overwrite=True)
    except jax.errors.JaxRuntimeError as error:
        raise ProcessError(f"the coordinator, which is process 0, does not answer: {error}") from None
    return told


def new_channel(kind: str) -> str:
    """A channel that nobody has used; processes that ask in the same order get the same."""
    turn = _client().key_value_increment(f"eqshard/{kind}/turn/{jax.process_index()}", 1)
    return f"{kind}/{turn}"


def _poll(client: Any, folder: str, deadline: float, expected: int) -> dict[int, str]:
    pause = 0.001
    while True:
        told = {int(key.rsplit("/", 1)[1]): value for key, value in client.key_value_dir_get(folder)}
        if len(told) == expected or time.monotonic() > deadline:
            return told
        time.sleep(pause)
        pause = min(2 * pause, 0.1)


def _client() -> Any:
    client = distributed.global_state.client
    if client is None:
        raise ProcessError("there is no coordinator: call `jax.distributed.initialize` before JAX is first used.")
    return client


def _disagreement(
    what: str,
    facts: dict[str, str],
    groups: list[list[int]],
    channel: str,
    timeout: float | int,
    members: tuple[int, ...],
) -> str:
    """The message. All processes come here, so they can tell each other more."""
    most = max(groups, key=lambda group: (len(group), 0 in group))
    others = [group for group in groups if group is not most]
    lines = [
        f"the processes do not hold the same {what}: {_processes(i for group in others for i in group)} "
        f"{'differs' if len(others) == len(others[0]) == 1 else 'differ'} from {_processes(most)}."
    ]
    packed = zlib.compress(json.dumps(facts).encode()).hex()
    told = exchange(f"{channel}/facts", packed if len(packed) <= _MOST else "", timeout, members)
    known = {i: json.loads(zlib.decompress(bytes.fromhex(text))) for i, text in told.items() if text not in ("", _LEFT)}
    for group in others:
        if group[0] in known and most[0] in known:
            lines.append(f"  {_processes(group)}: {_first_difference(known[most[0]], known[group[0]])}")
    return "\n".join(lines)


def _first_difference(right: dict[str, str], other: dict[str, str]) -> str:
    different = [k for k in right | other if right.get(k) != other.get(k)]
    first = different[0]
    rest = f"; and {len(different) - 1} more differences" if len(different) > 1 else ""
    return f"{first} is {other.get(first, 'missing')}, not {right.get(first, 'missing')}{rest}"


def _processes(indices: Iterable[int]) -> str:
    names = [str(i) for i in sorted(indices)]
    return f"process{'es' if len(names) > 1 else ''} {some(names, 20)}"


def _facts(x: Any) -> dict[str, str]:
    """What is compared, as texts with names."""
    if isinstance(x, ShardingPlan):
        rows = {f"`{leaf.path}`": _row_text(leaf) for leaf in x}
        return {"the mesh": repr(x.mesh), **rows, "the fingerprint": x.fingerprint()}
    if isinstance(x, Value):
        return {"it": repr(x), "its digest": digest(x.to_dict())}
    return {f"`{path}`": _leaf_text(leaf) for path, leaf in array_leaves(x)}


def _row_text(leaf: Any) -> str:
    use = "" if leaf.use == leaf.spec else f", in use {spec_text(leaf.use)}"
    kind = "" if leaf.memory_kind is None else f" in {leaf.memory_kind}"
    return f"{leaf.type} {spec_text(leaf.spec)}{use}{kind}"


def _leaf_text(x: Any) -> str:
    text = f"{type_text(tuple(x.shape), dtype_name(x))} {spec_text(spec_of(x))}"
    if isinstance(x, np.ndarray) or (isinstance(x, jax.Array) and x.is_fully_addressable):
        return f"{text} with the values {value_digest(x)}"
    return text


def value_digest(x: Any) -> str:
    """A hash of the values of an array that this process can read."""
    host = np.asarray(jax.random.key_data(x) if is_key(x) else x)
    return hashlib.blake2b(np.ascontiguousarray(host).view(np.uint8).data, digest_size=12).hexdigest()
