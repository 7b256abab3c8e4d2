"""Ranks, groups and what they need before and after smp.init."""

import pytest

from smp import _C, ranks
from smp.config import load_config
from smp.exceptions import SMPUsageError
from smp.launchers import Launch
from smp.state import state

GROUPS = ("mp", "dp", "pp", "tp", "rdp")


def stand_on(monkeypatch: pytest.MonkeyPatch, rank: int, size: int, placement: str, pp: int = 2, tp: int = 1) -> None:
    """Makes this process believe that it is one rank of a job."""
    monkeypatch.setattr(state, "topology", _C.Topology(rank, size, pp, tp, placement))
    monkeypatch.setattr(state, "cfg", load_config({"partitions": pp, "microbatches": 4}, environment={}))


@pytest.fixture
def uninitialized(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "topology", None)
    monkeypatch.setattr(state, "cfg", None)


@pytest.mark.parametrize(
    ("placement", "mp_groups", "dp_groups"),
    [
        ("cluster", [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("spread", [[0, 4], [1, 5], [2, 6], [3, 7]], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_documented_groups_of_eight_ranks(
    monkeypatch: pytest.MonkeyPatch, placement: str, mp_groups: list[list[int]], dp_groups: list[list[int]]
) -> None:
    for rank in range(8):
        stand_on(monkeypatch, rank, 8, placement)
        assert ranks.get_mp_group() == next(group for group in mp_groups if rank in group)
        assert ranks.get_dp_group() == next(group for group in dp_groups if rank in group)
        assert ranks.get_pp_group() == ranks.get_mp_group()
        assert ranks.get_tp_group() == [rank]
        assert ranks.get_rdp_group() == ranks.get_dp_group()


@pytest.mark.parametrize("placement", ["cluster", "spread", "DPT", "DTP", "PDT", "PTD", "TDP", "TPD"])
def test_rank_and_size_match_the_group(monkeypatch: pytest.MonkeyPatch, placement: str) -> None:
    for rank in range(12):
        stand_on(monkeypatch, rank, 12, placement, pp=3, tp=2)
        assert (ranks.rank(), ranks.size()) == (rank, 12)
        for name in GROUPS:
            group = getattr(ranks, f"get_{name}_group")()
            assert group == sorted(group)
            assert getattr(ranks, f"{name}_size")() == len(group)
            assert group[getattr(ranks, f"{name}_rank")()] == rank
        assert ranks.mp_size() * ranks.rdp_size() == ranks.size()
        assert ranks.pp_size() * ranks.dp_size() == ranks.size()


def test_letters_place_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(8):
        stand_on(monkeypatch, rank, 8, "DPT", pp=2, tp=2)
        assert 4 * ranks.rdp_rank() + 2 * ranks.pp_rank() + ranks.tp_rank() == rank
        stand_on(monkeypatch, rank, 8, "PTD", pp=2, tp=2)
        assert 4 * ranks.pp_rank() + 2 * ranks.tp_rank() + ranks.rdp_rank() == rank


def test_a_world_that_does_not_fit_is_a_usage_error() -> None:
    with pytest.raises(SMPUsageError, match="launch has 3 rank"):
        _C.Topology(0, 3, 2, 1, "cluster")


def test_unknown_group_name_is_a_usage_error() -> None:
    topology = _C.Topology(1, 2, 2, 1, "cluster")
    assert (topology.group_rank("pp"), topology.group_size("pp")) == (1, 2)
    assert topology.group("pp") == topology.pp_group == [0, 1]
    with pytest.raises(SMPUsageError, match="'stage'"):
        topology.group("stage")


@pytest.mark.usefixtures("uninitialized")
@pytest.mark.parametrize(
    "name",
    [
        *("rank", "size", "local_rank", "local_size", "num_microbatches", "get_world_process_group"),
        *(f"{group}_{what}" for group in GROUPS for what in ("rank", "size")),
        *(f"get_{group}_{what}" for group in GROUPS for what in ("group", "process_group")),
    ],
)
def test_everything_asks_for_init_first(name: str) -> None:
    with pytest.raises(SMPUsageError, match=r"smp\.init\(\) first"):
        getattr(ranks, name)()


@pytest.mark.usefixtures("uninitialized")
def test_is_initialized_can_be_asked_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not ranks.is_initialized()
    stand_on(monkeypatch, 0, 2, "cluster")
    assert ranks.is_initialized()


def test_models_are_not_traced() -> None:
    assert ranks.is_tracing() is False


def test_number_of_microbatches_comes_from_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, 0, 2, "cluster")
    assert ranks.num_microbatches() == 4


@pytest.mark.parametrize("group", [*GROUPS, "world"])
def test_process_groups_come_with_data_parallelism(monkeypatch: pytest.MonkeyPatch, group: str) -> None:
    stand_on(monkeypatch, 0, 2, "cluster")
    with pytest.raises(SMPUsageError, match=rf"get_{group}_process_group.*data parallelism"):
        getattr(ranks, f"get_{group}_process_group")()


def test_local_ranks_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_on(monkeypatch, 5, 8, "cluster")
    monkeypatch.setattr(ranks, "find_launch", lambda: Launch("mpirun", 5, 8, 1, 4, None))
    assert (ranks.local_rank(), ranks.local_size()) == (1, 4)
    monkeypatch.setattr(ranks, "find_launch", lambda: Launch("mpirun", 5, 8, None, None, None))
    with pytest.raises(SMPUsageError, match="LOCAL_RANK"):
        ranks.local_rank()


def test_groups_and_rank_types_have_short_names() -> None:
    for group in ranks.CommGroup:
        assert getattr(ranks, group.name) is group
    for rank_type in ranks.RankType:
        assert getattr(ranks, rank_type.name) is rank_type
