"""Where a token comes from, and that no message repeats it."""

import pytest

from ringfeed.pipeline.feed_token import check_token, find_token

TOKEN, OTHER = "a-token-of-some-length", "another-token-of-some"


def test_what_is_passed_wins_over_the_environment(monkeypatch, tmp_path):
    (tmp_path / "token").write_text(f"{OTHER}\n")
    assert find_token() is None
    monkeypatch.setenv("RINGFEED_TOKEN_FILE", str(tmp_path / "token"))
    assert find_token() == OTHER
    monkeypatch.setenv("RINGFEED_TOKEN", TOKEN)
    assert find_token() == TOKEN
    assert find_token(file=tmp_path / "token") == OTHER
    assert find_token("passed-token") == "passed-token"


@pytest.mark.parametrize(
    "text", ["short", "with a space in it", "line\nbreak-token", "ümlaut-token", "x" * 1025]
)
def test_what_is_no_token_is_refused_without_repeating_it(text):
    with pytest.raises(ValueError, match="8 to 1,024 visible ASCII") as told:
        check_token(text, "token")
    assert text not in str(told.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"token file: .*nowhere.* cannot be read"):
        find_token(file=tmp_path / "nowhere")
    with pytest.raises(ValueError, match="give one of them"):
        find_token(TOKEN, file=tmp_path / "nowhere")
