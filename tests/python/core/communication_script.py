"""Run by `mpirun`: objects between ranks. MPI may be initialised before (`python -m mpi4py`); a DataLoader works beside."""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import smp


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((4,), float(index))


@smp.step
def train_step(model, x):
    loss = model(x).mean()
    model.backward(loss)
    return loss, x


def main() -> None:
    """Writes OK to a file for each rank, in the folder that is the last argument."""
    if sys.argv[1] == "mpi4py":
        from mpi4py import MPI

        assert MPI.Is_initialized()
    torch.set_num_threads(1)
    smp.init({"partitions": 2, "microbatches": 4, "auto_partition": False})
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    smp.set_partition(net[1], 1)
    model = smp.DistributedModel(net)

    # The processes of a DataLoader are forked from a rank that holds MPI and the threads of the engine.
    seen = []
    for _ in range(2):
        for batch in DataLoader(Numbers(), batch_size=8, num_workers=2):
            _, used = train_step(model, batch)
            seen.append(used.concat()[:, 0].tolist())
            objects = smp.allgather({"rank": smp.rank(), "batch": batch}, smp.WORLD)
            assert [item["rank"] for item in objects] == [0, 1]
            assert torch.equal(objects[0]["batch"], batch)
    assert seen == [[float(8 * k + i) for i in range(8)] for k in (0, 1, 2)] * 2
    (Path(sys.argv[-1]) / f"rank{smp.rank()}").write_text("OK")


if __name__ == "__main__":
    main()
