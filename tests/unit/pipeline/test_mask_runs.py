"""Runs of targets against flags that are counted one by one."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.pipeline.mask_runs import MaskRuns, count_targets, rows_of_documents, runs_from_flags

documents = st.lists(st.lists(st.booleans(), min_size=1, max_size=12), min_size=1, max_size=6)


def runs_of(flags):
    lengths = np.array([len(document) for document in flags], np.int64)
    return runs_from_flags(np.array([flag for document in flags for flag in document], np.bool_), lengths)


def targets(document, low=0, high=None):
    """Offsets of targets: flagged tokens but the first."""
    high = len(document) if high is None else high
    return [k for k in range(1, len(document)) if document[k] and low <= k < high]


@given(documents)
def test_runs_name_the_targets_and_nothing_else(flags):
    runs = runs_of(flags)
    found = iter(zip(runs.starts.tolist(), runs.stops.tolist(), strict=True))
    for document, count in zip(flags, runs.counts.tolist(), strict=True):
        own = [next(found) for _ in range(count)]
        assert [k for start, stop in own for k in range(start, stop)] == targets(document)
        # Runs that touched would be one.
        assert all(stop < start for (_, stop), (start, _) in pairwise(own))
    assert runs.targets.tolist() == [len(targets(document)) for document in flags]


@given(documents, st.data())
def test_targets_of_any_range_are_counted(flags, data):
    runs = runs_of(flags)
    lows = [data.draw(st.integers(0, len(document))) for document in flags]
    # Beyond the end, too: the label of a document's last token asks for nothing.
    highs = [data.draw(st.integers(low, low + 20)) for low in lows]
    first = np.cumsum(runs.counts) - runs.counts
    columns = (runs.starts, runs.stops, runs.before)
    found = count_targets(first, runs.counts, columns, np.array(lows), np.array(highs))
    expected = [len(targets(d, low, high)) for d, low, high in zip(flags, lows, highs, strict=True)]
    assert found.tolist() == expected


@given(documents, st.data())
def test_parts_of_documents_concatenate_to_the_whole(flags, data):
    runs = runs_of(flags)
    cut = data.draw(st.integers(0, len(flags)))
    whole = MaskRuns.concat([runs.slice(0, cut), runs.slice(cut, len(flags))])
    for name in ("counts", "starts", "stops", "before"):
        assert getattr(whole, name).tolist() == getattr(runs, name).tolist()


def test_rows_of_documents_are_listed_document_by_document():
    rows = rows_of_documents(np.array([7, 0, 3]), np.array([2, 0, 3]))
    assert rows.tolist() == [7, 8, 3, 4, 5]
