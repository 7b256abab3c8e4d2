"""Bounds on what a rank holds, by its own counts."""

import memory_cases
import pytest


@pytest.mark.parametrize("slow", [0, 1, 3, None])
def test_a_rank_holds_one_microbatch_more_than_1f1b_at_most(clusters, slow):
    held = clusters(4).run(memory_cases.microbatches_held, 4, 12, slow, "interleaved")
    assert all(count <= bound for count, bound in zip(held, [5, 4, 3, 2], strict=True)), held
    assert held[0] >= 2, "it is a pipeline"


def test_simple_holds_all(clusters):
    assert clusters(2).run(memory_cases.microbatches_held, 2, 6, 1, "simple")[0] == 6


def test_logits_that_nobody_needs_again_are_dropped_before_backward(clusters):
    for facts in clusters(2).run(memory_cases.bytes_of_logits, 6):
        # One is made while the one before may still be summed up; their gradients are made in backward, one at a time.
        assert facts["peak"][1] < 3 * facts["logits"], facts
