"""The reference of the exactness tests is itself right: complete homes, repeatable, a mean over the microbatches."""

import pytest
import torch
from models import BUILDERS
from training_case import microbatch_of, plain_training

# BatchNorm sees one microbatch at a time, and this model decides by a sum over it: slicing changes their results.
DEPENDS_ON_SLICING = {"conv_batch_norm", "value_read"}

every_case = pytest.mark.parametrize("build", BUILDERS.values(), ids=BUILDERS)


@every_case
def test_homes_name_every_module_and_every_partition_with_the_root_on_the_first(build):
    case = build()
    for partitions, homes in case.homes.items():
        if homes is None:
            continue
        assert set(homes) == {name for name, _ in case.model.named_modules()}
        assert homes[""] == 0
        assert set(homes.values()) <= set(range(partitions))
        assert len(set(homes.values())) > 1


@every_case
def test_training_twice_gives_the_same_bits(build):
    first, second = plain_training(build, microbatches=4), plain_training(build, microbatches=4)
    for step, other_step in zip(first.losses, second.losses, strict=True):
        assert all(map(torch.equal, step, other_step))
    assert all(torch.equal(value, second.weights[name]) for name, value in first.weights.items())
    assert all(torch.equal(value, second.buffers[name]) for name, value in first.buffers.items())


@pytest.mark.parametrize("name", [name for name in BUILDERS if name not in DEPENDS_ON_SLICING])
def test_gradients_are_means_over_the_microbatches(name):
    build = BUILDERS[name]
    whole, sliced = plain_training(build, 1, steps=1), plain_training(build, 4, steps=1)
    torch.testing.assert_close(torch.stack(sliced.losses[0]).mean(), whole.losses[0][0])
    for name, gradient in whole.gradients[0].items():
        if gradient is None:
            assert sliced.gradients[0][name] is None
        else:
            torch.testing.assert_close(sliced.gradients[0][name], gradient, rtol=1e-4, atol=1e-6)


@every_case
def test_training_changes_exactly_the_weights_that_get_gradients(build):
    result, start = plain_training(build, 2), dict(build().model.named_parameters())
    for name, value in result.weights.items():
        got_gradient = any(gradients[name] is not None for gradients in result.gradients)
        assert torch.equal(value, start[name]) != got_gradient, name


def test_a_microbatch_takes_its_rows_of_tensors_and_all_of_the_rest():
    batch = {"x": torch.arange(8), "name": "text"}
    part = microbatch_of(batch, 1, 4)
    assert part["x"].tolist() == [2, 3]
    assert part["name"] == "text"
