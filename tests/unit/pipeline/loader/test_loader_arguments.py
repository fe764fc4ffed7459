"""What ``Loader`` refuses when it is opened, and what it tells the user to do."""

import pytest
import torch

from ringfeed.pipeline.corpus_writer import write_corpus


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dp_size": 3}, r"dp_size=3 .* does not divide packs_per_step=8; .* one of \[1, 2, 4, 8\]"),
        ({"dp_size": 4, "packs_per_chunk": 4}, r"= 16 does not divide packs_per_step=8; .* one of \[1, 2\]"),
        ({"dp_size": 0}, r"dp_size must be at least 1, got 0"),
        ({"dp_rank": 2, "dp_size": 2}, r"dp_rank=2 is not in 0 to 1"),
        ({"cp_rank": -1, "cp_size": 2}, r"cp_rank=-1 is not in 0 to 1"),
        ({"packs_per_chunk": 0}, r"packs_per_chunk must be at least 1, got 0"),
        ({"layout": None}, r"is a plan, .* pass layout=, one of te, head_tail, contiguous, whole_document"),
        ({"layout": "zigzag"}, r"unknown layout 'zigzag'; known: "),
        ({"layout": "head_tail", "packs_per_chunk": 2}, r"takes one pack per chunk; .* 'te' or 'identity'"),
        ({"layout": "contiguous", "cp_size": 3}, r"multiple of 3; nearest valid: \[126, 129\]"),
        ({"tp_size": 3}, r"tp_size=3.* multiple of 3"),
        ({"layout": "te", "cp_size": 16}, r"packs then take more .* smallest budget .* slot_budget="),
        ({"columns": ["input_ids", "tokens"]}, r"need at least one of input_ids, .* unknown \['tokens'\]"),
        ({"columns": []}, r"need at least one of input_ids"),
        ({"prefetch_bytes": -1}, r"prefetch_bytes must be at least 0, got -1"),
        ({"max_documents": 0}, r"max_documents must be at least 1, got 0"),
        ({"token_dtype": torch.int16}, r"token_dtype=torch.int16 is not supported; take torch.int64"),
        ({"device": "mps"}, r"device='mps' is not supported; take 'cpu', 'cuda'"),
        ({"device": "gpu"}, r"device='gpu' is no torch device"),
        ({"source": "smoke://host:1"}, r"no transport for smoke:// .* the folder of a plan, the folder of"),
        ({"source": "carrier-pigeon://a/b"}, r"no transport for carrier-pigeon://"),
        ({"token": "secret"}, r"token= and tls= are for the URL of a service, .* is a path"),
        ({"tls": "no-such.pem"}, r"tls: ca='no-such.pem' is not a file"),
        ({"tls": {"cert": __file__}}, r"need ca, and for mTLS cert and key; unknown \[\]"),
        ({"tls": {"ca": __file__, "cert": __file__}}, r"a certificate and its key go together"),
        ({"tls": {"ca": __file__, "pem": __file__}}, r"unknown \['pem'\]"),
    ],
)
def test_refuses(run, changes, message):
    with pytest.raises(ValueError, match=message):
        run.load(**changes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_refuses_cuda_where_there_is_none(run):
    with pytest.raises(ValueError, match=r"device='cuda:0': this torch sees no CUDA device"):
        run.load(device="cuda:0")


def test_refuses_what_is_neither_plan_nor_shards(run, tmp_path):
    with pytest.raises(ValueError, match=r"there is no plan at .*absent"):
        run.load(source=tmp_path / "absent")
    with pytest.raises(ValueError, match=r"prose is a corpus, not a plan"):
        run.load(source=run.plan.parent / "prose")


def test_refuses_other_corpora_with_the_difference(run, tmp_path):
    other = write_corpus(tmp_path / "prose", run.documents[:5], name="prose", pad_id=0)

    with pytest.raises(ValueError, match=r"was not planned from .*expected .*, found"):
        run.load(corpus=[other.path, run.plan.parent / "code"])


def test_takes_a_layout_object_as_well_as_its_name(run):
    by_name = next(iter(run.load(cp_size=2)))
    layout = by_name.sharder.layout

    by_object = next(iter(run.load(cp_size=2, layout=layout)))

    assert torch.equal(by_name.tensors["input_ids"], by_object.tensors["input_ids"])


def test_slot_budget_opens_a_layout_that_pads_more(run):
    batch = next(iter(run.load(layout="te", cp_size=16, slot_budget=512)))

    assert batch.tensors["cu_seqlens_padded"][-1] == 512
    assert len(batch.tensors["input_ids"]) == 32
