"""Damaged documents are named one by one, and a run goes on without them."""

import json

import numpy as np
import pytest

from ringfeed.pipeline.cli import main
from ringfeed.pipeline.corpus import Corpus
from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.manifest import CorruptDataError
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan


def loaded(plan, *, skip=None):
    return list(Loader(plan, dp_rank=0, dp_size=1, cp_rank=0, cp_size=1, layout="te", skip=skip))


@pytest.fixture
def made(tmp_path):
    """Two corpora of 12 documents each, in several token files, and their plan."""
    for number, name in enumerate(("first", "second")):
        documents = [np.arange(8) + 100 * number + i for i in range(12)]
        write_corpus(tmp_path / name, documents, name=name, token_file_bytes=100)
    corpora = [tmp_path / "first", tmp_path / "second"]
    output = tmp_path / "plan"
    run_plan(PlanOptions(corpora=corpora, output=output, pack_tokens=16, packs_per_step=2, pad_multiple=1))
    return tmp_path


def flip(corpus, document):
    """Change a byte of the document's tokens, and of no others."""
    opened = Corpus.open(corpus)
    tokens = np.ascontiguousarray(opened.document(document)).tobytes()
    path = corpus / f"tokens-{int(opened.documents['token_file'][document]):05d}.arrow"
    data = bytearray(path.read_bytes())
    data[data.index(tokens) + 1] ^= 1
    path.write_bytes(data)


def quarantine(path, capsys):
    code = main(["verify", str(path), "--quarantine", str(path.parent / "bad.txt"), "--json"])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    lines = (path.parent / "bad.txt").read_text().splitlines()
    return code, facts["quarantined"], [int(line) for line in lines if not line.startswith("#")]


def test_ids_of_a_plan_count_through_its_corpora(made, capsys):
    for corpus, document in (("first", 3), ("second", 0), ("second", 11)):
        flip(made / corpus, document)
    assert quarantine(made / "plan", capsys) == (1, 3, [3, 12, 23])
    assert quarantine(made / "second", capsys) == (1, 2, [0, 11])


def test_what_is_sound_leaves_an_empty_list(made, capsys):
    assert quarantine(made / "plan", capsys) == (0, 0, [])
    assert len(loaded(made / "plan", skip=made / "bad.txt")) > 0


def test_a_run_goes_on_without_the_damaged_documents(made, capsys):
    flip(made / "second", 5)
    with pytest.raises(CorruptDataError, match="document 5 of corpus 'second' is damaged"):
        loaded(made / "plan")
    quarantine(made / "plan", capsys)
    batches = loaded(made / "plan", skip=made / "bad.txt")
    seen = sorted(document for batch in batches for document in batch.info.documents)
    assert seen == [document for document in range(24) if document != 12 + 5]


def refused(path, tmp_path, monkeypatch, capsys):
    """Return what is said of a folder that must be refused before a byte of it is hashed."""
    monkeypatch.setattr("ringfeed.pipeline.verify.verify", None)
    assert main(["verify", str(path), "--quarantine", str(tmp_path / "x")]) == 2
    assert not (tmp_path / "x").exists()
    return capsys.readouterr().err


def test_shards_have_no_documents_of_their_own_to_quarantine(tmp_path, monkeypatch, capsys):
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "manifest.json").write_text('{"format": "ringfeed-shards"}')
    assert "for a corpus or a plan" in refused(tmp_path / "shards", tmp_path, monkeypatch, capsys)


def test_a_plan_of_lengths_alone_has_none_either(tmp_path, monkeypatch, capsys):
    np.save(tmp_path / "lengths.npy", np.full(9, 8))
    lengths, output = tmp_path / "lengths.npy", tmp_path / "plan"
    run_plan(PlanOptions(lengths=lengths, output=output, pack_tokens=16, packs_per_step=2, pad_multiple=1))
    assert "from lengths alone" in refused(tmp_path / "plan", tmp_path, monkeypatch, capsys)


def test_what_was_found_is_told_where_no_list_helps(made, capsys):
    flip(made / "first", 3)
    path = made / "first" / "documents.arrow"
    data = path.read_bytes()
    path.write_bytes(data[:700] + bytes([data[700] ^ 1]) + data[701:])
    code = main(["verify", str(made / "first"), "--quarantine", str(made / "bad.txt"), "--json"])
    facts = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, facts["quarantined"]) == (1, None)
    assert {finding["file"].rsplit("/", 1)[1][:6] for finding in facts["findings"]} == {"docume", "tokens"}
    assert not (made / "bad.txt").exists()


def test_each_token_file_is_hashed_once(made, monkeypatch):
    hashed = []
    monkeypatch.setattr(
        "ringfeed.pipeline.findings.check_file", lambda folder, entry: hashed.append(folder / entry.path)
    )
    main(["verify", str(made / "second"), "--quarantine", str(made / "bad.txt")])
    assert len(hashed) == len(set(hashed)) > 3
