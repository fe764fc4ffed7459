"""Measured tables: straight lines between rows, exact files, and a name made of the numbers."""

import numpy as np
import pytest

from ringfeed.pipeline.planner.cost import check_costs, cost_model_of
from ringfeed.pipeline.planner.cost_table import TableCost, read_table, write_table


@pytest.fixture
def table(tmp_path):
    """Read a table of these lines."""

    def read(*lines):
        (tmp_path / "table.csv").write_text("\n".join(["length,milliseconds", *lines]))
        return read_table(tmp_path / "table.csv")

    return read


def costs(model, *lengths):
    return model.piece_costs(np.array(lengths, dtype=np.int64)).tolist()


def test_costs_lie_on_straight_lines_rounded_down(table):
    model = table("10,0.000100", "20, 0.000130", "# a comment", "", "50,0.000131")
    assert costs(model, 1, 5, 10, 11, 19, 20, 21, 49, 50) == [10, 50, 100, 103, 127, 130, 130, 130, 131]


def test_a_row_of_length_zero_is_what_every_piece_costs_at_least(table):
    assert costs(table("0,0.5", "100,1.5"), 1, 50, 100) == [510_000, 1_000_000, 1_500_000]


def test_long_lines_are_exact_where_a_product_would_leave_int64(table):
    model = table("1,0", "2147483647,1000000")
    assert costs(model, 2**30) == [(2**30 - 1) * 10**12 // (2**31 - 2)]


def test_a_table_is_written_so_that_it_reads_back_the_same(table, tmp_path):
    model = table("0,0.000001", "7,1.25", "8,900000.000001")
    write_table(tmp_path / "again.csv", model, comments=["measured on Monday"])
    assert cost_model_of(f"table:{tmp_path / 'again.csv'}").name == model.name
    again = read_table(tmp_path / "again.csv")
    assert again.nanoseconds.tolist() == [1, 1_250_000, 900_000_000_001]


def test_the_name_changes_with_every_number(table):
    names = {table(*rows).name for rows in [("1,1", "2,2"), ("1,1", "2,3"), ("1,1", "3,2"), ("1,1",)]}
    assert len(names) == 4
    assert all(name.startswith("table:xxh3_64=") for name in names)


def test_a_piece_beyond_the_table_is_refused_when_a_plan_is_asked_for(table):
    model = table("1,1", "4096,10")
    check_costs(model, pack_tokens=4096, packs_per_step=8)
    with pytest.raises(ValueError, match="ends at 4096 tokens and says nothing of a piece of 4098"):
        check_costs(model, pack_tokens=4098, packs_per_step=8)


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        (("5,1", "5,2"), "csv:3: length 5 does not rise above 5"),
        (("5,1", "", "6,0.9"), "csv:4: 6 tokens cost 900000 ns, fewer .5. cost 1000000 ns"),
        (("5,-1",), "csv:2: 5 tokens in -1000000 ns"),
        (("5,1000001",), "csv:2: 5 tokens in 1000001000000 ns; .* times from 0 to 1000000 ms"),
        (("2147483648,1",), "csv:2: 2147483648 tokens in"),
        (("five,1",), "csv:2: length 'five' is no whole number of tokens"),
        (("5,nan",), "csv:2: 'nan' is no time in milliseconds"),
        (("5,",), "csv:2: '' is no time in milliseconds"),
        (("5",), "csv:2: 1 cells, need 2"),
        (("0,1",), "has at least one token, and costs something"),
        (("5,0",), "has at least one token, and costs something"),
        ((), "has no row; a cost table has lines of length,milliseconds"),
    ],
)
def test_rows_that_are_no_table_are_refused_with_their_line(table, rows, told):
    with pytest.raises(ValueError, match=told):
        table(*rows)


def test_a_missing_file_and_other_columns_are_refused(tmp_path):
    with pytest.raises(
        ValueError, match="is not a file; give a CSV file with the columns length,milliseconds"
    ):
        cost_model_of(f"table:{tmp_path / 'none.csv'}")
    (tmp_path / "other.csv").write_text("tokens,ms\n1,2\n")
    with pytest.raises(ValueError, match=r"other.csv:1: the columns must be length,milliseconds"):
        cost_model_of(f"table:{tmp_path / 'other.csv'}")


def test_arrays_of_two_sizes_are_no_table():
    with pytest.raises(ValueError, match="as many times as lengths"):
        TableCost(lengths=np.arange(1, 4), nanoseconds=np.arange(2))
