"""What the commands of ``cli.py`` do, and what they say.

In:   a checked config (``config.py``)
Out:  an ``Outcome`` for ``console.py`` to print
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ringfeed.pipeline.console import DONE, FAILED, Outcome

if TYPE_CHECKING:
    from pathlib import Path

    from ringfeed.pipeline.config import (
        ExtendConfig,
        FitCostConfig,
        IngestConfig,
        InspectConfig,
        PlanConfig,
        ReportConfig,
        VerifyConfig,
    )
    from ringfeed.pipeline.executor import Executor
    from ringfeed.pipeline.findings import VerifyReport
    from ringfeed.pipeline.planner.cost import CostModel
    from ringfeed.pipeline.progress import Progress

__all__ = ["extend", "fit_cost", "ingest", "inspect", "plan", "verify"]


def ingest(config: IngestConfig, progress: Progress) -> Outcome:
    """Make a corpus."""
    from ringfeed.pipeline.ingest import run_ingest

    report = run_ingest(config.to_options(), progress=progress)
    text = (
        f"{report.output}: {report.documents:,} documents, {report.tokens:,} tokens "
        f"({report.supervised:,} of them trained on) from "
        f"{report.files:,} files ({report.skipped_empty:,} empty and {report.skipped_encoding:,} "
        "not UTF-8 were skipped)"
    )
    if report.already_finished:
        text += "; there already, nothing to do"
    return Outcome(text=text, facts={**asdict(report), "output": str(report.output)})


def plan(config: PlanConfig, progress: Progress) -> Outcome:
    """Make a plan."""
    from ringfeed.pipeline.planner.run import run_plan

    options = config.to_options()
    run_plan(options, progress=progress)
    return _planned(config.output, config, planned_by=options.cost_model)


def extend(config: ExtendConfig, progress: Progress) -> Outcome:
    """Make a plan longer."""
    from ringfeed.pipeline.planner.run import run_extension

    extension = config.to_extension()
    run_extension(extension, progress=progress)
    planned_by = extension.cost_model
    return _planned(config.output or config.plan, config, planned_by=planned_by)


def _planned(output: Path, config: ReportConfig, *, planned_by: CostModel | None) -> Outcome:
    """Say what plan there is now."""
    from ringfeed.pipeline.pack_lengths import PackShape
    from ringfeed.pipeline.plan import Plan
    from ringfeed.pipeline.plan_report import make_report
    from ringfeed.pipeline.planner.advice import padding_advice
    from ringfeed.pipeline.planner.report import PlanReport

    made = Plan.open(output)
    report = made.report
    facts: dict[str, Any] = {
        "output": str(output),
        "num_steps": made.num_steps,
        "num_packs": made.num_packs,
        "recipe_fingerprint": made.recipe_fingerprint,
    }
    at_most = "at most " if made.pack_lengths.shape is PackShape.VARIABLE else ""
    text = (
        f"{output}: {made.num_steps:,} steps, {made.num_packs:,} packs of {at_most}"
        f"{made.pack_tokens:,} slots, fill {report['fill']:.4f}; {report['empty']:,} documents empty, "
        f"{report['split']:,} split, {report['truncated']:,} truncated, {report['dropped']:,} dropped"
    )
    facts["advice"] = padding_advice(PlanReport(**report))
    if config.wants_report:
        more, measured = make_report(made, config, planned_by=planned_by)
        facts |= measured
        text += "\n" + more
    return Outcome(text=text, facts=facts)


def fit_cost(config: FitCostConfig, progress: Progress) -> Outcome:
    """Make a cost table."""
    from ringfeed.pipeline.planner.cost_fit import fit_cost as fit
    from ringfeed.pipeline.planner.cost_fit import read_samples
    from ringfeed.pipeline.planner.cost_table import write_table

    del progress
    samples = read_samples(config.samples)
    found = fit(samples, basis=config.basis, tolerance=config.tolerance)
    terms = ", ".join(f"{name} {value:.4g}" for name, value in found.coefficients.items())
    told = [
        f"{len(samples):,} packs; basis {config.basis}; ms for each of: {terms}",
        f"error of a pack: typically {found.typical_error:.2%}, at most {found.largest_error:.2%}",
    ]
    if found.left_out:
        told.append(f"not told apart by these packs, so left out: {', '.join(found.left_out)}")
    write_table(config.output, found.table, comments=told)
    furthest = found.worst(samples)
    facts = {
        "output": str(config.output),
        "cost_model": found.table.name,
        "samples": len(samples),
        "basis": str(config.basis),
        "longest": int(found.table.lengths[-1]),
        "coefficients": found.coefficients,
        "left_out": list(found.left_out),
        "typical_error": found.typical_error,
        "largest_error": found.largest_error,
        "worst": furthest,
    }
    worst = [
        f"  {sample['place']}: {sample['milliseconds']:g} ms, {sample['error']:+.2%}" for sample in furthest
    ]
    return Outcome(
        text="\n".join([f"{config.output}: {told[0]}", *told[1:], "furthest off:", *worst]), facts=facts
    )


def verify(config: VerifyConfig, progress: Progress) -> Outcome:
    """Check a folder; faults are an exit code, not an error."""
    from ringfeed.pipeline.environment import available_cpus
    from ringfeed.pipeline.executor import ThreadExecutor
    from ringfeed.pipeline.manifest import CorruptDataError
    from ringfeed.pipeline.quarantine import check_has_documents
    from ringfeed.pipeline.verify import verify as verify_folder

    if config.quarantine is not None:
        # A damaged manifest is a finding.
        with suppress(CorruptDataError):
            check_has_documents(config.path)
    executor = ThreadExecutor(config.workers or available_cpus())
    report = verify_folder(config.path, executor=executor, progress=progress)
    text, facts = _verify_text(report), report.to_json()
    exit_code = FAILED if report.findings else DONE
    if config.quarantine is not None:
        told, num_damaged = _quarantine(config, config.quarantine, report, executor, progress)
        exit_code = exit_code if num_damaged == 0 else FAILED
        text, facts = f"{text}\n{told}", {**facts, "quarantined": num_damaged}
    return Outcome(text=text, facts=facts, exit_code=exit_code)


def _quarantine(
    config: VerifyConfig, output: Path, report: VerifyReport, executor: Executor, progress: Progress
) -> tuple[str, int | None]:
    """Write the list of damaged documents; return what to say, and how many, None where there is no list."""
    from ringfeed.pipeline.quarantine import find_damaged_documents, write_quarantine

    try:
        damaged = find_damaged_documents(config.path, report.findings, executor=executor, progress=progress)
        write_quarantine(output, damaged, source=config.path)
    except (ValueError, OSError) as error:
        # What was found out so far took hours, perhaps.
        return f"{output}: no list of documents to leave out: {error}", None
    return f"{output}: {len(damaged):,} documents to leave out", len(damaged)


def inspect(config: InspectConfig, progress: Progress) -> Outcome:
    """Describe a folder."""
    from ringfeed.pipeline.inspect import describe
    from ringfeed.pipeline.plan import Plan
    from ringfeed.pipeline.plan_report import make_report

    del progress
    description = describe(config.path, step=config.step)
    text, facts = description.text, dict(description.facts)
    if config.wants_report:
        if facts["kind"] != "plan":
            raise ValueError(f"{config.path} is a {facts['kind']}; --report is for a plan")
        more, facts["report"] = make_report(Plan.open(config.path), config)
        text += "\nreport\n" + more
    return Outcome(text=text, facts=facts)


def _verify_text(report: VerifyReport) -> str:
    lines = [f"fault: {finding.problem}" for finding in report.findings]
    lines += [f"not checked: {reason}" for reason in report.unchecked]
    counted = ", ".join(f"{count:,} {what}" for what, count in report.counts.items())
    plural = "" if len(report.findings) == 1 else "s"
    verdict = f"{len(report.findings)} fault{plural}" if report.findings else "ok"
    return "\n".join([*lines, f"{report.path} ({report.kind}): {verdict}; checked {counted}"])
