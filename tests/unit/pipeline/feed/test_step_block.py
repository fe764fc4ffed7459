"""Blocks: what is read is what was built, whatever flips on the way is found and named."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import xxhash
from hypothesis import given, reject
from hypothesis import strategies as st

from ringfeed.pipeline.block_reader import read_block
from ringfeed.pipeline.feed_request import BLOCK_COLUMNS, BlockRequest
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.ranks import RankPlace
from ringfeed.pipeline.skip import skip_list
from ringfeed.pipeline.step_block import BlockHeader, EncodedBlock

NARROW = [("pieces",), ("pieces", "input_ids"), ("pieces", "labels")]


def request(first=(0, 0), count=4, *, cp_rank=1, dp=(0, 2), columns=BLOCK_COLUMNS, packs_per_chunk=1):
    place = RankPlace(
        dp_rank=dp[0], dp_size=dp[1], cp_rank=cp_rank, cp_size=2, packs_per_chunk=packs_per_chunk
    )
    return BlockRequest(
        place=place, first_step=first[0], first_micro_batch=first[1], num_micro_batches=count, columns=columns
    )


def over_the_wire(block):
    """Serialize as a file or the object store does, and read it back."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, block.to_batch().schema) as writer:
        writer.write_batch(block.to_batch())
    return EncodedBlock.from_batch(pa.ipc.open_stream(sink.getvalue()).read_next_batch())


@pytest.mark.parametrize("options", [{}, {"overlay": skip_list([3, 11])}, {"layout": "magi"}])
@pytest.mark.parametrize("positions", ["restart", "continue"])
def test_views_of_a_block_are_those_of_the_source(make_plan, open_source, make_builder, options, positions):
    plan = make_plan(positions=positions)
    source = open_source(plan, **options)
    builder = make_builder(lambda: open_source(plan, **options))
    asked = request((0, 1))

    found = read_block(over_the_wire(builder.block(asked)), asked, builder.facts())

    assert found.nbytes > 0
    for step, share in found.shares.items():
        expected = source.step_share(step, asked.place)
        assert share.packs.tolist() == expected.packs.tolist()
        assert (share.chain, share.supervised.tolist()) == (expected.chain, expected.supervised.tolist())
    for step, micro_batch in asked.batches(2):
        for pack in found.shares[step].packs[micro_batch].tolist():
            assert_same(found.view(step, pack), source.pack_view(step, pack, cp_rank=1).view)


def assert_same(found, expected):
    for name, tensor in expected.tensors.items():
        assert found.tensors[name].dtype == tensor.dtype, name
        np.testing.assert_array_equal(found.tensors[name], tensor, err_msg=name)
    assert found.documents.tolist() == expected.documents.tolist()
    assert found.local_supervised == expected.local_supervised


@given(data=st.data())
def test_a_flipped_bit_is_found_wherever_it_is_and_its_column_named(data, built):
    block, asked, facts = built
    name = data.draw(st.sampled_from(block.rows.schema.names))
    rows = with_flipped_bit(block.rows, name, data.draw)

    with pytest.raises(
        CorruptDataError, match=rf"block of 4 micro-batches from step 0.* is damaged in {name}: "
    ):
        read_block(replace(block, rows=rows), asked, facts)


def with_flipped_bit(rows, name, draw):
    """Return ``rows`` with one bit of a column's offsets or values changed."""
    column = rows.column(name)
    is_list = hasattr(column, "offsets")
    if is_list and draw(st.booleans()):
        changed = rebuilt(column, flipped(column.buffers()[1], draw), column.values)
    elif is_list:
        values = column.values
        changed = rebuilt(column, column.buffers()[1], rebuilt(values, flipped(values.buffers()[1], draw)))
    else:
        changed = rebuilt(column, flipped(column.buffers()[1], draw))
    # Not set_column: it validates, which nothing on the way does.
    columns = [changed if other == name else rows.column(other) for other in rows.schema.names]
    return pa.RecordBatch.from_arrays(columns, schema=rows.schema)


def rebuilt(array, buffer, *children):
    try:
        return pa.Array.from_buffers(array.type, len(array), [None, buffer], children=list(children))
    except pa.ArrowInvalid:
        # Offsets that end beyond the values cannot be made this way; the test below makes them.
        reject()


@pytest.mark.parametrize("name", ["documents", "input_ids"])
@pytest.mark.parametrize("end", [0, -1])
def test_offsets_out_of_bounds_are_found_and_not_followed(built, name, end):
    block, asked, facts = built
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, block.rows.schema) as writer:
        writer.write_batch(block.rows)
    offsets = block.rows.column(name).offsets.to_numpy()
    wrong = offsets.copy()
    wrong[end] = 1 << 30
    stream = sink.getvalue().to_pybytes()
    assert offsets.tobytes() in stream
    rows = pa.ipc.open_stream(stream.replace(offsets.tobytes(), wrong.tobytes())).read_next_batch()

    with pytest.raises(CorruptDataError, match="damaged in"):
        read_block(replace(block, rows=rows), asked, facts)


def flipped(buffer, draw):
    data = bytearray(buffer.to_pybytes())
    data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    return pa.py_buffer(bytes(data))


@pytest.fixture(scope="module")
def built(make_builder):
    builder = make_builder()
    asked = request()
    return builder.block(asked), asked, builder.facts()


@given(data=st.data())
def test_a_flipped_bit_in_the_header_is_found(data, built):
    block, asked, facts = built
    header = bytearray(block.header)
    header[data.draw(st.integers(0, len(header) - 1))] ^= 1 << data.draw(st.integers(0, 7))

    with pytest.raises(CorruptDataError, match="the header of a block is damaged"):
        read_block(replace(block, header=bytes(header)), asked, facts)


def test_rows_cut_short_or_without_a_value_are_found(built):
    block, asked, facts = built
    first = block.rows.column("documents")
    nulls = block.rows.set_column(1, block.rows.schema.field(1), pa.nulls(len(first), first.type))

    for rows, told in ((block.rows.slice(0, 3), "damaged in"), (nulls, "without a value")):
        with pytest.raises(CorruptDataError, match=told):
            read_block(replace(block, rows=rows), asked, facts)


def test_the_answer_to_another_request_is_refused_with_the_difference(built, make_builder):
    block, asked, facts = built

    with pytest.raises(CorruptDataError, match=r"another request \(.*cp_rank"):
        read_block(block, replace(asked, place=replace(asked.place, cp_rank=0)), facts)


def test_a_block_of_another_run_is_refused_with_both_fingerprints(built, make_builder):
    _, asked, facts = built
    other = make_builder(layout="contiguous")

    with pytest.raises(ValueError, match=f"{other.facts().fingerprint}.*{facts.fingerprint}"):
        read_block(other.block(asked), asked, facts)


def test_a_block_of_a_newer_ringfeed_is_refused(built):
    block, asked, facts = built
    header = BlockHeader.from_bytes(block.header).to_bytes()[16:].replace(b'"version":1', b'"version":9')
    header = xxhash.xxh3_64_hexdigest(header).encode() + header

    with pytest.raises(ValueError, match="version 9, this ringfeed reads 1"):
        read_block(replace(block, header=header), asked, facts)


def test_a_batch_without_a_header_is_no_block(built):
    with pytest.raises(CorruptDataError, match="without a header"):
        EncodedBlock.from_batch(built[0].rows)


@pytest.mark.parametrize("columns", NARROW)
def test_a_narrow_block_has_what_was_asked_for_and_the_digest_of_the_rest(built, make_builder, columns):
    block, asked, facts = built
    builder = make_builder()
    some = replace(asked, columns=columns)
    narrow, whole = builder.block(some), read_block(block, asked, facts)

    found = read_block(over_the_wire(narrow), some, facts)

    assert narrow.nbytes < block.nbytes
    for step, micro_batch in asked.batches(2):
        for pack in found.shares[step].packs[micro_batch].tolist():
            view, full = found.view(step, pack), whole.view(step, pack)
            assert view.position_ids.tolist() == full.position_ids.tolist()
            for name in ("input_ids", "labels"):
                expected = getattr(full, name).tolist() if name in columns else []
                assert getattr(view, name).tolist() == expected
            assert view.chunk_digest == digest(full)


def digest(*views):
    hasher = xxhash.xxh3_64()
    for view in views:
        hasher.update(view.input_ids.tobytes())
        hasher.update(view.labels.tobytes())
    return hasher.intdigest()


def test_facts_alone_are_small_and_have_no_row(built, make_builder):
    block, asked, _ = built
    builder = make_builder()
    found = over_the_wire(builder.block(replace(asked, columns=())))

    assert found.rows.num_columns == 0
    assert found.nbytes < block.nbytes / 2
    assert builder.num_builds == 0
    assert list(read_block(found, replace(asked, columns=()), builder.facts()).shares) == [0, 1]


def test_little_is_sent_beside_the_tokens(make_builder, plan, open_source):
    """Offsets, positions, mask and epochs are derived: of 8 bytes a token, the rest stays below a tenth."""
    builder = make_builder(cp_size=1, block_bytes=1 << 20)
    place = RankPlace(dp_rank=0, dp_size=1, cp_rank=0, cp_size=1)
    asked = BlockRequest(
        place=place, first_step=0, first_micro_batch=0, num_micro_batches=4 * (plan.num_steps - 1)
    )
    block = builder.block(asked)

    tokens = sum(block.rows.column(name).values.nbytes for name in ("input_ids", "labels"))
    # Packs of 64 tokens are tiny: per pack and piece at most 4 lists' offsets, a count, and 8 bytes a piece.
    pieces = len(block.rows.column("documents").values)
    assert block.rows.nbytes - tokens <= 40 * block.rows.num_rows + 8 * pieces + 64
