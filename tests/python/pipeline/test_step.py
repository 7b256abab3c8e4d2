"""`@smp.step`: what it does with arguments and results, how it may be called, and what it refuses."""

import copy
import pickle
import re

import pytest
import step_cases
import torch

import smp
from smp.step_output import merge

PARTITIONS = pytest.mark.parametrize("partitions", [1, 2])


def same_on_all(outcomes):
    """What every rank returned, after a check that it is the same."""
    first = repr(outcomes[0])
    assert all(repr(outcome) == first for outcome in outcomes)
    return outcomes[0]


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_shapes_are_leaves_of_a_result():
    assert merge([{"shape": torch.Size([1, 2])}, {"shape": torch.Size([3, 2])}]) == {"shape": [(1, 2), (3, 2)]}


@pytest.mark.parametrize(
    "use",
    [
        lambda loss: loss.item(),
        lambda loss: loss.mean(),
        lambda loss: float(loss),
        lambda loss: f"{loss:.3f}",
        lambda loss: loss[0],
        lambda loss: list(loss),
        lambda loss: loss < 1,
        lambda loss: loss + 1,
        lambda loss: sum([loss, loss]),
        lambda loss: torch.tensor(1.0) / loss,
    ],
    ids=["item", "mean", "float", "format", "index", "list", "less", "add", "sum", "divide"],
)
def test_an_output_that_is_used_as_a_tensor_says_how_to_get_one(use):
    loss = smp.StepOutput([torch.tensor(1.0), torch.tensor(2.0)])
    with pytest.raises((AttributeError, TypeError), match=r"reduce_mean\(\).*concat\(\).*outputs"):
        use(loss)


def test_backward_of_an_output_names_the_one_of_the_model():
    with pytest.raises(AttributeError, match=r"model\.backward\(loss\) in the step function"):
        smp.StepOutput([torch.tensor(1.0)]).backward()


def test_outputs_copy_pickle_and_print():
    loss = smp.StepOutput([torch.tensor(1.0), torch.tensor(2.0)])
    for twin in (copy.copy(loss), copy.deepcopy(loss), pickle.loads(pickle.dumps(loss))):
        assert repr(twin) == f"{loss}" == "StepOutput([tensor(1.), tensor(2.)])"
    assert loss and loss == loss and not hasattr(loss, "item")


@PARTITIONS
def test_arguments_are_cut_into_microbatches(clusters, partitions):
    result = same_on_all(clusters(partitions).run(step_cases.arguments, partitions))
    x = torch.arange(32.0).view(8, 4)
    halves = x.chunk(2)
    assert equal(result["rows"], halves)
    assert equal(result["columns"], x.chunk(2, 1)) and equal(result["last"], x.chunk(2, -1))
    assert equal(result["whole"], [x, x]) and equal(result["table"], [x, x])
    assert equal(result["scalar"], [torch.tensor(3.0)] * 2), "a tensor without axes has no batch"
    assert equal(result["rest"][0], (x + 5).chunk(2)) and result["rest"][1] == ["word", "word"]
    assert result["model"] == [4, 4]


@PARTITIONS
def test_tensors_in_containers_are_cut(clusters, partitions):
    result = same_on_all(clusters(partitions).run(step_cases.arguments, partitions))
    x = torch.arange(32.0).view(8, 4)
    assert equal(result["a"], (x + 1).chunk(2))
    assert equal(result["b"][0], (x + 2).chunk(2)) and equal(result["b"][1], (x + 3).chunk(2))
    assert result["b"][2] == ["text", "text"]
    assert result["pair"][0] == "Pair" and equal(result["pair"][1], x.chunk(2)) and result["pair"][2] == [7, 7]
    assert equal(result["set"], (x + 4).chunk(2))
    assert result["none"] is None


@PARTITIONS
def test_objects_cut_themselves_with_smp_slice(clusters, partitions):
    counts, indices, axes, values = same_on_all(clusters(partitions).run(step_cases.arguments, partitions))["boxes"]
    assert (counts, indices, axes) == ([2, 2], [0, 1], [1, 1])
    assert equal(values, torch.arange(32.0).view(8, 4).chunk(2, 1))


@PARTITIONS
def test_results_keep_their_containers_on_every_rank(clusters, partitions):
    result = same_on_all(clusters(partitions).run(step_cases.results, partitions))
    kind, message = result.pop("function")
    assert (
        kind == "SMPUsageError"
        and "the result of step step_cases.give_function" in message
        and "must pickle" in message
    )
    assert result == {
        "logits": True,
        "shared": [True] * 4,
        "tuple": ["tuple", [0, 1], ["text", "text"]],
        "pair": ["Pair", True],
        "deep": True,
        "ordered": ["OrderedDict", ["b", "a"], [0.0, 0.5]],
        "user": ["UserDict", "StepOutput"],
        "output": ["CausalLMOutput", ["loss", "logits"], True],
        "mean": True,
        "none": None,
        "sometimes": ["Tensor", "NoneType"],
        "varying": [[], [1]],
        "report": [("Report", "r", True)] * 2,
        "set": [("set", ["one", "two"])] * 2,
        "input": True,
        "integers": True,
        "scalar": True,
        "stack": [2, 4, 3],
        "sum": True,
        "attached": [False, False],
        "nothing": None,
    }


def test_detach_outputs_false_keeps_the_graph_with_one_partition(clusters):
    assert clusters(1).run(step_cases.attached_outputs, 1) == [[True] * 4]
    assert clusters(2).run(step_cases.attached_outputs, 2) == [[False] * 4] * 2


@PARTITIONS
def test_a_step_in_a_class_does_not_bind_self(clusters, partitions):
    for outcome in clusters(partitions).run(step_cases.attribute_of_a_class, partitions):
        assert outcome == [2, 2, 2, 2, ["without_self", None, "StepFunction"]]


def test_a_step_without_a_model_runs_on_each_rank(clusters):
    assert clusters(2).run(step_cases.without_a_model) == [[0, 1], [0, 1]]


@PARTITIONS
def test_evaluation_takes_other_batch_sizes_under_no_grad(clusters, partitions):
    for losses, grad_modes, weights in clusters(partitions).run(step_cases.evaluation_between_training, partitions):
        assert losses == [True] * 3
        assert grad_modes == [False] * 12
        assert all(weights)


@PARTITIONS
@pytest.mark.parametrize("average", [True, False])
def test_gradients_add_up_over_steps(clusters, partitions, average):
    outcomes = clusters(partitions).run(step_cases.accumulated_gradients, partitions, average)
    names = [name for equal, _ in outcomes for name in equal]
    assert sorted(names) == ["first.bias", "first.weight", "norm.bias", "norm.weight", "second.bias", "second.weight"]
    assert all(all(equal.values()) and all(elsewhere) for equal, elsewhere in outcomes)


EXPECTED_ERRORS = {
    "odd batch": ("SMPUsageError", ["argument 'x'", "(7, 4)", "microbatches = 2", "drop_last=True"]),
    "no such axis": ("SMPUsageError", ["argument 'x'", "no axis 2", "input_split_axes"]),
    "nested": ("SMPUsageError", ["train_step was called inside step step_cases.outer"]),
    "optimizer.step": ("SMPUsageError", ["optimizer.step() was called inside a step", "call it after"]),
    "missing argument": ("TypeError", ["'y'"]),
    "matrix": ("SMPUsageError", ["(4, 3)", "without a gradient"]),
    "too many gradients": ("SMPUsageError", ["1 tensors but 2 grad_tensors"]),
    "loss.backward": ("SMPUsageError", ["call model.backward(loss) instead"]),
    "torch.autograd.backward": ("SMPUsageError", ["call model.backward(loss) instead"]),
    "outside": ("SMPUsageError", ["outside a step", "@smp.step"]),
    "backward outside": ("SMPUsageError", ["outside a step", "@smp.step"]),
}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"non_split_inputs": "ids"}, "['ids']"),
        ({"input_split_axes": ["x"]}, "a dict from names"),
        ({"input_split_axes": {"x": "0"}}, "a dict from names"),
    ],
)
def test_options_of_a_step_that_make_no_sense_are_named(options, text):
    with pytest.raises(smp.SMPUsageError, match=re.escape(text)):
        smp.step(**options)(lambda x, ids: x)


def test_a_generator_is_no_step_function():
    def generates(x):
        yield x

    async def waits(x):
        return x

    for function in (generates, waits):
        with pytest.raises(smp.SMPUsageError, match="returns its results"):
            smp.step(function)


@PARTITIONS
def test_misuse_is_named_on_every_rank_and_the_next_step_works(clusters, partitions):
    messages = same_on_all(clusters(partitions).run(step_cases.misuse, partitions))
    assert set(messages) == set(EXPECTED_ERRORS) - ({"outside", "backward outside"} if partitions == 1 else set())
    for name, (kind, message) in messages.items():
        expected_kind, texts = EXPECTED_ERRORS[name]
        assert kind == expected_kind, name
        assert all(text in message for text in texts), (name, message)


def test_the_model_refuses_calls_outside_a_step_before_the_first_one(clusters):
    for outcome in clusters(2).run(step_cases.outside_before_the_first_step):
        assert [kind for kind, _ in outcome] == ["SMPUsageError"] * 2
        assert all("outside a step" in message for _, message in outcome)


def test_misuse_in_a_module_of_another_rank_is_named(clusters):
    nested, update = same_on_all(clusters(2).run(step_cases.misuse_in_a_module))
    assert nested[0] == update[0] == "SMPUsageError"
    assert "train_step was called inside step step_cases.give_nothing" in nested[1]
    assert "optimizer.step() was called inside a step" in update[1]


def test_names_that_are_no_arguments_are_refused():
    unknown, axis, number, text = step_cases.wrong_names()
    assert unknown[0] == "SMPUsageError" and "non_split_inputs names 'z'" in unknown[1] and "model, x, y" in unknown[1]
    assert axis[0] == "SMPUsageError" and "input_split_axes names 'batch'" in axis[1]
    assert number[0] == text[0] == "SMPUsageError" and "it decorates a function" in number[1]


def test_a_step_before_init_is_refused():
    with pytest.raises(smp.SMPUsageError, match=r"smp\.init\(\) first"):
        smp.step(lambda: None)()
