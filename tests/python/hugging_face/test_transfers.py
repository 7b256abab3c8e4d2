"""No logits and no hidden state travels that need not: bytes on the links while GPT-2 trains."""

import pytest
import transfer_cases
from transfer_cases import HIDDEN, LENGTH, MICROBATCHES, ROWS

HIDDEN_STATE = ROWS * LENGTH * HIDDEN * 4
LABELS = ROWS * LENGTH * 8
POSITIONS = LENGTH * 8  # an argument of each layer
MASK = ROWS * LENGTH * LENGTH  # likewise: once for all layers of a rank
LOSS = 4


@pytest.mark.parametrize("masked", [False, True])
def test_only_what_the_other_rank_needs_travels(clusters, masked):
    there = [HIDDEN_STATE, LABELS, POSITIONS, LOSS, *([MASK] if masked else [])]  # the loss: its gradient
    back = [HIDDEN_STATE, LOSS]  # a gradient, and what the user reads
    expected = {
        link: [MICROBATCHES * len(values), MICROBATCHES * sum(values)]
        for link, values in (((0, 1), there), ((1, 0), back))
    }
    assert clusters(2).run(transfer_cases.links, masked) == [expected] * 2
