"""A loader in the style of PyTorch, with dataset, sampler and collate, feeds a mesh; torch itself is not needed."""

from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

import eqshard


jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)


class TextDataset:
    """As a `torch.utils.data.Dataset`: a length, and examples by number, of mixed types."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> dict[str, object]:
        return {"tokens": np.full(12, i, "int64"), "label": i % 3, "name": f"example {i}"}


def collate(examples: Sequence[dict]) -> dict[str, object]:
    return {
        "tokens": np.stack([e["tokens"] for e in examples]),
        "label": np.array([e["label"] for e in examples]),
        "names": [e["name"] for e in examples],
    }


class Loader:
    """What `torch.utils.data.DataLoader(dataset, batch_size, sampler=..., collate_fn=...)` does, in one thread."""

    def __init__(self, dataset: TextDataset, batch_size: int, sampler: Sequence[int]):
        self.dataset, self.batch_size, self.sampler = dataset, batch_size, sampler

    def __iter__(self) -> Iterator[dict[str, object]]:
        for start in range(0, len(self.sampler), self.batch_size):
            yield collate([self.dataset[i] for i in self.sampler[start : start + self.batch_size]])


def main() -> None:
    mesh = eqshard.MeshSpec(dp=4, sp=2)
    dataset = TextDataset()
    shuffled = np.random.default_rng(0).permutation(len(dataset)).tolist()  # the same in every process

    # This is what a DistributedSampler is for: equal numbers for all processes, the first examples again to fill up.
    sampler = eqshard.process_slice(shuffled, mesh=mesh, spec=P("dp"), remainder="pad")
    loader = Loader(dataset, batch_size=16 // eqshard.process_share(mesh, P("dp")).parts, sampler=sampler)

    layout = {"tokens": ("batch", "length"), "label": ("batch",), "names": None}  # names are strings: they stay
    fill = {"tokens": 0, "label": -100, "names": 0}

    def place(batch):
        return eqshard.shard_batch(batch, mesh, layout, local=True, pad=fill, rows=16)

    count = 0
    for batch, mask in eqshard.prefetch(loader, place, size=2):
        assert batch["tokens"].sharding.spec == P("dp", "sp") and batch["tokens"].dtype == "int32"
        host, keep = eqshard.gather((batch, mask), to="all")
        assert (host["tokens"][keep][:, 0] % 3 == host["label"][keep]).all() and (host["label"][~keep] == -100).all()
        assert [int(name.split()[1]) for name in batch["names"]] == host["tokens"][keep][:, 0].tolist()
        count += int(keep.sum())
    assert count == len(dataset)
    print(f"{count} examples, each once, the last batch filled up to 16 rows")


if __name__ == "__main__":
    main()
