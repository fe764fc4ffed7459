"""Flags and config files meet one set of rules; every refusal is one line that says what to do."""

import pytest

from ringfeed.pipeline.config import (
    SECTIONS,
    DemoConfig,
    ExtendConfig,
    IngestConfig,
    InspectConfig,
    PlanConfig,
    ShardConfig,
    VerifyConfig,
)
from ringfeed.pipeline.config_file import load_config, read_sections

PLAN = {"corpora": ["corpus"], "output": "plan", "pack_tokens": 8192, "packs_per_step": 8, "max_cp": 2}
SHARD = {"plan": "plan", "output": "shards", "cp": 2, "layout": "te"}


def plan_config(**changes):
    return load_config(PlanConfig, flags={**PLAN, **changes}, file=None)


@pytest.fixture
def config_file(tmp_path):
    def write(text):
        path = tmp_path / "run.yaml"
        path.write_text(text)
        return path

    return write


def test_defaults_are_those_of_the_documentation():
    config = plan_config()
    assert (config.window, config.epochs, config.seed, config.slate_size) == (16, 1, None, None)
    assert (config.balance, config.overflow) == ("work", "split")
    assert (config.positions, config.boundary_label) == ("restart", "next")


def test_a_flag_wins_over_the_file(config_file):
    file = config_file("plan: {corpora: [c], output: p, pack_tokens: 64, packs_per_step: 4, max_cp: 2}")
    config = load_config(PlanConfig, flags={"pack_tokens": 128, "epochs": None}, file=file)
    assert (config.pack_tokens, config.packs_per_step, config.epochs) == (128, 4, 1)


def test_a_flag_replaces_the_other_way_to_say_the_same(config_file):
    file = config_file("plan: {corpora: [c], output: p, pack_tokens: 64, packs_per_step: 4, max_cp: 2}")
    config = load_config(PlanConfig, flags={"pad_multiple": 8}, file=file)
    assert (config.max_cp, config.pad_multiple) == (None, 8)


def test_a_section_of_another_command_is_not_read(config_file):
    file = config_file("plan: {nonsense: 1}\nverify: {path: corpus}")
    assert load_config(VerifyConfig, flags={}, file=file).path.name == "corpus"


def test_an_empty_file_or_section_gives_nothing(config_file):
    assert read_sections(config_file("")) == {}
    assert read_sections(config_file("demo:\n")) == {"demo": {}}


def test_an_unknown_key_is_refused_with_its_value_and_the_key_that_was_meant(config_file):
    file = config_file("shard: {plan: p, output: s, cp: 2, layout: te, slot_budge: 8192}")
    with pytest.raises(
        ValueError, match=r"section shard: slot_budge=8192: no such key; did you mean 'slot_budget'\?"
    ):
        load_config(ShardConfig, flags={}, file=file)


def test_an_unknown_key_like_nothing_lists_what_there_is(config_file):
    with pytest.raises(
        ValueError, match=r"zzz=1: no such key; known: report, report_dp, report_cost_model, plot, path, step"
    ):
        load_config(InspectConfig, flags={}, file=config_file("inspect: {path: p, zzz: 1}"))


def test_an_unknown_section_is_refused(config_file):
    with pytest.raises(ValueError, match=r"section plans=.* is unknown; did you mean 'plan'\?"):
        load_config(PlanConfig, flags=PLAN, file=config_file("plans: {max_cp: 2}"))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        pytest.param("plan: {a: 1, a: 2}", "key 'a' is there twice", id="doubled key"),
        pytest.param("plan: [", "is no YAML", id="broken"),
        pytest.param("- 1", "must hold sections", id="list"),
        pytest.param("plan: 7", "section plan=7 must be made of `key: value` lines", id="number as section"),
        pytest.param("plan: {1: 2}", "must be made of `key: value` lines", id="number as key"),
        pytest.param("plan: !!python/object:os.system {}", "is no YAML", id="python object"),
    ],
)
def test_a_bad_file_is_one_line(config_file, text, told):
    with pytest.raises(ValueError, match=told) as caught:
        read_sections(config_file(text))
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config='.*absent.yaml' cannot be read"):
        read_sections(tmp_path / "absent.yaml")


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"pack_tokens": 1002}, r"pack_tokens=1002 is not a multiple of 4 .*nearest valid: \[1000, 1004\]"),
        ({"pack_tokens": 0}, r"pack_tokens=0: must be at least 1; pack_tokens is token slots"),
        ({"pack_tokens": "8192"}, r"pack_tokens='8192': must be an integer"),
        ({"pack_tokens": True}, r"pack_tokens=True: must be an integer"),
        ({"slate_size": 3}, r"slate_size=3 does not divide packs_per_step=8; valid: \[1, 2, 4, 8\]"),
        ({"pad_multiple": 4}, r"max_cp.*pad_multiple"),
        ({"max_cp": None}, r"max_cp.*pad_multiple"),
        ({"lengths": "lengths.npy"}, r"corpora .*lengths"),
        ({"corpora": None}, r"corpora .*lengths"),
        ({"balance": "bestfit"}, r"balance='bestfit': must be one of work, .*did you mean 'best_fit'\?"),
        ({"overflow": "spill"}, r"overflow='spill': must be one of split, truncate, drop, error"),
        ({"seed": -1}, r"seed=-1: must be at least 0"),
        ({"report": "yes"}, r"report='yes': must be true or false"),
    ],
)
def test_a_bad_value_is_told_with_field_value_rule_and_way_out(changes, told):
    with pytest.raises(ValueError, match=told) as caught:
        plan_config(**changes)
    assert "\n" not in str(caught.value)


def test_all_faults_are_told_at_once():
    with pytest.raises(ValueError, match=r"pack_tokens=0.* \| epochs=0"):
        plan_config(pack_tokens=0, epochs=0)


def test_what_is_missing_is_told_as_it_is_typed():
    with pytest.raises(
        ValueError, match=r"plan is not given; pass PLAN .*output is not given; pass -o SHARDS"
    ):
        load_config(ShardConfig, flags={"cp": 2, "layout": "te"}, file=None)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"text_column": "a", "tokens_column": "b"}, "exclude each other"),
        ({"pad_id": 3}, "pad_id=3 .*tokens_column"),
        ({"encoding_errors": "ignore"}, "encoding_errors='ignore': must be one of fail, skip, bytes"),
    ],
)
def test_ingest_refuses_what_makes_no_sense(flags, told):
    with pytest.raises(ValueError, match=told):
        load_config(IngestConfig, flags={"sources": ["a"], "output": "b", **flags}, file=None)


def test_models_are_frozen_and_cover_every_command():
    base = {"ingest", "plan", "extend", "fit-cost", "verify", "inspect"}
    assert set(SECTIONS) == base | {"shard", "serve", "convert", "demo"}
    with pytest.raises(ValueError, match="frozen"):
        DemoConfig(output=None, steps=20, workers=None).steps = 3


def test_a_file_that_an_option_names_is_read_once(tmp_path):
    mixture = tmp_path / "mixture.yaml"
    mixture.write_text("sources: {web: 1, code: 3}")
    flags = {"plan": "plan", "mixture": str(mixture)}
    config, extension = plan_config(mixture=str(mixture)), load_config(ExtendConfig, flags=flags, file=None)
    mixture.write_text("sources: {web: 2, code: 1}")

    options = config.to_options().mixture
    assert options is not None
    assert [source.weight for source in options.sources] == [1, 3]
    assert extension.to_extension().mixture == options
