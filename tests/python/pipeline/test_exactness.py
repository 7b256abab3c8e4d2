"""The contract: losses, gradients and weights over partitions are plain PyTorch's, bit for bit."""

import exactness
import models
import pytest

MICROBATCHES = 4


def check(outcomes, case, partitions):
    assert len(outcomes) == partitions
    for rank, outcome in enumerate(outcomes):
        where = f"rank {rank}"
        assert outcome["differences"] == [], where
        facts, expected = outcome["facts"], outcome["expected_nonzero_gradients"]
        assert outcome["nonzero_gradients"] == expected, where
        if partitions == 1:
            assert expected > 0, where
            continue
        if case.homes[partitions] is None:
            assert expected > 0, where
        if expected > 0:  # some placements by hand leave a rank without parameters, or with frozen ones only
            executed = facts["executed"]
            assert executed.get("CALL", 0) + executed.get("LIFT", 0) > 0, where
            assert executed.get("BACKWARD", 0) + executed.get("ACCUMULATE", 0) > 0, where
            assert facts["contributions"] > 0, where
        assert all(value == 0 for value in facts["state"].values()), (where, facts["state"])
        assert facts["remote_bytes"] == 0, where
    assert sum(outcome["expected_nonzero_gradients"] for outcome in outcomes) > 0


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@pytest.mark.parametrize("partitions", [1, 2, 4])
@pytest.mark.parametrize("name", sorted(models.BUILDERS))
def test_training_equals_plain_pytorch(name, partitions, pipeline, clusters, repetitions):
    case = models.BUILDERS[name]()
    for _ in range(repetitions):
        check(clusters(partitions).run(exactness.compare, name, partitions, MICROBATCHES, pipeline), case, partitions)
