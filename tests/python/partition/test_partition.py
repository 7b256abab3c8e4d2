"""Placing the modules of PyTorch models, by hand and automatically, and the report of it."""

import copy
import logging
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

from smp import _C
from smp.config import Config, load_config
from smp.exceptions import SMPUsageError
from smp.placement import assign, get_partition_report, partition, set_partition
from smp.state import state


def config(partitions: int, **keys: Any) -> Config:
    return load_config({"partitions": partitions, **keys}, environment={})


def by_hand(partitions: int, default_partition: int = 0) -> Config:
    return config(partitions, auto_partition=False, default_partition=default_partition)


@pytest.fixture(autouse=True)
def uninitialized(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("cfg", "topology", "model", "partition_report"):
        monkeypatch.setattr(state, name, None)
    original = nn.Module.__init__
    yield
    assert nn.Module.__init__ is original, "the hook on nn.Module.__init__ was left behind"


def gpt2(layers: int = 12) -> GPT2LMHeadModel:
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(n_layer=layers))


def chain(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(1, size, bias=False) for size in sizes))


# Automatic.


def test_every_module_has_a_home_by_its_name() -> None:
    model = gpt2()
    assignment = assign(model, config(2))
    assert list(assignment.home) == [name for name, _ in model.named_modules()]
    assert set(assignment.home.values()) == {0, 1}
    assert assignment.manual == set()


def test_gpt2_on_two_partitions_is_balanced_and_its_tie_is_kept() -> None:
    assignment = assign(gpt2(), config(2))
    assert assignment.home["transformer.wte"] == assignment.home["lm_head"]
    for summary in assignment.report.partitions:
        assert summary.share >= 0.3
    assert sum(summary.parameters for summary in assignment.report.partitions) == 124_439_808


def test_t5_keeps_its_embeddings_together() -> None:
    with torch.device("meta"):
        model = T5ForConditionalGeneration(T5Config())
    home = assign(model, config(4)).home
    owners = [
        name
        for name, module in model.named_modules()
        if any(p is model.shared.weight for p in module._parameters.values())
    ]
    assert {home[name] for name in owners} == {home["shared"]}
    assert set(home.values()) == {0, 1, 2, 3}


def test_modules_without_parameters_go_with_their_parent() -> None:
    home = assign(gpt2(), config(3)).home
    for name in home:
        if name.endswith(("drop", "dropout", "act")):
            assert home[name] == home[name.rpartition(".")[0]]


def test_a_module_that_appears_twice_has_one_home() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Linear(4, 4), shared)
    assignment = assign(model, config(2))
    assert list(assignment.home) == ["", "0", "1"]
    assert sum(summary.parameters for summary in assignment.report.partitions) == 40


def test_one_partition_holds_everything() -> None:
    assignment = assign(gpt2(2), config(1))
    assert set(assignment.home.values()) == {0}
    assert assignment.report.partitions[0].modules == ("the whole model",)


def test_equal_models_get_equal_homes() -> None:
    assert assign(gpt2(), config(4)).home == assign(gpt2(), config(4)).home


def test_dtypes_weigh_by_their_bytes() -> None:
    model = nn.Sequential(
        nn.Linear(10, 10, bias=False, dtype=torch.float64),
        *(nn.Linear(10, 10, bias=False, dtype=torch.float16) for _ in range(4)),
    )
    assert [assign(model, config(2)).home[str(i)] for i in range(5)] == [0, 1, 1, 1, 1]


def test_lazy_parameters_are_refused_by_name() -> None:
    with pytest.raises(SMPUsageError, match=r"'weight' of module '0' \(LazyLinear\) has no shape yet"):
        assign(nn.Sequential(nn.LazyLinear(3)), config(2))


def test_marks_are_ignored_with_auto_partition_and_that_is_said(caplog: pytest.LogCaptureFixture) -> None:
    plain = chain(4, 4, 4, 4)
    with partition(1):
        marked = chain(4, 4, 4, 4)
    expected = assign(plain, config(2)).home
    assert "by hand" not in caplog.text
    assignment = assign(marked, config(2))
    assert "set auto_partition to False" in caplog.text
    assert assignment.home == expected
    assert assignment.manual == set()


# By hand.


class TwoHalves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with partition(0):
            self.first = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        with partition(1):
            self.second = nn.Sequential(nn.Linear(2, 2))
            with partition(0):
                self.inner = nn.Linear(2, 2)
            self.last = nn.Linear(2, 2)
        self.rest = nn.Linear(2, 2)


def test_innermost_context_wins_and_the_rest_goes_to_the_default() -> None:
    assignment = assign(TwoHalves(), by_hand(3, default_partition=2))
    assert assignment.home == {
        "": 2,
        "first": 0,
        "first.0": 0,
        "first.1": 0,
        "second": 1,
        "second.0": 1,
        "inner": 0,
        "last": 1,
        "rest": 2,
    }
    assert assignment.manual == set(assignment.home) - {"", "rest"}


def test_children_created_outside_inherit_from_the_nearest_marked_ancestor() -> None:
    layer = nn.Linear(2, 2)
    with partition(1):
        block = nn.Sequential(layer)
    model = nn.Sequential(block, nn.Sequential(nn.Linear(2, 2)))
    assert assign(model, by_hand(2)).home == {"": 0, "0": 1, "0.0": 1, "1": 0, "1.0": 0}


def test_set_partition_places_a_subtree_and_wins_over_the_context() -> None:
    model = TwoHalves()
    set_partition(model.second, 2)
    set_partition(model.rest, 1)
    assignment = assign(model, by_hand(3))
    assert assignment.home["second"] == 2
    assert assignment.home["second.0"] == 1, "its own mark is nearer"
    assert assignment.home["rest"] == 1


def test_set_partition_on_layers_of_a_stack_that_exists() -> None:
    model = gpt2(4)
    for i, block in enumerate(model.transformer.h):
        set_partition(block, i // 2)
    home = assign(model, by_hand(2)).home
    assert [home[f"transformer.h.{i}"] for i in range(4)] == [0, 0, 1, 1]
    assert home["transformer.h.3.mlp.c_fc"] == 1
    assert home["lm_head"] == 0


def test_deep_copies_keep_their_mark() -> None:
    with partition(1):
        layer = nn.Linear(2, 2)
    assert assign(nn.Sequential(layer, copy.deepcopy(layer)), by_hand(2)).home == {"": 0, "0": 1, "1": 1}


def test_modules_of_other_threads_are_not_marked() -> None:
    made: list[nn.Module] = []
    with partition(1):
        thread = threading.Thread(target=lambda: made.append(nn.Linear(2, 2)))
        thread.start()
        thread.join()
    assert assign(nn.Sequential(*made), by_hand(2)).home["0"] == 0


def test_context_ends_with_an_exception() -> None:
    with pytest.raises(KeyError), partition(1):
        raise KeyError
    assert assign(chain(1), by_hand(2)).home["0"] == 0


def test_splitting_modules_that_share_a_parameter_names_both() -> None:
    model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    model[1].weight = model[0].weight
    set_partition(model[1], 1)
    with pytest.raises(SMPUsageError, match=r"module '0' .*partition 0 .*module '1' on partition 1.*share a parameter"):
        assign(model, by_hand(2))


@pytest.mark.parametrize("index", [-1, True, 1.0, "1", None])
def test_indices_that_are_no_partition_are_refused_at_the_call(index: Any) -> None:
    with pytest.raises(SMPUsageError, match=r"smp\.partition got the partition .*integer of at least 0"):
        partition(index)
    with pytest.raises(SMPUsageError, match=r"smp\.set_partition got the partition"):
        set_partition(nn.Linear(1, 1), index)


def test_indices_out_of_range_are_refused_at_the_call_after_init(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "cfg", by_hand(2))
    for call in (lambda: partition(2), lambda: set_partition(nn.Linear(1, 1), 2)):
        with pytest.raises(SMPUsageError, match=r"partition 2: it must be below the number of partitions, 2"):
            call()


def test_marks_made_before_init_are_checked_with_the_name() -> None:
    model = chain(1, 1)
    set_partition(model[1], 5)
    with pytest.raises(SMPUsageError, match="module '1' is placed on partition 5"):
        assign(model, by_hand(2))


def test_set_partition_refuses_other_objects_and_partitioned_models(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SMPUsageError, match="got str"):
        set_partition("transformer.h", 1)  # type: ignore[arg-type]

    class Partitioned:
        partitioned = True

    monkeypatch.setattr(state, "model", Partitioned())
    with pytest.raises(SMPUsageError, match="before the first step"):
        set_partition(nn.Linear(1, 1), 1)


# The report.


def test_report_names_topmost_modules_parameters_and_shares() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(20))
            self.embed = nn.Embedding(2, 10)
            self.h = nn.ModuleList(nn.Sequential(nn.Linear(1, 10, bias=False), nn.ReLU()) for _ in range(12))
            self.act = nn.ReLU()

    report = assign(Model(), config(2)).report
    assert str(report).splitlines() == [
        "Partition assignments:",
        "  partition 0: the model (own parameters), embed, h.0-3, act | 80 parameters, 50.0%",
        "  partition 1: h.4-11 | 80 parameters, 50.0%",
    ]
    assert report.partitions[1].modules == ("h.4-11",)
    assert report.assignment["h.11.1"] == 1


def test_report_does_not_join_runs_with_gaps_or_of_other_parents() -> None:
    model = nn.ModuleDict({"a": chain(*[1] * 5), "b": chain(*[1] * 3)})
    for i in (2, 4):
        set_partition(model["a"][i], 1)
    set_partition(model["b"][2], 1)
    report = assign(model, by_hand(2)).report
    assert report.partitions[0].modules == ("a.0-1", "a.3", "b.0-1")
    assert report.partitions[1].modules == ("a.2", "a.4", "b.2")


def test_report_shortens_long_lines_but_not_its_data() -> None:
    model = nn.ModuleDict({f"m{i}x": nn.Linear(1, 1) for i in range(40)})
    report = assign(model, config(2)).report
    assert str(report).count("and 4 more") == 2
    assert len(report.partitions[0].modules) == 20


def test_report_is_logged_once_by_the_first_rank(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(2):
        monkeypatch.setattr(state, "topology", _C.Topology(rank, 2, 2, 1, "cluster"))
        with caplog.at_level(logging.DEBUG, logger="smp"):
            report = assign(chain(1, 1), config(2)).report
    infos = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert infos == [str(report)]
    assert infos[0].startswith("Partition assignments:\n")
    (details,) = [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG]
    assert details.splitlines() == ["the model: 0", "0: 0", "1: 1"]


def test_last_report_can_be_asked_for() -> None:
    with pytest.raises(SMPUsageError, match="no model has been partitioned yet"):
        get_partition_report()
    report = assign(chain(1, 1), config(2)).report
    assert get_partition_report() is report


def test_partitions_without_parameters_are_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assign(chain(1, 1), config(4))
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "partitions without parameters: 2, 3 of 4" in warning


LOGGING_SCRIPT = """
import logging
{before}
import smp
from smp.config import load_config
from smp.placement import assign
from torch import nn
{after}
assign(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), load_config({{"partitions": 2, "foo": 1}}, environment={{}}))
"""
BASIC_CONFIG = "logging.basicConfig(format='user %(name)s %(message)s')"


@pytest.mark.parametrize(
    ("before", "after", "line_starts", "count"),
    [
        ("", "", ["smp WARNING: configuration", "Partition assignments:"], 1),
        (BASIC_CONFIG, "", ["user smp configuration", "user smp Partition assignments:"], 1),
        ("", BASIC_CONFIG, ["user smp configuration", "user smp Partition assignments:"], 1),
        ("logging.getLogger('smp').setLevel('ERROR')", "", ["Partition"], 0),
    ],
    ids=["default", "configured_before", "configured_after", "silenced"],
)
def test_report_is_visible_on_stderr_unless_the_user_configured_logging(
    before: str, after: str, line_starts: list[str], count: int
) -> None:
    script = LOGGING_SCRIPT.format(before=before, after=after)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    lines = result.stderr.splitlines()
    for start in line_starts:
        assert sum(line.startswith(start) for line in lines) == count, result.stderr
    assert result.stderr.count("Partition assignments:") == count
