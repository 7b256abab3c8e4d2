"""Shapes that change cost one round trip for each call that has not seen them; results that vary fail once, or never."""

import dynamic_cases
import pytest
import torch

import smp
from smp import SMPUsageError


def check_same(outcomes):
    losses, gradients = dynamic_cases.plain()
    found = {name: gradient for outcome in outcomes for name, gradient in outcome["gradients"].items()}
    assert all(torch.equal(outcome["losses"], losses) for outcome in outcomes)
    assert [name for name in gradients if not torch.equal(found[name], gradients[name])] == []


@pytest.mark.parametrize("mark", ["before", "after"])
def test_a_module_that_is_said_to_vary_is_asked_each_time(clusters, mark):
    outcomes = clusters(2).run(dynamic_cases.train, mark)
    check_same(outcomes)
    assert outcomes[0]["asked"] >= 2 * dynamic_cases.MICROBATCHES


def test_a_result_that_varies_fails_the_step_once(clusters):
    outcomes = clusters(2).run(dynamic_cases.train, None)
    for outcome in outcomes:
        assert "module 'around' gave back other shapes" in outcome["message"]
        assert "smp.set_dynamic" in outcome["message"]
    check_same(outcomes)


def test_a_new_length_costs_one_round_trip_for_each_call_and_a_known_one_none(clusters):
    layers = 5
    for counts in clusters(2).run(dynamic_cases.lengths, layers, [3, 4, 5, 3, 4, 6, 5]):
        assert counts[0] <= layers
        assert counts == [counts[0], counts[0], counts[0], 0, 0, counts[0], 0]


def test_only_modules_are_dynamic():
    with pytest.raises(SMPUsageError, match=r"must be a torch\.nn\.Module"):
        smp.set_dynamic("router")
