"""Checkpointing over ranks: bits as without it, one gradient for each call, and the rule that a region lies on one partition."""

import partition_cases as cases
import pytest
import torch
from torch import nn

# Where the modules are: a stack that is split, and one that lies elsewhere as a whole.
SPLIT = {"seq.2": 1, "seq.3": 1, "seq.4": 1}
WHOLE = {"seq": 1}
AWAY = {"fc1": 1}
OVER_FOUR = {"seq.0": 1, "seq.1": 1, "seq.2": 2, "seq.3": 2, "seq.4": 3}
STRATEGIES = ["each", "contiguous", "group_2", "group_3"]
EACH_STACK = {"seq": {}, "fc1": {}}


def check(outcomes, expected, regions=None):
    """Ranks with checkpointing against ranks without."""
    for mine, theirs in zip(outcomes, expected, strict=True):
        for key in ("gradients", "buffers"):
            assert mine[key].keys() == theirs[key].keys()
            assert all(torch.equal(value, theirs[key][name]) for name, value in mine[key].items()), key
        assert all(torch.equal(a, b) for a, b in zip(mine["losses"], theirs["losses"], strict=True))
        assert mine["ready"] == theirs["ready"]
    names = {name for outcome in outcomes for name in outcome["recomputes"]}
    assert names == set(regions) if regions is not None else names
    for outcome in outcomes:
        assert set(outcome["recomputes"].values()) <= {cases.STEPS * cases.MICROBATCHES}


def compare(clusters, how, homes, regions=None, ranks=2, plain=cases.plain, **options):
    set_on = options.pop("set_on", None)
    expected = clusters(ranks).run(cases.train, plain, homes, partitions=ranks, **options)
    outcomes = clusters(ranks).run(cases.train, how, homes, set_on=set_on, partitions=ranks, **options)
    check(outcomes, expected, regions)
    return outcomes


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@pytest.mark.parametrize("homes", [SPLIT, AWAY], ids=["here", "away"])
def test_a_module(clusters, homes, pipeline):
    compare(clusters, cases.module_checkpointed, homes, ["module 'fc1'"], pipeline=pipeline)


@pytest.mark.parametrize("overlapped", [True, False], ids=["overlapped", "end of step"])
@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
def test_gradients_of_replicas_are_reduced_as_without(clusters, pipeline, overlapped):
    options = {"overlapped": overlapped, "pipeline": pipeline}
    set_on = {"seq": {"strategy": "contiguous"}, "fc1": {}}
    outcomes = compare(clusters, cases.plain, SPLIT, set_on=set_on, **options)
    assert all(set(outcome["ready"].values()) == {2 * cases.MICROBATCHES} for outcome in outcomes)
    compare(clusters, cases.plain, OVER_FOUR, ranks=4, set_on=set_on, **options)
    compare(clusters, cases.plain, {}, ranks=1, set_on=set_on, **options)


REGIONS = {
    "each": ["module 'seq.0'", "module 'seq.1'", "module 'seq.2'", "module 'seq.3'", "module 'seq.4'"],
    "contiguous": ["layers 0 to 1 of seq", "layers 2 to 4 of seq"],
    "group_2": ["layers 0 to 1 of seq", "layers 2 to 3 of seq", "module 'seq.4'"],
    "group_3": ["layers 0 to 1 of seq", "layers 2 to 4 of seq"],
}


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stack_that_is_split(clusters, strategy, pipeline):
    compare(clusters, cases.Sequential(strategy), SPLIT, REGIONS[strategy], pipeline=pipeline)
    outcomes = compare(clusters, cases.plain, SPLIT, set_on={"seq": {"strategy": strategy}}, pipeline=pipeline)
    report = outcomes[0]["report"]
    expected = {
        "each": ("seq.0-1", "seq.2-4"),
        "contiguous": ("seq.0 to 1", "seq.2 to 4"),
        "group_2": ("seq.0 to 1", "seq.2 to 3, seq.4"),
        "group_3": ("seq.0 to 1", "seq.2 to 4"),
    }[strategy]
    assert all(f"checkpointed: {regions}" in report for regions in expected)


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_stack_that_lies_elsewhere(clusters, strategy, pipeline):
    compare(clusters, cases.Sequential(strategy), WHOLE, pipeline=pipeline)
    compare(clusters, cases.plain, WHOLE, set_on={"seq": {"strategy": strategy}}, pipeline=pipeline)


@pytest.mark.parametrize("pipeline", ["interleaved", "simple"])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("ranks", "homes"), [(1, {}), (4, OVER_FOUR)], ids=["one", "four"])
def test_one_and_four_partitions(clusters, ranks, homes, strategy, pipeline):
    compare(clusters, cases.Sequential(strategy), homes, ranks=ranks, pipeline=pipeline)
    set_on = {"seq": {"strategy": strategy}, "fc1": {}}
    compare(clusters, cases.plain, homes, ranks=ranks, set_on=set_on, pipeline=pipeline)


@pytest.mark.parametrize("strategy", ["each", "contiguous", "group_2"])
def test_random_numbers_by_module(clusters, strategy):
    compare(clusters, cases.Sequential(strategy), SPLIT, rng_by_module=True)


PARTITIONS = pytest.mark.parametrize(("ranks", "homes"), [(1, {}), (2, SPLIT), (4, OVER_FOUR)], ids=["1", "2", "4"])


@PARTITIONS
def test_autocast(clusters, ranks, homes):
    compare(clusters, cases.plain, homes, ranks=ranks, set_on=EACH_STACK, autocast=True)


@PARTITIONS
def test_regions_in_regions(clusters, ranks, homes):
    set_on = {"seq": {"strategy": "contiguous"}}
    expected = clusters(ranks).run(cases.train, cases.plain, homes, partitions=ranks, net={"kind": cases.NestedPlain})
    outcomes = clusters(ranks).run(
        cases.train, cases.plain, homes, partitions=ranks, net={"kind": cases.Nested}, set_on=set_on
    )
    check(outcomes, expected)
    assert all(len(outcome["recomputes"]) > 2 for outcome in outcomes if outcome["recomputes"])


@pytest.mark.parametrize("homes", [SPLIT, WHOLE], ids=["split", "whole"])
@pytest.mark.parametrize("strategy", ["each", "contiguous"])
def test_layers_that_take_and_return_tuples(clusters, strategy, homes):
    # A stack that is called by its parent layer by layer draws as many keys as one that is split does.
    homes = homes if homes is SPLIT else {f"seq.{i}": 1 for i in range(5)}
    for as_tuple in (True, False):
        how = cases.Sequential(strategy, as_tuple=as_tuple)
        compare(clusters, how, homes, plain=cases.tuples, net={"kind": cases.TupleLayer})
    how = cases.Sequential(strategy, as_tuple=False)
    compare(clusters, how, homes, plain=cases.two_arguments, net={"kind": cases.TwoArguments})


@PARTITIONS
def test_layers_that_take_keywords(clusters, ranks, homes):
    net = {"kind": cases.KeywordLayer, "stack": nn.ModuleList}
    how = cases.layers_with_keywords
    compare(clusters, how, homes, REGIONS["each"], ranks=ranks, plain=how, net=net, set_on={"seq": {}})


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoints_of_pytorch_run_once_on_the_owner(clusters, use_reentrant):
    compare(clusters, cases.Native(use_reentrant), SPLIT, REGIONS["each"])


@pytest.mark.parametrize(
    "how", [cases.Native(True), cases.Native(False), cases.closures], ids=["re-entrant", "native", "closure"]
)
def test_what_a_split_module_elsewhere_calls_is_checkpointed(clusters, how):
    homes = {"seq.1": 1, "seq.1.b": 0}
    outcomes = compare(clusters, how, homes, net={"kind": cases.Pair, "layers": 3})
    names = {name for outcome in outcomes for name in outcome["recomputes"]}
    assert names >= {"module 'seq.1.a'", "module 'seq.1.b'"} and "module 'seq.1'" not in names


@pytest.mark.parametrize(
    ("homes", "regions"),
    [
        ({"seq.0": 1}, ["function 'Methods.one'", "function 'Methods.other'"]),
        ({"seq.0.b": 1}, ["module 'seq.0.a'", "module 'seq.0.b'"]),
    ],
    ids=["whole", "split"],
)
def test_methods_are_functions(clusters, homes, regions):
    expected = clusters(2).run(cases.train, cases.plain, homes, net={"kind": cases.PlainMethods, "layers": 1})
    outcomes = clusters(2).run(cases.train, cases.plain, homes, net={"kind": cases.Methods, "layers": 1})
    check(outcomes, expected, regions)


def test_copies_of_modules_are_their_own(clusters):
    for facts in clusters(2).run(cases.copies_of_modules):
        assert facts["copies"] == [True, True] and facts["own"], facts


def test_a_policy_of_what_to_keep_is_warned_of_once(clusters):
    outcomes = clusters(2).run(cases.rule, cases.selective, None, False)
    assert [log.count("context_fn") for _, log, _ in outcomes] == [1, 0] and not outcomes[0][0], outcomes


# ---- memory and failures


@pytest.mark.parametrize("partitions", [1, 2, 4])
def test_memory_is_flat_without_the_garbage_collector(clusters, partitions):
    for facts in clusters(partitions).run(cases.fifty_steps, partitions):
        assert facts["recomputes"] >= 100 and facts["regions"] == 0, facts
        assert facts["grown"] < 10 * facts["one"], facts
        assert not any(facts["state"].values()), facts


@pytest.mark.parametrize("partitions", [1, 2, 4])
def test_a_step_follows_one_whose_recompute_failed(clusters, partitions):
    for rank, facts in enumerate(clusters(partitions).run(cases.failing_recompute, partitions)):
        kind, message, notes = facts["said"]
        assert (kind, message) == ("ArithmeticError", "in the recompute"), facts
        if partitions > 1:
            assert f"raised on rank {partitions - 1}" in notes[-1], (rank, notes)
        assert facts["equal"] and facts["regions"] == 0, (rank, facts)


# ---- the rule


RULE = [(cases.module_checkpointed, None, "module 'fc1'"), (cases.plain, "fc1", ""), (cases.plain, "", "the model")]


@pytest.mark.parametrize(("how", "set_on", "named"), RULE, ids=["in forward", "stack", "model"])
def test_a_module_that_is_split_by_hand_is_an_error(clusters, how, set_on, named):
    for kind, message, _ in clusters(2).run(cases.rule, how, set_on, True):
        if named:
            assert kind == "SMPUsageError" and f"{named} can't be checkpointed" in message
            assert "'fc1.2' on 1" in message and "[0, 1]" in message
        else:  # each layer lies on one partition
            assert kind == "", message


@pytest.mark.parametrize(("how", "set_on", "named"), RULE, ids=["in forward", "stack", "model"])
def test_a_module_that_is_split_automatically_is_a_warning(clusters, how, set_on, named):
    outcomes = clusters(2).run(cases.rule, how, set_on, False)
    for rank, (kind, log, warned) in enumerate(outcomes):
        assert kind == "", log
        # In forward it is the rank that calls the module who sees it.
        expected = 1 if named and (rank == 0 or set_on is not None) else 0
        assert warned == expected and log.count("can't be checkpointed") == expected
    if named:
        assert f"{named} can't be checkpointed" in outcomes[0][1] and "without checkpointing" in outcomes[0][1]


def test_wrong_calls_say_what_to_do(clusters):
    for said in clusters(2).run(cases.wrong_calls):
        assert all(kind == "SMPUsageError" for kind, _ in said.values()), said
        for name, words in {
            "no model": "wrap the model first",
            "foreign": "not in the model",
            "no module": "got str",
            "strategy": "'group_0'",
            "options": "leave it out",
            "positional strategy": "it is True or False",
            "of PyTorch": "leave them out",
            "of PyTorch, too": "leave them out",
            "segments": "strategy='group_N'",
            "script": "TorchScript",
            "vmap": "vmap",
            "tracker": "the class Generator",
            "generator": "register_rng_tracker",
            "no stack": "nn.Sequential",
            "no function": "got int",
            "late": "before the first step",
        }.items():
            assert words in said[name][1], name
