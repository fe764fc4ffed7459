"""Bytes, and files of the tokenizers library."""

import pickle

import numpy as np
import pytest
import tokenizers

from ringfeed.pipeline.tokenizer import ByteTokenizer, HfTokenizer, make_tokenizer


def encode(tokenizer, texts):
    data = [text.encode() if isinstance(text, str) else text for text in texts]
    offsets = np.cumsum([0, *map(len, data)])
    tokens, lengths = tokenizer.encode(np.frombuffer(b"".join(data), dtype=np.uint8), offsets)
    return [part.tolist() for part in np.split(tokens, np.cumsum(lengths)[:-1])]


@pytest.fixture(scope="module")
def word_file(tmp_path_factory):
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(
            {"[UNK]": 0, "one": 1, "two": 2, "[BOS]": 3, "[PAD]": 4}, **{"unk_token": "[UNK]"}
        )
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[BOS] $A", special_tokens=[("[BOS]", 3)]
    )
    tokenizer.enable_truncation(max_length=4)
    tokenizer.enable_padding(length=4, pad_id=4)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def test_a_document_is_bos_its_bytes_eos():
    tokens = encode(ByteTokenizer(), ["hé", "x", b"\xff\x00"])
    assert tokens == [[256, 104, 195, 169, 257], [256, 120, 257], [256, 255, 0, 257]]


def test_byte_tokens_fit_uint16_and_ids_are_the_documented_ones():
    tokenizer = ByteTokenizer()
    tokens, _ = tokenizer.encode(np.arange(256, dtype=np.uint8), np.array([0, 256]))
    assert tokens.dtype == np.uint16
    assert tokens[1:-1].tolist() == list(range(256))
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (
        256,
        257,
        258,
        259,
    )


def test_a_tokenizer_file_gives_what_the_library_gives_untruncated_and_unpadded(word_file):
    tokenizer = make_tokenizer(str(word_file))
    assert encode(tokenizer, ["one two one two one two", "two three"]) == [[3, 1, 2, 1, 2, 1, 2], [3, 2, 0]]
    assert (tokenizer.vocab_size, tokenizer.pad_id) == (5, 4)


def test_facts_tell_tokenizer_files_apart_and_not_where_they_lie(word_file, tmp_path):
    copy = tmp_path / "other_name.json"
    copy.write_bytes(word_file.read_bytes())
    assert HfTokenizer.open(copy).facts() == HfTokenizer.open(word_file).facts()
    copy.write_text(word_file.read_text().replace('"two"', '"zwei"'))
    assert HfTokenizer.open(copy).facts() != HfTokenizer.open(word_file).facts()


def test_tokenizers_travel_to_other_processes(word_file):
    for tokenizer in (ByteTokenizer(), HfTokenizer.open(word_file)):
        again = pickle.loads(pickle.dumps(tokenizer))  # noqa: S301
        assert encode(again, ["one two"]) == encode(tokenizer, ["one two"])


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tokenizer='llama' is neither 'bytes' nor a file"):
        make_tokenizer("llama")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match=r"x\.json is no tokenizer file"):
        make_tokenizer(str(tmp_path / "x.json"))
