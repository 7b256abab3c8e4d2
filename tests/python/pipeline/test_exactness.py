"""The contract: losses, gradients and weights over partitions are plain PyTorch's, bit for bit."""

import exactness
import models
import pytest

MICROBATCHES = 4


def check(outcomes, case, partitions):
    assert len(outcomes) == partitions
    for rank, outcome in enumerate(outcomes):
        where = f"rank {rank}"
        if case.exact_gradients:
            assert outcome["differences"] == [], where
        else:  # sums of three or more gradients may be grouped in another way
            assert [d for d in outcome["differences"] if not isinstance(d[1], float) or d[1] > 1e-5] == [], where
        facts = outcome["facts"]
        if partitions == 1 or case.homes[partitions] is None:
            assert outcome["nonzero_gradients"] > 0, where
        if partitions > 1 and case.homes[partitions] is None:
            assert facts["executed"].get("CALL", 0) > 0, where
            assert facts["executed"].get("BACKWARD", 0) > 0, where
            assert facts["contributions"] > 0, where
        if partitions > 1:
            assert facts["state"] == {"values": 0, "calls": 0, "value_bytes": 0, "queued": 0, "frames": 0}, where
            assert facts["remote_bytes"] == 0, where
    # A placement by hand may leave a rank without parameters, or with frozen ones only: there the ranks count together.
    assert sum(outcome["nonzero_gradients"] for outcome in outcomes) > 0
    if partitions > 1:
        assert sum(outcome["facts"]["executed"].get("BACKWARD", 0) for outcome in outcomes) > 0


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@pytest.mark.parametrize("partitions", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(models.BUILDERS))
def test_training_equals_plain_pytorch(name, partitions, pipeline, clusters, repetitions):
    case = models.BUILDERS[name]()
    for _ in range(repetitions):
        check(clusters(partitions).run(exactness.compare, name, partitions, MICROBATCHES, pipeline), case, partitions)
