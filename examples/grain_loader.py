"""A grain pipeline that feeds a mesh: each process reads its share, `prefetch` moves it, no element is read twice."""

import grain.python as grain
import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import eqshard


jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


class Squares:
    """Any random-access source: a length, and elements by number."""

    def __len__(self) -> int:
        return 103

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"i": np.array(index, "int32"), "square": np.array(index**2, "float32")}


def local_batches(mesh: eqshard.MeshSpec, rows: int, seed: int):
    """Batches of this process's elements. What does not divide over the processes is left out, as told."""
    mine = eqshard.process_slice(Squares(), mesh=mesh, spec=P("data"), remainder="drop", order="stride")
    return grain.MapDataset.source(mine).shuffle(seed).batch(rows, drop_remainder=False)


def sampler_batches(mesh: eqshard.MeshSpec, rows: int, seed: int):
    """The same with grain's DataLoader: the share becomes its sharding option."""
    share = eqshard.process_share(mesh, P("data"))
    shard = grain.ShardOptions(share.part, share.parts, drop_remainder=True)
    sampler = grain.IndexSampler(len(Squares()), shard_options=shard, shuffle=True, num_epochs=1, seed=seed)
    return grain.DataLoader(data_source=Squares(), sampler=sampler, operations=[grain.Batch(rows)])


def main() -> None:
    mesh = eqshard.MeshSpec(data=8)
    rows = 32 // eqshard.process_share(mesh, P("data")).parts
    for make in (local_batches, sampler_batches):
        # the last batch has fewer rows: it is filled up, so that the step is compiled once
        place = lambda b: eqshard.shard_batch(b, mesh, P("data"), local=True, pad=-1, rows=32)
        seen: list[int] = []
        stats = eqshard.ShardStats()
        for batch, mask in eqshard.prefetch(make(mesh, rows, seed=0), place):
            real = int(eqshard.batch_statistics(mask, lambda m: m.sum()))
            stats = stats.update(batch, examples=real)
            host, keep = eqshard.gather((batch, mask), to="all")
            assert (host["square"][keep] == host["i"][keep].astype("float32") ** 2).all()
            seen += host["i"][keep].tolist()
        assert sorted(seen) == list(range(103)) and seen != sorted(seen)
        print(f"{make.__name__}: {stats.batches} batches, {stats.examples} examples, each once")


if __name__ == "__main__":
    main()
