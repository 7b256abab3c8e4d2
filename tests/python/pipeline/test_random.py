"""Random numbers in a step: the same whatever the timing; with `rng_by_module` the same on any number of partitions."""

import pytest
import random_cases
import torch


def losses_of(outcomes):
    """The losses, after a check that all ranks have the same."""
    for outcome in outcomes:
        assert all(torch.equal(a, b) for a, b in zip(outcome["losses"], outcomes[0]["losses"], strict=True))
    return torch.stack(outcomes[0]["losses"])


def gradients_of(outcomes):
    return {name: gradient for outcome in outcomes for name, gradient in outcome["gradients"].items()}


def check_same_gradients(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("partitions", [2, 3])
def test_timing_changes_nothing(clusters, partitions):
    runs = [clusters(partitions).run(random_cases.train, partitions, timing) for timing in (1, 2, 3)]
    expected = losses_of(runs[0])
    assert expected.unique().numel() == expected.numel(), "each microbatch of each step draws its own numbers"
    for run in runs[1:]:
        assert torch.equal(losses_of(run), expected)
        check_same_gradients(gradients_of(run), gradients_of(runs[0]))
    for outcome in runs[0]:
        assert torch.equal(outcome["again"], expected[0]), "a seed repeats a step"


def test_a_step_takes_one_key_of_the_script(clusters):
    outcomes = clusters(2).run(random_cases.train, 2, 1, steps=3)
    assert torch.equal(outcomes[0]["after"], random_cases.after_keys(3))
    assert torch.equal(outcomes[1]["after"], random_cases.after_keys(0))


def test_a_failed_step_gives_the_random_state_back(clusters):
    assert clusters(2).run(random_cases.failed_step, 2) == [[True], [True]]


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("by_module", [False, True])
def test_recomputation_inside_a_module_draws_the_same_again(clusters, reentrant, by_module):
    plain, recomputed = (
        clusters(2).run(random_cases.train, 2, None, recompute=how, rng_by_module=by_module)
        for how in (None, {"use_reentrant": reentrant})
    )
    assert torch.equal(losses_of(plain), losses_of(recomputed))
    check_same_gradients(gradients_of(recomputed), gradients_of(plain))


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
def test_by_module_they_are_the_same_on_any_number_of_partitions(clusters, pipeline):
    config = {"rng_by_module": True, "pipeline": pipeline}
    plain = clusters(1).run(random_cases.train, 1, **config)
    expected = losses_of(plain)
    assert expected.unique().numel() == expected.numel()
    for partitions in (2, 3, 4):
        run = clusters(partitions).run(random_cases.train, partitions, 1, **config)
        assert torch.equal(losses_of(run), expected)
        check_same_gradients(gradients_of(run), gradients_of(plain))
    assert torch.equal(run[0]["after"], plain[0]["after"]), "the script goes on alike"


def test_without_the_option_one_partition_is_plain_pytorch(clusters):
    (outcome,) = clusters(1).run(random_cases.train, 1)
    torch.manual_seed(0)
    net = random_cases.Noisy()
    torch.manual_seed(1)
    losses = [
        (net(part) * torch.rand(())).square().mean()
        for _ in range(3)
        for part in random_cases.same_rows().chunk(random_cases.MICROBATCHES)
    ]
    assert torch.equal(torch.stack(outcome["losses"]).flatten(), torch.stack(losses))


def test_gpt2_with_dropout_gives_the_same_bits_on_1_2_and_4_partitions(clusters):
    runs = {partitions: clusters(partitions).run(random_cases.gpt2, partitions) for partitions in (1, 2, 4)}
    expected = losses_of(runs[1])
    assert expected.unique().numel() == expected.numel()
    for partitions in (2, 4):
        assert torch.equal(losses_of(runs[partitions]), expected)
        found, plain = gradients_of(runs[partitions]), gradients_of(runs[1])
        different = [name for name in plain if not torch.equal(found[name], plain[name])]
        # The tied embedding adds what both partitions give it in another order.
        assert set(different) <= {"transformer.wte.weight"}
        assert all(torch.allclose(found[name], plain[name], rtol=1e-4, atol=1e-6) for name in different)
