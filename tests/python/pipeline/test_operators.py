"""All operators that PyTorch tests itself with, in the glue of a step: outputs and gradients equal those of plain PyTorch."""

import operator_cases
import pytest

PARTS = 8


@pytest.mark.parametrize("part", range(PARTS))
def test_operators_on_values_of_another_partition_equal_plain_pytorch(clusters, part):
    count = len(operator_cases.operators())
    begin, end = count * part // PARTS, count * (part + 1) // PARTS
    outcome, _ = clusters(2).run(operator_cases.sweep, begin, end)
    assert outcome["problems"] == {}
    assert outcome["operators"] == end - begin > 70
    assert outcome["samples"] > 2 * outcome["operators"]
    assert outcome["remote"] > 0.8 * outcome["samples"], "most results stay on the other partition"
    assert outcome["gradients"] > outcome["operators"]
