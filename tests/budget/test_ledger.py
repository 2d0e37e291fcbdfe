"""The ledger: an epoch's record is taken once, and every event is counted in the trace too."""

from __future__ import annotations

from hopline.budget.ledger import Ledger
from hopline.util import trace


def test_the_record_of_an_epoch_is_taken_once_and_the_peak_of_the_run_stays():
    ledger = Ledger(100)
    ledger.note_peak(90.0, 80)
    ledger.note_peak(70.0, 60)
    ledger.note_batch(150.0, 80)
    record = ledger.take()
    assert (record["limit_bytes"], record["promised_bytes"], record["peak_bytes"]) == (100, 90.0, 80)
    assert (record["before"], record["after"], record["over"]) == ([150.0], [80], 0)

    ledger.note_peak(50.0, 40)
    assert ledger.take()["peak_bytes"] == 40
    assert (ledger.promised_bytes, ledger.peak_bytes) == (90.0, 80)


def test_every_event_is_counted_in_the_trace_too():
    ledger = Ledger(100)
    counters = trace.Counters()
    with trace.listen(counters):
        ledger.note_peak(90.0, 101)
        ledger.note(split=1, pieces=3)
        ledger.note(split=1, pieces=4)
        ledger.note(resampled=1)
        ledger.note(cut=1, edges_cut=500)
        ledger.note(oom=1)
    counters.next_epoch()
    record = ledger.take()
    names = ("over", "split", "pieces", "resampled", "cut", "edges_cut", "oom")

    assert [record[name] for name in names] == [1, 2, 7, 1, 1, 500, 1]
    assert counters.last_epoch() == {
        "budget.steps_over": 1,
        "budget.batches_split": 2,
        "budget.pieces": 7,
        "budget.resampled": 1,
        "budget.batches_cut": 1,
        "budget.edges_cut": 500,
        "budget.out_of_memory": 1,
    }
