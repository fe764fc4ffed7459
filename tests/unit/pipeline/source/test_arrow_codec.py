"""A view survives its Arrow form, and no other form is read."""

import numpy as np
import pyarrow as pa
import pytest

from ringfeed.pipeline.arrow_codec import SCHEMA, FormatError, ViewDecoder, encode_view
from ringfeed.pipeline.skip import skip_list


def through_bytes(batch):
    """The batch as a reader gets it: from the bytes of one message."""
    return pa.ipc.read_record_batch(pa.ipc.read_message(batch.serialize()), SCHEMA)


@pytest.mark.parametrize("layout", ["te", "head_tail", "contiguous", "whole_document", "identity"])
@pytest.mark.parametrize("positions", ["restart", "continue"])
def test_decoding_gives_back_what_was_encoded(make_plan, open_source, layout, positions):
    plan = make_plan(positions=positions)
    source = open_source(plan, layout=layout, overlay=skip_list([0, 4]))
    decoder = ViewDecoder(source.spec)
    left_out = 0
    for step, pack, rank in every_view(source):
        found = source.pack_view(step, pack, cp_rank=rank)
        batch = through_bytes(encode_view(found.view, found.pieces, step=step, pack=pack))

        again = decoder.decode(batch, cp_rank=rank)

        assert (again.step, again.pack) == (step, pack)
        assert again.view.view.local_supervised == found.view.local_supervised
        assert again.view.view.documents.tolist() == found.view.documents.tolist()
        assert again.view.pieces.starts.tolist() == found.pieces.starts.tolist()
        for name, array in found.view.tensors.items():
            assert again.view.view.tensors[name].dtype == array.dtype
            assert again.view.view.tensors[name].tolist() == array.tolist()
        left_out += len(found.pieces) - len(found.view.documents)
    assert left_out


def every_view(source):
    """Return (step, pack, cp rank) of all views of a source at cp size 2."""
    return [
        (step, pack, rank)
        for step in range(source.num_steps)
        for pack in range(source.step_facts(step).num_packs)
        for rank in (0, 1)
    ]


def test_the_schema_is_the_documented_one():
    assert SCHEMA.metadata == {b"ringfeed.view_format": b"1"}
    assert str(SCHEMA.field("input_ids").type) == "large_list<item: int32>"
    assert SCHEMA.names == [
        "step",
        "pack",
        "local_supervised",
        "input_ids",
        "labels",
        "documents",
        "starts",
        "lengths",
        "epochs",
        "cu_seqlens",
        "cu_seqlens_padded",
    ]


@pytest.mark.parametrize("metadata", [None, {b"ringfeed.view_format": b"2"}])
def test_another_format_version_is_refused(plan, open_source, metadata):
    source = open_source(plan)
    found = source.pack_view(0, 0, cp_rank=0)
    batch = encode_view(found.view, found.pieces, step=0, pack=0).replace_schema_metadata(metadata)

    with pytest.raises(FormatError, match="format version"):
        ViewDecoder(source.spec).decode(batch, cp_rank=0)


def test_a_view_of_another_length_than_the_rank_holds_is_refused(make_plan, open_source, plan):
    longer = open_source(make_plan(pack_tokens=128))
    found = longer.pack_view(0, 0, cp_rank=0)
    batch = encode_view(found.view, found.pieces, step=0, pack=0)
    columns = [batch.column(name) for name in SCHEMA.names]
    columns[3] = pa.LargeListArray.from_arrays([0, 1], np.zeros(1, dtype=np.int32))
    broken = pa.RecordBatch.from_arrays(columns, schema=SCHEMA)

    with pytest.raises(ValueError, match="view of 1 ids and 64 labels does not fit cp_rank=0"):
        ViewDecoder(longer.spec).decode(broken, cp_rank=0)
