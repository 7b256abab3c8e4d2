"""`smp.DistributedOptimizer` and `smp.amp.GradScaler` over ranks."""

import optimizer_cases
import pytest
import torch

import smp

PARTITIONS = pytest.mark.parametrize("partitions", [1, 2])


@pytest.mark.parametrize(("partitions", "before"), [(1, True), (2, True), (2, False)])
def test_training_with_a_scheduler_is_plain_pytorchs(clusters, partitions, before):
    outcomes = clusters(partitions).run(optimizer_cases.scheduled_training, partitions, before)
    for outcome in outcomes:
        held, mark = outcome.pop("local")
        assert mark is True and held > 0
        assert outcome == {
            "rates": [True] * 3,
            "cleared": True,
            "groups": [True, True],
            "attributes": [True] * 3,
            "kind": True,
            "state": True,
            "weights": True,
            "closure": 3.0,
            "added": 3,
        }


@PARTITIONS
@pytest.mark.parametrize("partial", [False, True])
def test_training_resumes_from_saved_state(clusters, partitions, partial):
    outcomes = clusters(partitions).run(optimizer_cases.resumed_training, partitions, partial)
    for outcome in outcomes:
        assert outcome["weights"] is True and outcome["state"] is True
        assert outcome["held"] == outcome["local"], "a rank holds the state of its own parameters only"
    assert sum(outcome["local"] for outcome in outcomes) == 6


@PARTITIONS
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_gradients_are_clipped_by_the_norm_over_all_ranks(clusters, partitions, norm_type):
    for outcome in clusters(partitions).run(optimizer_cases.clipped_training, partitions, norm_type):
        assert outcome == [True] * len(outcome)


@PARTITIONS
def test_a_norm_that_is_not_finite_is_an_error_on_every_rank(clusters, partitions):
    for (kind, message), norm in clusters(partitions).run(optimizer_cases.clipped_infinity, partitions):
        assert kind == "RuntimeError" and "non-finite" in message
        assert norm == "inf"


@PARTITIONS
def test_the_scaler_passes_through_without_an_accelerator(clusters, partitions):
    for outcome in clusters(partitions).run(optimizer_cases.scaler_passes_through, partitions):
        assert outcome == {"enabled": True, "weights": True}


@pytest.mark.parametrize(("partitions", "fused"), [(1, False), (2, False), (2, True)])
def test_scaling_by_a_power_of_two_is_exact(clusters, partitions, fused):
    assert clusters(partitions).run(optimizer_cases.scaled_training_is_exact, partitions, fused) == [True] * partitions


@pytest.mark.parametrize(("partitions", "place"), [(1, "first"), (2, "first"), (2, "second")])
def test_an_infinity_on_one_rank_skips_the_step_on_all(clusters, partitions, place):
    for outcome in clusters(partitions).run(optimizer_cases.infinity_on_one_rank, partitions, place):
        assert outcome["scales"] == [1024.0, 512.0, 512.0, 1024.0]
        assert [any(step) for step in outcome["changed"]] == [True, False, True, True]
        assert outcome["restored"] == 1024.0


def test_a_scale_grows_when_all_is_finite(clusters):
    for outcome in clusters(2).run(optimizer_cases.infinity_on_one_rank, 2, None):
        assert outcome["scales"] == [1024.0, 2048.0, 2048.0, 4096.0]
        assert all(any(step) for step in outcome["changed"])


def test_a_rank_without_gradients_takes_part_in_scaling(clusters):
    assert clusters(2).run(optimizer_cases.scaling_without_gradients) == [128.0, 128.0]


def test_what_is_no_optimizer_is_refused():
    for (kind, message), name in zip(optimizer_cases.refused(), ("Net", "DistributedOptimizer"), strict=True):
        assert kind == "SMPUsageError" and f"got {name}: it wraps a torch.optim.Optimizer, once" in message


def test_an_optimizer_before_init_is_refused():
    with pytest.raises(smp.SMPUsageError, match=r"smp\.init\(\) first"):
        smp.DistributedOptimizer(torch.optim.SGD([torch.zeros(1)], lr=0.1))
