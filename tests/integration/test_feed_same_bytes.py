"""L1 and State for the service's path: blocks built elsewhere give the batches that plan and files give.

Everything is real but the process border: the builder answers through ``LocalFetcher``.
"""

import pickle
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ringfeed.pipeline.corpus_writer import write_corpus
from ringfeed.pipeline.loader import Loader
from ringfeed.pipeline.local_fetcher import LocalFetcher
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.planner.options import PlanOptions
from ringfeed.pipeline.planner.run import run_plan
from ringfeed.pipeline.shard_writer import ShardTask, num_folders, shards_manifest, write_steps
from ringfeed.pipeline.skip import read_skip_list
from ringfeed.pipeline.staging import StagedFolder
from ringfeed.pipeline.store import SHARDS_FORMAT, FileStore
from ringfeed.sharding.layouts import make_layout
from ringfeed.workers.block_builder import BlockBuilder, PlanOpener

LAYOUTS = [
    ("te", {}),
    ("head_tail", {}),
    ("contiguous", {}),
    ("whole_document", {}),
    ("magi", {}),
    ("magi", {"uneven": True}),
    ("ptrr", {"block": 16}),
    ("identity", {}),
]
PACK_TOKENS = 128
PACKS_PER_STEP = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two corpora of different token widths, one with masks, and a skip list."""
    folder = tmp_path_factory.mktemp("run")
    rng, trained = np.random.default_rng(2), np.random.default_rng(3)
    for name, top, count in (("small", 300, 120), ("large", 90_000, 60)):
        documents = [rng.integers(0, top, n) for n in rng.integers(1, 200, count)]
        # Partly trained on in one of them.
        masks = [trained.random(len(d)) < 0.5 for d in documents] if name == "small" else None
        write_corpus(folder / name, documents, name=name, masks=masks, pad_id=5)
    (folder / "skip.txt").write_text("3\n77\n131\n")
    return folder


@pytest.fixture(scope="module")
def plans(folder):
    """Plans of the corpora by their options, each made once."""
    made: dict[Any, Path] = {}

    def get(**options):
        key = tuple(sorted(options.items()))
        if key not in made:
            made[key] = folder / f"plan-{len(made)}"
            fixed: dict[str, Any] = {
                "pack_tokens": PACK_TOKENS,
                "packs_per_step": PACKS_PER_STEP,
                "max_cp": 4,
                "window": 2,
            }
            corpora = [folder / "small", folder / "large"]
            run_plan(PlanOptions(output=made[key], corpora=corpora, **fixed, **options))
        return made[key]

    return get


def spec_of(plan, layout, cp_size):
    return open_spec(plan, OpenOptions(layout=layout, cp_size=cp_size), pad_id=5)


def builder_of(path, layout, cp_size, *, skip=None, block_bytes=4096):
    overlay = None if skip is None else read_skip_list(skip, num_documents=180)
    opener = PlanOpener(plan=path, spec=spec_of(Plan.open(path), layout, cp_size), overlay=overlay)
    # Through a pickle, as an actor gets it.
    return BlockBuilder(pickle.loads(pickle.dumps(opener)), block_bytes=block_bytes)  # noqa: S301


def shards_of(path, output, layout, cp_size):
    plan = Plan.open(path)
    with StagedFolder.open(output, format=SHARDS_FORMAT, made_from={"test": str(output)}) as staged:
        spec = spec_of(plan, layout, cp_size)
        task = ShardTask(plan=path, folder=staged.path, spec=spec, steps_per_folder=3)
        indices = range(num_folders(plan, steps_per_folder=3))
        entries = [entry for index in indices for entry in write_steps(task, index)]
        staged.publish(shards_manifest(plan, task, entries))
    return output


def load(source, *, cp=(0, 1), dp=(0, 1), **options):
    return Loader(source, dp_rank=dp[0], dp_size=dp[1], cp_rank=cp[0], cp_size=cp[1], **options)


def assert_same_batches(found, expected):
    count = 0
    for batch, other in zip(found, expected, strict=True):
        assert batch.info == other.info
        assert batch.tensors.keys() == other.tensors.keys()
        for name, tensor in other.tensors.items():
            assert batch.tensors[name].dtype == tensor.dtype
            assert batch.tensors[name].equal(tensor), name
        count += 1
    assert count


@pytest.mark.parametrize(("name", "options"), LAYOUTS)
def test_a_service_gives_the_bytes_of_plan_and_files(plans, tmp_path, name, options):
    layout, cp_size, plan = make_layout(name, **options), 2, plans(balance="best_fit")
    builder = builder_of(plan, layout, cp_size)
    shards = shards_of(plan, tmp_path / "shards", layout, cp_size)
    from_files = BlockBuilder(lambda: FileStore.open(shards), block_bytes=4096)
    for rank in range(cp_size):
        place = {"cp": (rank, cp_size), "dp": (1, 2)}
        expected = list(load(plan, layout=layout, **place))
        for source in (shards, LocalFetcher(builder), LocalFetcher(from_files)):
            with load(source, **place) as loader:
                assert_same_batches(loader, expected)
    assert builder.num_builds == from_files.num_builds > 3


@pytest.mark.parametrize(
    "planned",
    [
        {"balance": "in_order", "positions": "continue"},
        {"balance": "concat", "boundary_label": "ignore", "epochs": 2},
        {"balance": "best_fit", "pack_shape": "variable"},
    ],
)
@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_any_plan_dp_and_packs_per_chunk_give_the_same_bytes(plans, folder, planned, dp_size):
    layout, plan, skip = make_layout("te"), plans(**planned), folder / "skip.txt"
    builder = builder_of(plan, layout, 4, skip=skip)
    for dp_rank, packs_per_chunk in ((0, 1), (dp_size - 1, 2)):
        place = {"cp": (3, 4), "dp": (dp_rank, dp_size), "packs_per_chunk": packs_per_chunk}
        with load(LocalFetcher(builder), **place) as loader:
            assert_same_batches(loader, load(plan, layout=layout, skip=skip, **place))


@pytest.mark.parametrize(
    "columns", [["labels"], ["input_ids", "cu_seqlens"], ["position_ids", "padding_mask"]]
)
@pytest.mark.parametrize("packs_per_chunk", [1, 4])
def test_a_pipeline_stage_gets_its_columns_and_the_same_facts(plans, columns, packs_per_chunk):
    layout, plan = make_layout("te"), plans(balance="best_fit")
    place = {"cp": (1, 2), "dp": (0, 2), "columns": columns, "packs_per_chunk": packs_per_chunk}
    with load(LocalFetcher(builder_of(plan, layout, 2)), **place) as loader:
        assert_same_batches(loader, load(plan, layout=layout, **place))


def test_a_state_goes_on_from_any_source_to_any_other(plans, tmp_path):
    layout, plan = make_layout("contiguous"), plans(balance="best_fit")
    builder = builder_of(plan, layout, 2)
    shards = shards_of(plan, tmp_path / "shards", layout, 2)
    place = {"cp": (1, 2), "dp": (0, 2)}
    expected = list(load(plan, layout=layout, **place))
    sources = [LocalFetcher(builder), shards, plan, LocalFetcher(builder), plan, LocalFetcher(builder)]

    found: list[Any] = []
    state: dict[str, Any] | None = None
    for number, source in enumerate(sources):
        with load(source, layout=layout, **place) as loader:
            if state is not None:
                loader.load_state_dict(state)
                assert loader.state_dict() == state
            # An odd number of micro-batches: most borders lie inside a step.
            found += list(islice(loader, 7 if number < len(sources) - 1 else None))
            state = loader.state_dict()

    assert_same_batches(found, expected)


def test_a_seek_backwards_gives_the_same_again(plans):
    layout, plan = make_layout("te"), plans(balance="best_fit")
    with load(LocalFetcher(builder_of(plan, layout, 2)), cp=(0, 2)) as loader:
        first = list(islice(loader, 5))
        state = loader.state_dict()
        rest = list(loader)
        loader.load_state_dict(state)
        assert_same_batches(loader, rest)
        assert loader.state_dict()["step"] == loader.num_steps
    assert len(first) == 5


def test_dp_changes_at_borders_and_keeps_the_global_batches(plans):
    """dp 4 up to step 2, dp 2 up to step 5, dp 8 to the end: the packs of every step are the plan's."""
    layout, path = make_layout("te"), plans(balance="best_fit")
    builder, plan = builder_of(path, layout, 2), Plan.open(path)
    found: dict[int, list[int]] = {}
    state: dict[str, Any] | None = None
    for dp_size, last in ((4, 2), (2, 5), (8, plan.num_steps)):
        states = []
        for dp_rank in range(dp_size):
            with load(LocalFetcher(builder), cp=(0, 2), dp=(dp_rank, dp_size)) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                while (at := loader.state_dict()["step"]) < last:
                    for batch in islice(loader, loader.num_micro_batches):
                        found.setdefault(at, []).extend(batch.info.documents)
                states.append(loader.state_dict())
        state = states[0]
        assert all(other == state for other in states)

    for step in range(plan.num_steps):
        assert sorted(found[step]) == sorted(plan.step_packs(step).pieces.documents.tolist())


def test_inside_a_step_another_dp_is_refused(plans):
    layout, plan = make_layout("te"), plans(balance="best_fit")
    builder = builder_of(plan, layout, 2)
    with load(LocalFetcher(builder), cp=(0, 2), dp=(0, 2)) as loader:
        list(islice(loader, 6))
        state = loader.state_dict()

    with (
        load(LocalFetcher(builder), cp=(0, 2), dp=(0, 4)) as other,
        pytest.raises(ValueError, match=r"inside step 1 .* dp_size=2, this loader has dp_size=4"),
    ):
        other.load_state_dict(state)


def test_a_state_of_another_plan_or_beyond_the_end_is_refused(plans):
    layout = make_layout("te")
    builder = builder_of(plans(balance="best_fit"), layout, 2)
    with load(plans(balance="in_order", positions="continue"), layout=layout, cp=(0, 2)) as loader:
        list(islice(loader, 16))
        state = loader.state_dict()

    with load(LocalFetcher(builder), cp=(0, 2)) as other:
        with pytest.raises(ValueError, match="saved on another plan"):
            other.load_state_dict(state)
        with pytest.raises(ValueError, match=r"beyond the plan: it ends after \d+ steps"):
            other.load_state_dict({**other.state_dict(), "step": 10_000})


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"layout": "contiguous"}, "the service cuts with another layout"),
        ({"slot_budget": 256}, "slot_budget=256, but the service holds packs of 128 slots"),
        ({"skip": "skip.txt"}, "the service cuts with skip list none"),
        ({"corpus": "small"}, "corpus= has no use"),
        ({"cp": (0, 4)}, "--cp 4"),
        ({"tp_size": 3}, "tp_size=3"),
        ({"packs_per_chunk": 3}, "does not divide"),
    ],
)
def test_what_does_not_fit_the_service_is_refused_and_the_fetcher_closed(
    plans, folder, options, told, monkeypatch
):
    monkeypatch.chdir(folder)
    closed = []
    fetcher = LocalFetcher(builder_of(plans(balance="best_fit"), make_layout("te"), 2))
    monkeypatch.setattr(fetcher, "close", lambda: closed.append(True))

    with pytest.raises(ValueError, match=told):
        load(fetcher, **{"cp": (0, 2), **options})
    assert closed == [True]


def test_what_is_ahead_of_the_trainer_stays_within_its_budget(plans):
    layout, plan = make_layout("te"), plans(balance="best_fit")
    builder = builder_of(plan, layout, 1, block_bytes=2048)
    with load(LocalFetcher(builder), prefetch_bytes=20_000) as loader:
        source, largest = loader._source, 0
        for _ in loader:
            largest = max(largest, source.bytes_held)
        assert 2048 < largest <= 10_000
        assert loader._prefetch * loader._builder.batch_bytes(8) <= 10_000


def test_whole_steps_come_through_the_service_too(plans):
    layout, plan = make_layout("te"), plans(balance="best_fit")
    place = {"cp": (1, 2), "dp": (1, 2)}
    with load(LocalFetcher(builder_of(plan, layout, 2)), **place) as loader:
        assert_same_batches(loader.steps(), load(plan, layout=layout, **place).steps())


def test_the_plan_of_this_test_has_a_short_last_step(plans):
    plan = Plan.open(Path(plans(balance="best_fit")))
    assert plan.step_packs(plan.num_steps - 1).num_packs < PACKS_PER_STEP
