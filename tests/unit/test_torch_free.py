"""Builders, the planner and the command line work without torch and Ray, which take seconds to import."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# What hands tensors to a trainer, or takes them from one. All else does without torch.
BRING_TORCH = {
    "ringfeed.pipeline.batch_builder",
    "ringfeed.pipeline.device",
    "ringfeed.pipeline.digest_check",
    "ringfeed.pipeline.loader",
    "ringfeed.pipeline.loader_node",
    "ringfeed.pipeline.node_group",
    "ringfeed.pipeline.service_check",
    "ringfeed.pipeline.step_batch",
    "ringfeed.sharding.automodel",
    "ringfeed.sharding.automodel_batches",
    "ringfeed.sharding.automodel_indices",
    "ringfeed.sharding.automodel_magi",
    "ringfeed.sharding.automodel_model",
    "ringfeed.sharding.automodel_resolve",
    "ringfeed.sharding.automodel_ring",
    "ringfeed.sharding.automodel_sharder",
    "ringfeed.sharding.automodel_te",
    "ringfeed.sharding.automodel_thd",
}
IMPORT_ALL = """
import importlib, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
    if heavy := {"torch", "ray"} & set(sys.modules):
        sys.exit(f"importing {name} imports {heavy}")
"""
RUN_COMMAND = """
import sys
from ringfeed.workers.cli import main
code = main(sys.argv[1:])
if heavy := {"torch", "ray"} & set(sys.modules):
    sys.exit(f"ringfeed {sys.argv[1:]} imports {heavy}")
sys.exit(code)
"""
BUILD_VIEW = """
import sys
from ringfeed.pipeline.opening import OpenOptions, open_spec
from ringfeed.pipeline.plan import Plan
from ringfeed.pipeline.plan_source import PlanSource
from ringfeed.sharding import make_layout
plan = Plan.open(sys.argv[1])
corpora = plan.open_corpora()
spec = open_spec(plan, OpenOptions(layout=make_layout("te"), cp_size=2), pad_id=corpora.pad_id)
view = PlanSource(plan, corpora, spec=spec).pack_view(0, 0, cp_rank=1).view
assert len(view.input_ids) == spec.pack_slots // 2
if heavy := {"torch", "ray"} & set(sys.modules):
    sys.exit(f"building a view imports {heavy}")
"""


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in an interpreter of its own, which has imported nothing yet."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=300
    )


def builder_modules() -> list[str]:
    files = [*(ROOT / "sharding").glob("*.py"), *(ROOT / "pipeline").rglob("*.py")]
    names = {".".join(["ringfeed", *file.relative_to(ROOT).with_suffix("").parts]) for file in files}
    return sorted(name.removesuffix(".__init__") for name in names - BRING_TORCH)


def test_no_builder_module_imports_torch_or_ray():
    result = run(IMPORT_ALL, *builder_modules())

    assert result.returncode == 0, result.stderr


def test_the_exceptions_exist():
    for name in BRING_TORCH:
        assert ROOT.joinpath(*name.split(".")[1:]).with_suffix(".py").exists(), name


@pytest.mark.parametrize(
    "arguments", [["--help"], ["plan", "--help"], ["shard", "--help"], ["demo", "--help"]]
)
def test_help_imports_neither(arguments):
    result = run(RUN_COMMAND, *arguments)

    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout


def test_ingest_plan_and_views_are_made_without_either(tmp_path):
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("one document")
    corpus, plan = str(tmp_path / "corpus"), str(tmp_path / "plan")
    sizes = ["--pack-tokens", "64", "--packs-per-step", "1", "--max-cp", "2", "--balance", "best_fit"]

    for result in (
        run(RUN_COMMAND, "ingest", str(tmp_path / "texts"), "-o", corpus),
        run(RUN_COMMAND, "plan", corpus, "-o", plan, *sizes),
        run(BUILD_VIEW, plan),
    ):
        assert result.returncode == 0, result.stderr
