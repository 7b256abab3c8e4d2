"""`smp.DistributedModel`: names, what lives where, state, parameters of other ranks, and what is refused."""

import model_cases
import pytest
import torch
from small_net import Net, job, make_net, raised
from torch import nn

import smp

PARTITIONS = pytest.mark.parametrize("partitions", [1, 2])


@pytest.fixture
def one_rank():
    """smp in this process."""
    with job(1):
        yield


@PARTITIONS
@pytest.mark.parametrize("kind", sorted(model_cases.JOBS))
def test_names_are_the_users_own(clusters, kind, partitions):
    for outcome in clusters(partitions).run(model_cases.names_everywhere, kind, partitions):
        assert outcome["before"] is (partitions == 1) and outcome["after"] is True
        assert outcome["same"] == {"parameters": True, "buffers": True}
        assert outcome["user's own"] and outcome["keys"] and outcome["values"] and outcome["chained"]


@PARTITIONS
@pytest.mark.parametrize("kind", sorted(model_cases.JOBS))
def test_local_iterators_are_disjoint_and_complete_over_ranks(clusters, kind, partitions):
    outcomes = clusters(partitions).run(model_cases.names_everywhere, kind, partitions)
    for what in ("modules", "parameters", "buffers"):
        together = [name for outcome in outcomes for name in outcome["local"][what]]
        assert sorted(together) == sorted(outcomes[0]["plain"][what]), what
    assert all(outcome["local"]["parameters"] for outcome in outcomes)
    assert all(all(outcome["local objects"]) for outcome in outcomes)


@PARTITIONS
def test_state_dict_is_plain_pytorchs_and_loads_in_every_way(clusters, partitions):
    outcomes = clusters(partitions).run(model_cases.state_round_trips, partitions)
    whole = [
        "whole",
        "prefix",
        "metadata",
        "replaced",
        "same partition",
        "merged",
        "whole before the first step",
        "other placement",
    ]
    for rank, outcome in enumerate(outcomes):
        for name in [*whole, "partial before the first step"]:
            assert outcome[name] is True, name
        assert outcome["mark"] is True
        assert outcome["rank 0 only"] == (0 if rank else len(make_net().state_dict()))
        assert outcome["loaded"] == "<All keys matched successfully>"
    for name in ("partial", "other partial"):
        assert sorted(key for outcome in outcomes for key in outcome[name]) == sorted(make_net().state_dict())
    if partitions == 2:
        assert outcomes[0]["partial"] == ["first.weight", "first.bias"]
        assert outcomes[0]["other partial"] == ["second.weight", "second.bias"]


@PARTITIONS
def test_state_that_does_not_fit_is_refused_on_every_rank(clusters, partitions):
    for outcome in clusters(partitions).run(model_cases.state_errors, partitions):
        for when in ("before", "after"):
            for name, text in (("missing", "second.bias"), ("unexpected", "third.bias"), ("shape", "second.bias")):
                kind, message = outcome[f"{name} {when}"]
                assert kind == "RuntimeError" and text in message, (name, when, message)
            assert outcome[f"lenient {when}"] == (["second.bias"], ["third.bias"])
        assert outcome["partial"][0] == "RuntimeError"


def test_a_parameter_that_lives_elsewhere_says_so_whatever_reads_it(clusters):
    here, elsewhere = clusters(2).run(model_cases.reads_of_a_parameter_elsewhere)
    assert here["holds memory"] == [True, True] and elsewhere["holds memory"] == [True, False]
    assert here["kept"] == elsewhere["kept"] == [True, (4, 4), torch.float32, True, 16, (4, 1)]
    assert here["gradient"] and not elsewhere["gradient"]
    assert set(elsewhere["reads"]) == set(model_cases.READS)
    silent = {
        name: error
        for name, error in elsewhere["reads"].items()
        if "parameter 'first.weight' lives on partition 0" not in error[1]
    }
    assert silent == {}
    assert "parameter 'first.weight' lives on partition 0" in elsewhere["module"][1]


def test_a_parameter_that_lives_elsewhere_gives_its_memory_back(clusters):
    here, elsewhere = clusters(2).run(model_cases.memory_given_back)
    assert elsewhere > 200 and abs(here) < 50, (here, elsewhere)


def test_several_replicas_are_refused(clusters):
    for kind, message in clusters(2).run(model_cases.more_than_one_replica):
        assert kind == "SMPUsageError"
        assert "2 replicas" in message and "set partitions to 2" in message


@PARTITIONS
def test_one_model_for_each_init(clusters, partitions):
    for second, late, patched in clusters(partitions).run(model_cases.second_model, partitions):
        assert second[0] == "SMPUsageError" and "there is a DistributedModel already" in second[1]
        assert late[0] == "SMPUsageError" and "before the first step" in late[1]
        assert patched is False, "after shutdown each module has its own forward again"


def test_ranks_with_different_models_say_where_they_differ(clusters):
    first, second = clusters(2).run(model_cases.models_that_differ)
    places = {
        "shape": "second.weight",
        "more": "extra",
        "name": "activation",
        "frozen": "first.bias",
        "dtype": "float64",
        "placement": "requires_grad=True, on partition 1",
    }
    for messages in (first, second):
        for name, text in places.items():
            kind, message = messages[name]
            assert kind == "SMPUsageError" and "differs from that of rank" in message and text in message, (
                name,
                message,
            )


def test_one_partition_is_plain_pytorch(clusters):
    (outcome,) = clusters(1).run(model_cases.one_partition)
    before, after = outcome["threads"]
    assert before == after
    assert all(outcome["forward"])
    assert outcome["engine"] is None and outcome["transport"] is None
    assert outcome["partitioned"] and not outcome["remote tensors"]


class Scripted(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 1


@pytest.mark.usefixtures("one_rank")
def test_modules_that_cannot_be_taken_apart_are_refused(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        data_parallel = nn.parallel.DistributedDataParallel(Net())
    finally:
        torch.distributed.destroy_process_group()
    refused = {
        "is wrapped in DistributedDataParallel": data_parallel,
        "is wrapped in DataParallel": nn.DataParallel(Net()),
        "is a TorchScript module": torch.jit.script(Scripted()),
        "is the result of torch.compile": torch.compile(Net()),
        "got function": make_net,
    }
    for text, module in refused.items():
        kind, message = raised(smp.DistributedModel, module)
        assert kind == "SMPUsageError" and text in message, message
        if isinstance(module, nn.Module):
            kind, message = raised(smp.DistributedModel, nn.Sequential(nn.ReLU(), module))
            assert kind == "SMPUsageError" and f"module '1' {text}" in message, message
    model = smp.DistributedModel(Net())
    assert "is a DistributedModel already" in raised(smp.DistributedModel, model)[1]


@pytest.mark.usefixtures("one_rank")
def test_options_are_checked(caplog):
    assert "trace_device is 'tpu'" in raised(smp.DistributedModel, Net(), trace_device="tpu")[1]
    with caplog.at_level("WARNING", logger="smp"):
        smp.DistributedModel(
            Net(), trace_device="cpu", trace_execution_times=True, bucket_cap_mb=1, broadcast_buffers=False
        )
    assert [record.message for record in caplog.records] == [
        "trace_execution_times=True has no effect: models are partitioned by the bytes of their parameters"
    ]


def test_a_model_before_init_is_refused():
    with pytest.raises(smp.SMPUsageError, match=r"smp\.init\(\) first"):
        smp.DistributedModel(Net())
