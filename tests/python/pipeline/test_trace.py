"""`smp.trace`: one file and one summary for all ranks."""

import pytest
import trace_cases

from smp.trace import _chrome_trace, _Event


def complete(file, rank, category):
    return [e for e in file["traceEvents"] if e["ph"] == "X" and e["pid"] == rank and e["cat"] == category]


def test_every_instruction_and_every_transfer_is_in_the_file(clusters, tmp_path):
    outcomes = clusters(2).run(trace_cases.traced_step, str(tmp_path), 2)
    file = outcomes[0]["file"]
    for rank, outcome in enumerate(outcomes):
        ran = complete(file, rank, "run")
        counts = {}
        for event in ran:
            name = event["name"].split(" ")[0]
            counts[name] = counts.get(name, 0) + 1
        assert counts == outcome["executed"] and counts["CALL"] > 0
        assert outcome["summary"].ranks[rank].instructions == counts
        sent = complete(file, rank, "send")
        assert [len(sent), sum(e["args"]["bytes"] for e in sent)] == outcome["sent"]
        assert outcome["summary"].links[rank, 1 - rank] == outcome["sent"]
        assert {e["args"]["microbatch"] for e in ran if e["name"].startswith("CALL")} == {0, 1}
        assert len(complete(file, rank, "step")) == 1
    named = {e["name"] for e in complete(file, 1, "run")}
    assert {"CALL of module 'norm'", "CALL of module 'second'", "BACKWARD of module 'second'"} <= named
    assert len(complete(file, 0, "issue")) == 2


def test_arrows_join_what_was_sent_with_what_came(clusters, tmp_path):
    file = clusters(2).run(trace_cases.traced_step, str(tmp_path), 2)[0]["file"]
    starts = {e["id"]: e for e in file["traceEvents"] if e["ph"] == "s"}
    ends = {e["id"]: e for e in file["traceEvents"] if e["ph"] == "f"}
    assert starts and starts.keys() == ends.keys()
    for key, start in starts.items():
        assert start["pid"] == 1 - ends[key]["pid"]
        assert start["ts"] <= ends[key]["ts"], "one clock: nothing arrives before it is sent"


def test_clocks_are_measured_where_they_are_not_known_to_be_one(clusters):
    (known, measured), other = clusters(2).run(trace_cases.clocks)
    assert known == [0, 0] and (known, measured) == other
    assert measured[0] == 0 and measured[1] != 0
    assert abs(measured[1]) < 1e9  # they are one in truth; a machine that is busy may be slow to answer


def test_clocks_of_different_ranks_are_brought_together():
    def record(begin, offset, kind, peer):
        event = _Event(kind, kind, begin, begin + 1000, 0, -1, 1, 7, peer, 4, 0)
        return {"events": [event], "begin_ns": begin, "offset": offset, "pipeline": [0, 1]}

    # Rank 1's clock is 5000 ns behind that of rank 0: 6000 there is 11000 here.
    rows = _chrome_trace([record(10_000, 0, "send", 1), record(6_000, 5_000, "receive", 0)])["traceEvents"]
    assert [(row["pid"], row["ts"], row["dur"]) for row in rows if row["ph"] == "X"] == [(0, 0.0, 1.0), (1, 1.0, 1.0)]
    assert [(row["ph"], row["ts"], row["id"]) for row in rows if row["ph"] in "sf"] == [
        ("s", 0.0, "7"),
        ("f", 1.0, "7"),
    ]


def test_shares_add_up_and_are_the_same_on_every_rank(clusters, tmp_path):
    outcomes = clusters(2).run(trace_cases.traced_step, str(tmp_path), 2)
    assert outcomes[0]["summary"] == outcomes[1]["summary"]
    for rank in outcomes[0]["summary"].ranks:
        assert rank.busy + rank.waiting + rank.idle == pytest.approx(1, abs=1e-6)
        assert 0 < rank.busy < 1 and rank.peak_value_bytes > 0
    assert outcomes[0]["summary"].ranks[0].issuing > 0 == outcomes[0]["summary"].ranks[1].issuing
    assert "rank 0 to rank 1" in outcomes[0]["text"] and "CALL" in outcomes[0]["text"]


def test_one_partition_gives_an_empty_picture(clusters, tmp_path):
    (outcome,) = clusters(1).run(trace_cases.traced_step, str(tmp_path), 1)
    assert outcome["summary"].ranks[0].busy == 0 and outcome["summary"].links == {}
    assert all(e["ph"] == "M" for e in outcome["file"]["traceEvents"])


def test_off_it_records_nothing(clusters):
    assert clusters(2).run(trace_cases.off_records_nothing) == [0, 0]


def test_misuse_is_explained_and_leaves_the_library_usable(clusters, tmp_path):
    for rank, facts in enumerate(clusters(2).run(trace_cases.misuse, str(tmp_path))):
        assert facts["nested"][0] == "SMPUsageError" and "already" in facts["nested"][1]
        assert facts["failing"] == ("KeyError", "'mine'")
        assert not facts["file"]
        assert rank == 1 or facts["path"][0] == "FileNotFoundError"
        assert facts["afterwards"] == 2
