"""What modules and glue do in real models is right, or refused."""

import module_cases
import module_models
import pytest
import torch


def check_same(outcomes, expected):
    found = {name: gradient for outcome in outcomes for name, gradient in outcome["gradients"].items()}
    for outcome in outcomes:
        assert torch.equal(outcome["losses"], expected["losses"])
    assert found.keys() == expected["gradients"].keys()
    for name, gradient in expected["gradients"].items():
        assert (found[name] is None) == (gradient is None), name
        assert gradient is None or torch.equal(found[name], gradient), name


CASES = [
    (name, homes)
    for name, model in module_models.MODELS.items()
    for homes, paths in module_models.HOMES.items()
    if all(path in dict(model().named_modules()) for path in paths)
]


@pytest.mark.parametrize(("name", "homes"), CASES)
def test_it_is_as_in_plain_pytorch(clusters, name, homes):
    expected = module_cases.plain(module_models.MODELS[name])
    check_same(clusters(2).run(module_cases.train, name, homes), expected)


def test_a_backward_of_this_rank_alone_does_not_disturb_modules(clusters):
    assert clusters(2).run(module_cases.backward_beside_modules, 60) == [[], []]


def test_a_gradient_that_reaches_another_argument_than_before_is_named_and_then_right(clusters):
    outcomes = clusters(2).run(module_cases.reach_that_varies)
    for outcome in outcomes:
        kind, message = outcome.pop("message")
        assert kind == "SMPUsageError" and "argument" in message and "'middle' got a gradient" in message
        assert "smp.set_dynamic" in message
    check_same(outcomes, module_cases.plain(module_models.UsesEither))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_in_glue_draws_the_same_again(clusters, reentrant):
    plain = clusters(2).run(module_cases.recompute, None)
    recomputed = clusters(2).run(module_cases.recompute, {"use_reentrant": reentrant})
    for a, b in zip(plain, recomputed, strict=True):
        assert torch.equal(a["losses"], b["losses"])
        assert all(torch.equal(a["gradients"][name], b["gradients"][name]) for name in a["gradients"])


@pytest.mark.parametrize("homes", ["middle", "others"])
def test_gradients_of_what_the_network_was_given(clusters, homes):
    outcomes = clusters(2).run(module_cases.adversarial, homes)
    for result in outcomes:
        kind, message = result.pop("refused")
        assert kind == "SMPUsageError" and "gradient of parameter 'first.linear.weight'" in message
    check_same(outcomes, module_cases.adversarial(None))


def test_a_change_that_another_name_of_the_memory_does_not_see_is_refused(clusters):
    for name, (_, message) in clusters(2).run(module_cases.memory_of_two_names)[0].items():
        assert "shares memory" in message and "Clone" in message, name


def test_models_that_cannot_be_right_are_refused(clusters):
    for said in clusters(2).run(module_cases.refused_models):
        assert said["tied"][0] == "SMPUsageError" and "changed parameter 'first.weight'" in said["tied"][1]
        assert "enable_nested_tensor=False" in said["nested"][1]


def test_state_that_a_module_elsewhere_does_not_see_is_said_once(clusters):
    said, there = clusters(2).run(module_cases.state_set_on_a_module_elsewhere)
    assert "attribute 'scale' of module 'middle.one'" in there["by a container"]
    assert "was changed in a step" not in said.pop("by a container")
    assert "was changed in a step" not in said.pop("same value")
    assert all(text.count("was changed in a step") == 1 for text in said.values()), said
    assert "attribute 'scale' of module 'middle'" in said["attribute"]
    assert "attribute 'calls'" in said["attribute by a hook"]
    assert "buffer 'count'" in said["buffer by a hook"]


def test_a_remote_tensor_can_be_printed_and_other_reads_say_what_to_do(clusters):
    texts, _ = clusters(2).run(module_cases.looking_at_a_tensor)
    assert texts["inside"] == texts["same"]
    assert "another partition" in texts["outside"] and "size=(12, 6)" in texts["outside"]
    assert "return it from the @smp.step function" in texts["numpy"][1]
    assert texts["transform"][0] == "SMPUsageError" and "torch.func.grad" in texts["transform"][1]


def test_inference_mode(clusters):
    assert clusters(2).run(module_cases.inference) == [[True, True]] * 2


def test_a_hook_that_is_set_before_the_first_step_sees_its_own_microbatch(clusters):
    assert clusters(2).run(module_cases.hook_before_the_first_step)[0] == [True, True]


def test_a_change_of_an_argument_that_is_lost_is_said_once(clusters):
    here, there = clusters(2).run(module_cases.lost_change)
    assert "changed an argument" not in here
    assert there.count("module 'middle' changed an argument (list)") == 1
