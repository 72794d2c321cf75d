"""What is checked inside real processes, which `test_processes.py` starts; so no pytest is imported here."""

import os
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import eqshard


def everything():
    """Runs all checks, each by itself; returns {name: seconds}, or raises after all with what failed."""
    took, failed = {}, []
    for name, check in CHECKS.items():
        started = time.monotonic()
        print("check", name, flush=True)
        try:
            check()
        except Exception as error:  # noqa: BLE001  the others must not wait for this process
            failed.append(f"{name}: {type(error).__name__}: {error}")
            import traceback

            traceback.print_exc()
        took[name] = time.monotonic() - started
    assert not failed, "\n".join(failed)
    return took


def raises(kind, text, fn, *args, **options):
    try:
        fn(*args, **options)
    except kind as error:
        assert text in str(error), str(error)
        return str(error)
    raise AssertionError(f"no {kind.__name__}")


def meshes(**sizes):
    return [eqshard.MeshSpec(sizes, axis_type=t) for t in ("auto", "explicit")]


def whole_batch():
    """The batch that a single process would have; rows tell themselves apart."""
    rows = np.arange(16)
    return {
        "tokens": rows[:, None] * 100 + np.arange(8)[None, :],  # int64, and fits int32
        "image": np.arange(16 * 4 * 4 * 3, dtype="float32").reshape(16, 4, 4, 3),
        "weight": rows.astype("float32"),
        "step": np.float32(3.0) * np.ones((), "float32"),
        "name": "train",
    }


def part_of(batch, mesh, spec):
    share = eqshard.process_share(mesh, spec)
    return jax.tree.map(
        lambda x: eqshard.process_slice(x, share=share) if isinstance(x, np.ndarray) and x.ndim else x, batch
    )


def same(found, expected):
    """Equal in all leaves, content compared on every process."""
    host = eqshard.gather(found, to="all")
    assert jax.tree.structure(host) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(host), jax.tree.leaves(expected)):
        equal = np.array_equal(a, b) if isinstance(b, np.ndarray) else a == b
        assert equal, (str(a)[:500], str(b)[:500])


def each_in_its_place(x):
    """No device holds another piece than its own."""
    for shard in x.addressable_shards:
        assert np.array_equal(np.asarray(shard.data), whole_batch()["tokens"][shard.index])


def local_parts():
    batch = whole_batch()
    for spec in (P("dp"), P("dp", "tp"), P(("dp", "tp"))):
        for mesh in meshes(dp=4, tp=2):
            specs = {"tokens": spec, "image": P(spec[0]), "weight": spec, "step": spec, "name": None}
            part = part_of(batch, mesh, spec)
            for as_jax in (False, True):
                mine = {k: jnp.asarray(v) if as_jax and isinstance(v, np.ndarray) else v for k, v in part.items()}
                placed = eqshard.shard_batch(mine, mesh, specs, local=True)
                assert placed["tokens"].shape == (16, 8) and placed["tokens"].dtype == "int32"
                assert placed["tokens"].sharding.spec == spec
                same(placed, batch)
                each_in_its_place(placed["tokens"])


def interleaved_parts():
    """The blocks of a process do not lie together: rows come in another order, the same for all leaves."""
    batch = whole_batch()
    for mesh in meshes(dp=4, tp=2):
        spec = P(("tp", "dp"))
        assert eqshard.process_share(mesh, spec).parts == jax.process_count()
        host = eqshard.gather(eqshard.shard_batch(part_of(batch, mesh, spec), mesh, spec, local=True), to="all")
        order = host["weight"].astype(int)
        assert sorted(order) == list(range(16)) and list(order) != list(range(16))
        assert np.array_equal(host["tokens"], batch["tokens"][order])
        assert np.array_equal(host["image"], batch["image"][order])


def whole_batches():
    batch = whole_batch()
    for mesh in meshes(dp=4, tp=2):
        for as_jax in (False, True):
            given = {k: jnp.asarray(v) if as_jax and isinstance(v, np.ndarray) else v for k, v in batch.items()}
            placed = eqshard.shard_batch(given, mesh, P("dp"))
            same(placed, batch)
            each_in_its_place(placed["tokens"])
        again = eqshard.shard_batch(placed, mesh, P("dp"), local=True)  # what is global already stays
        assert all(a is b for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(placed)))


def forgotten_local():
    """Parts passed off as the whole: the mistake that loses data silently elsewhere."""
    [mesh, _] = meshes(dp=8)
    part = {"x": eqshard.process_slice(np.arange(32, dtype="int32"))}
    text = raises(eqshard.ProcessError, "local=True", lambda: eqshard.shard_batch(part, mesh, P("dp")))
    assert "`['x']`" in text
    eqshard.shard_batch(part, mesh, P("dp"), check=False)


def shares_of_a_crossing_model_axis():
    """Where the model axis crosses processes, several processes hold, and load, the same rows."""
    n = jax.process_count()
    mesh = eqshard.MeshSpec(tp=n, dp=8 // n, dcn="tp")
    assert eqshard.process_share(mesh, P("dp")) == (0, 1)
    mesh = eqshard.MeshSpec(dp=8 // n, tp=n, dcn="dp" if n == 2 else ("dp", "tp"))
    assert eqshard.process_share(mesh, P("dp")) == (
        (jax.process_index(), 2) if n == 2 else (jax.process_index() // 2, 2)
    )
    batch = {"x": np.arange(32, dtype="int32").reshape(16, 2)}
    part = {"x": eqshard.process_slice(batch["x"], mesh=mesh, spec=P("dp"))}
    same(eqshard.shard_batch(part, mesh, P("dp"), local=True), batch)


def padding():
    [mesh, explicit] = meshes(dp=8)
    n = jax.process_count()
    for m in (mesh, explicit):
        part = {"x": np.arange(5, dtype="int32") + 10 * jax.process_index(), "s": "a"}
        placed, mask, info = eqshard.shard_batch(part, m, P("dp"), local=True, pad=-1, rows=64, info=True)
        assert placed["x"].shape == mask.shape == (64,) and info["['x']"].shape_before == (5,)
        host, real = eqshard.gather([placed["x"], mask], to="all")
        assert real.sum() == 5 * n and (host[~real] == -1).all()
        assert sorted(host[real]) == sorted(i + 10 * p for p in range(n) for i in range(5))
    # a process may have fewer rows than others, if the number of all is told
    part = {"x": np.full(jax.process_index() + 1, jax.process_index(), "int32")}
    placed, mask = eqshard.shard_batch(part, mesh, P("dp"), local=True, pad=0, rows=32)
    assert int(eqshard.batch_statistics(mask, jnp.sum)) == n * (n + 1) // 2


def mlp(*sizes):
    """An MLP whose parameters numpy drew: nothing to compile."""
    rng = np.random.default_rng(0)
    shape = eqx.filter_eval_shape(lambda: eqx.nn.MLP(*sizes, key=jax.random.key(0)))
    draw = lambda x: rng.normal(size=x.shape).astype("float32") / 4 if isinstance(x, jax.ShapeDtypeStruct) else x
    return jax.tree.map(draw, shape)


def applying():
    model = mlp(8, 8, 16, 1)
    tree = {
        "model": model,
        "nan": np.full((8,), np.nan, "float32"),  # a device_put over processes says that NaNs differ
        "keys": jax.random.split(jax.random.key(1), 8),
        "half": jnp.ones((8,), "bfloat16"),
        "local": jax.device_put(jnp.arange(8), jax.local_devices()[1]),
        "name": "x",
    }
    for mesh in meshes(dp=2, tp=4):
        plan = eqshard.replicated_plan(tree, mesh).at("weight").set(P("tp", "dp")).at("nan|keys|half").set(P("tp"))
        plan = plan.at("local").set(P(("dp", "tp")))
        placed = eqshard.apply(plan, tree)
        assert eqshard.plan_of(placed) == eqshard.plan_of(eqshard.apply(plan, placed))
        assert eqshard.plan_of(placed).specs() == plan.specs()
        assert eqshard.plan_of(placed).fingerprint() == one_text(eqshard.plan_of(placed).fingerprint())
        moved = eqshard.replicate(placed, mesh)  # from one layout over processes to another
        raises(eqshard.ShardingError, "another process", eqshard.gather, placed)
        for found in (eqshard.gather(placed, to="all"), eqshard.gather(moved)):
            for (path, a), (_, b) in zip(named(found), named(tree)):
                if isinstance(b, jax.Array) and jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
                    a, b = jax.random.key_data(a), jax.random.key_data(b)
                same_bits = (
                    np.asarray(a).tobytes() == np.asarray(b).tobytes() if hasattr(b, "shape") else a is b or a == b
                )
                assert same_bits, path
        one = eqshard.gather(placed, to=0)
        assert isinstance(one["nan"], np.ndarray if jax.process_index() == 0 else jax.ShapeDtypeStruct)
        raises(eqshard.ShardingError, "no process", eqshard.gather, placed, to=9)
        eqshard.check_processes(placed)


def moving_tree(width):
    """Eight MLPs and the state of Adam; numpy drew them."""
    models = [mlp(width, width, 4 * width, 2) for _ in range(8)]
    zeros = jax.tree.map(np.zeros_like, eqx.filter(models, eqx.is_array))
    return {"model": models, "mu": zeros, "nu": jax.tree.map(np.copy, zeros), "step": np.zeros((), "int32")}


def moving(moves=8, width=128):
    """From layout to layout, many leaves at a time: JAX alone hangs at the first or second move."""
    tree = moving_tree(width)
    mesh = eqshard.MeshSpec(data=2, tp=4)
    rules = [(r"layers\[[02]\].weight", P("tp")), (r"layers\[1\].weight", P(None, "tp")), (".*", P())]
    plans = [
        eqshard.fsdp_plan(tree, mesh, ("data", "tp")),
        eqshard.rule_plan(tree, mesh, rules),
        eqshard.replicated_plan(tree, mesh),
        eqshard.auto_plan(tree, mesh),
    ]
    placed = eqshard.apply(plans[-1], tree)
    for i in range(moves):
        plan = plans[(i + i // 4) % 4]
        placed = eqshard.apply(plan, placed, donate=i % 2 == 1)
        assert eqshard.plan_of(placed).specs() == plan.specs()
    same(eqx.filter(placed, eqx.is_array), eqx.filter(tree, eqx.is_array))


def parted_ways():
    """Processes that do different things are told, instead of waiting for each other forever."""
    me = jax.process_index()
    [mesh, _] = meshes(dp=8)
    tree = {"w": np.ones((8, 8), "float32")}
    plan = eqshard.replicated_plan(tree, mesh)
    rows, columns = plan.at("w").set(P("dp")), plan.at("w").set(P(None, "dp"))
    placed = eqshard.apply(rows, tree)
    started = time.monotonic()
    raises(eqshard.ProcessError, "process 1 differs", lambda: eqshard.apply(columns if me == 1 else plan, placed))
    act = (lambda: eqshard.gather(placed, to="all")) if me == 1 else (lambda: eqshard.apply(plan, placed))
    text = raises(eqshard.ProcessError, "process 1 differs", act)
    assert "the next call is `gather(to='all')`, not `apply`" in text, text
    make = lambda key: {"w": jax.random.normal(key, (8, 8))}
    text = raises(eqshard.ProcessError, "argument", lambda: eqshard.init(rows, make, jax.random.key(me % 2)))
    assert time.monotonic() - started < 20
    if me == 1:
        time.sleep(2.5)  # one step late
    raises(eqshard.ProcessError, "did not reach", lambda: eqshard.apply(plan, placed, timeout=1))
    same(eqshard.apply(columns, placed), tree)  # and goes on


def named(tree):
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def one_text(text):
    """What process 0 says."""
    from eqshard._agree import exchange

    return exchange("test", text, 20)[0]


def differing_plans():
    me, n = jax.process_index(), jax.process_count()
    tree = {"w": np.ones((8, 8), "float32"), "b": np.ones(8, "float32")}
    plan = eqshard.replicated_plan(tree, eqshard.MeshSpec(dp=8))
    for _ in range(3):
        eqshard.check_processes(plan)
    eqshard.check_processes(plan.mesh)
    eqshard.check_processes(eqshard.PartitionAxis())
    eqshard.check_processes(tree)
    other = plan.at("w").set(P("dp")) if me == 1 else plan
    started = time.monotonic()
    text = raises(eqshard.ProcessError, "process 1 differs from process", lambda: eqshard.check_processes(other))
    assert time.monotonic() - started < 30
    assert "`['w']` is float32[8,8] P('dp'), not float32[8,8] P()" in text, text
    alone = {"w": np.full((8, 8), me, "float32")}
    text = raises(eqshard.ProcessError, "do not hold the same tree", lambda: eqshard.check_processes(alone))
    assert all(f"process {i}" in text or f", {i}" in text for i in range(1, n)), text
    eqshard.check_processes(plan)  # and goes on


def mapping():
    for mesh in meshes(dp=8):
        batch = {"x": np.arange(16, dtype="float32"), "name": "a"}
        placed = eqshard.shard_batch(batch, mesh, P("dp"))
        out = eqshard.parallel_map(centred, placed, mesh, P("dp"))
        same(out, {"x": batch["x"] - 7.5, "mean": np.float32(7.5).reshape(()), "name": "a"})
        total = eqshard.batch_statistics(placed, lambda b: {"sum": b["x"].sum()})
        assert float(total["sum"]) == 120.0
        stats = eqshard.ShardStats().update(placed)
        assert (stats.examples, stats.bytes) == (16, 64)


def centred(batch):
    mean = jax.lax.pmean(batch["x"].mean(), "dp")
    return {"x": batch["x"] - mean, "mean": mean, "name": batch["name"]}


def prefetching():
    [mesh, _] = meshes(dp=8)
    like = {"x": jax.ShapeDtypeStruct((16,), "int32")}
    plan = eqshard.replicated_plan(like, mesh).at("x").set(P("dp"))
    batches = [{"x": np.arange(16, dtype="int32") + 100 * i} for i in range(5)]
    parts = ({"x": eqshard.process_slice(b["x"])} for b in batches)
    for placed, batch in zip(eqshard.prefetch(parts, plan, local=True), batches, strict=True):
        same(placed, batch)
    for placed, batch in zip(eqshard.prefetch(iter(batches), plan), batches, strict=True):
        same(placed, batch)
    raises(
        eqshard.ProcessError,
        "local=True",
        lambda: next(eqshard.prefetch([{"x": batches[0]["x"] + jax.process_index()}], plan)),
    )


def hybrid_meshes():
    n = jax.process_count()
    each = 8 // n
    for axis_type in ("auto", "explicit"):
        for mesh in (
            eqshard.MeshSpec(data=n, tp=each, dcn="data", axis_type=axis_type),
            eqshard.MeshSpec(tp=each, data=n, dcn="data", axis_type=axis_type),
            eqshard.MeshSpec(a=each // 2, data=n, b=2, dcn="data", axis_type=axis_type),
        ):
            grid = np.moveaxis(mesh.build().devices, mesh.names.index("data"), 0)
            assert [{d.process_index for d in part.flat} for part in grid] == [{i} for i in range(n)]
            x = np.arange(64, dtype="float32").reshape(8, 8)
            spec = P("data", mesh.names[0] if mesh.names[0] != "data" else "tp")
            same(eqshard.shard_batch({"x": x}, mesh, spec), {"x": x})
    # an axis longer than there are processes: its major part crosses
    grid = eqshard.MeshSpec(data=8, tp=1, dcn="data").build().devices[:, 0]
    assert [d.process_index for d in grid] == [i // each for i in range(8)]
    if n == 4:  # two axes that cross
        grid = eqshard.MeshSpec(replica=2, data=2, tp=2, dcn=("replica", "data")).build().devices
        assert [[{d.process_index for d in row} for row in rows] for rows in grid] == [[{0}, {1}], [{2}, {3}]]
    raises(eqshard.MeshError, "multiple of", lambda: eqshard.MeshSpec(a=1, tp=8, dcn="a").build())


def initialising():
    """Born sharded, and the same numbers as when made whole."""
    make = lambda key: {"w": jax.random.normal(key, (8, 16)), "b": jnp.zeros(16), "name": "a"}
    whole = jax.tree.map(lambda x: np.asarray(x) if isinstance(x, jax.Array) else x, make(jax.random.key(0)))
    for mesh in meshes(dp=2, tp=4):
        plan = eqshard.replicated_plan(whole, mesh).at("w").set(P("dp", "tp"))
        made = eqshard.init(plan, make, jax.random.key(0))
        assert eqshard.plan_of(made).specs() == plan.specs()
        same(made, whole)


def losses(steps=8):
    """A small training run, as the examples do it: FSDP parameters, each process loads its own rows."""
    mesh = eqshard.MeshSpec(data=4, tp=2)
    model = mlp(8, 1, 32, 2)
    plan = eqshard.replicated_plan(model, mesh).at(r"\[[01]\].weight").set(P("tp", "data"))
    eqshard.check_processes(plan)
    params = eqshard.apply(plan, model)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(4, 16, 8)).astype("float32")
    data = {"x": x, "y": np.sin(x.sum(axis=2, keepdims=True))}
    batches = (
        {k: eqshard.process_slice(v[i % 4], mesh=mesh, spec=P("data")) for k, v in data.items()} for i in range(steps)
    )

    @eqx.filter_jit
    def step(params, batch):
        loss, grads = eqx.filter_value_and_grad(mean_square)(params, batch)
        params = eqx.apply_updates(params, jax.tree.map(lambda g: -0.05 * g, grads))
        return eqshard.apply(plan, params), loss

    found = []
    place = lambda batch: eqshard.shard_batch(batch, mesh, P("data"), local=True)
    for batch in eqshard.prefetch(batches, place):
        params, loss = step(params, batch)
        found.append(float(loss))
    assert eqshard.plan_of(params).specs() == plan.specs()
    return found, jax.tree.map(np.asarray, eqshard.gather(eqx.filter(params, eqx.is_array), to="all"))


def mean_square(params, batch):
    def forward(x):
        for layer in params.layers[:-1]:
            x = jax.nn.relu(x @ layer.weight.T + layer.bias[None])
        return x @ params.layers[-1].weight.T + params.layers[-1].bias[None]

    return jnp.mean((forward(batch["x"]) - batch["y"]) ** 2)


CHECKS = {
    f.__name__: f
    for f in (
        local_parts,
        interleaved_parts,
        whole_batches,
        forgotten_local,
        shares_of_a_crossing_model_axis,
        padding,
        applying,
        parted_ways,
        differing_plans,
        mapping,
        prefetching,
        hybrid_meshes,
        initialising,
    )
}


def all_and_train():
    return everything(), losses()


def dying(who, where):
    """One process dies: while the others train, while they are busy by themselves, or when they are about to check."""
    n = jax.device_count()
    mesh = eqshard.MeshSpec(dp=n)
    x = eqshard.shard_batch(np.ones(n, "float32"), mesh, P("dp"))
    total = jax.jit(jnp.sum)
    print(float(total(x)), flush=True)
    if where == "check":
        silent(who, eqshard.replicated_plan({"w": x}, mesh))
    print("died at", time.time(), flush=True)
    if jax.process_index() == who:
        os._exit(7)
    end = time.monotonic() + 100
    while time.monotonic() < end:
        if where == "alone":
            time.sleep(0.1)
        else:
            float(total(x))
    return "never noticed"


def silent(who, plan):
    """A process that does not come to a check is named by all others, in time."""
    if jax.process_index() == who:
        time.sleep(5)
        return
    started = time.monotonic()
    text = raises(eqshard.ProcessError, "did not reach", eqshard.check_processes, plan, timeout=3)
    assert f"process {who} of 3 did not reach the check of the ShardingPlan within 3 s" in text, text
    assert time.monotonic() - started < 5
    print("named the silent process", flush=True)
