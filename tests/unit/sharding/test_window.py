"""Windows as flash attention has them, and the range of keys that one leaves to each query."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ringfeed.sharding.window import CAUSAL, WHOLE, DocumentSpans, Window

sides = st.integers(-1, 12) | st.sampled_from([10**6, 2**62, 2**70])


@given(
    window=st.tuples(sides, sides), length=st.integers(1, 9), start=st.integers(0, 5), pads=st.integers(0, 3)
)
def test_a_query_sees_its_document_as_far_as_the_window_reaches(window, length, start, pads):
    left, right = window
    queries = np.arange(start, start + length)
    spans = DocumentSpans(
        queries=np.concatenate([queries, np.arange(start + length, start + length + pads)]),
        starts=np.array([start] * length + [0] * pads),
        stops=np.array([start + length] * length + [0] * pads),
    )

    starts, stops = spans.key_ranges(Window.read(window))

    for query, first, stop in zip(queries.tolist(), starts.tolist(), stops.tolist(), strict=False):
        keys = [key for key in queries if (left < 0 or key >= query - left)]
        keys = [key for key in keys if (right < 0 or key <= query + right)]
        assert list(range(first, stop)) == keys
    assert (stops[length:] <= starts[length:]).all()


def test_the_names_are_flash_attention_s_sides():
    assert Window.read((-1, 0)) == CAUSAL
    assert Window.read((-1, -1)) == WHOLE
    assert Window.read(CAUSAL) is CAUSAL


@pytest.mark.parametrize("window", [None, 4, (4,), (1, 2, 3), (1.0, 0), ("1", 0), (True, 0)])
def test_what_is_not_two_integers_is_refused(window):
    with pytest.raises(ValueError, match="window must be two integers"):
        Window.read(window)


def test_a_side_below_minus_one_is_refused():
    with pytest.raises(ValueError, match=r"window=\(4, -2\) must have sides of at least -1 \(-1: no limit\)"):
        Window.read((4, -2))
