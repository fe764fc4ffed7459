"""An absent package is named with its extra; a broken one is not called absent."""

import pytest

from ringfeed.sharding.optional import MissingDependencyError, load_optional


def test_an_absent_package_is_named_with_its_extra():
    with pytest.raises(MissingDependencyError, match=r"TE attention needs 'no_such_pkg'.*ringfeed\[te\]"):
        load_optional("no_such_pkg.part", extra="te", needed_for="TE attention")


def test_a_broken_package_is_not_reported_as_absent(tmp_path, monkeypatch):
    (tmp_path / "broken_pkg.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency") as caught:
        load_optional("broken_pkg", extra="te", needed_for="TE attention")
    assert not isinstance(caught.value, MissingDependencyError)


def test_a_present_package_is_returned():
    assert load_optional("json", extra="x", needed_for="x").loads("1") == 1
