"""Find every fault of a corpus, a plan or shards, and name the file.

In:   a finished folder
Out:  ``VerifyReport``; no fault raises

First every byte is hashed against the manifest. Where that holds, what the bytes say is checked: fingerprints
against what the folder was made from, exactly once (L3), tiling (L6) and equality with a fresh build (L1).
"""

from __future__ import annotations

from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np

from ringfeed.pipeline.corpus import CORPUS_FORMAT, DOCUMENTS_FILE, Corpus
from ringfeed.pipeline.executor import Executor, SerialExecutor
from ringfeed.pipeline.findings import (
    Finding,
    VerifyReport,
    check_all_files,
    folder_format,
    named,
    open_manifest,
)
from ringfeed.pipeline.manifest import MANIFEST_NAME, CorruptDataError, Manifest
from ringfeed.pipeline.plan import PLAN_FORMAT, Plan
from ringfeed.pipeline.progress import Progress, SilentProgress
from ringfeed.pipeline.shard_files import folder_name
from ringfeed.pipeline.store import SHARDS_FORMAT
from ringfeed.pipeline.verify_coverage import check_coverage
from ringfeed.pipeline.verify_masks import check_supervised, mask_faults
from ringfeed.pipeline.verify_plan import check_blocks, open_planned_documents
from ringfeed.pipeline.verify_rows import check_rows_kept
from ringfeed.pipeline.verify_shards import check_folder, open_sharded_plan

__all__ = ["verify"]

_KINDS = {CORPUS_FORMAT: "corpus", PLAN_FORMAT: "plan", SHARDS_FORMAT: "shards"}


def verify(path: Path, *, executor: Executor | None = None, progress: Progress | None = None) -> VerifyReport:
    """Check the folder at ``path``.

    Args:
        path: a corpus, plan or shards folder.
        executor: where files are hashed and folders of steps compared; here, in order, by default.
        progress: told how far it is.

    Raises:
        ValueError: if there is no such folder, it is half-written, or of a newer ringfeed.
    """
    try:
        kind = _KINDS.get(folder_format(path), "folder")
        manifest = open_manifest(path)
    except CorruptDataError as error:
        finding = Finding(file=str(path / MANIFEST_NAME), problem=str(error))
        return VerifyReport(path=path, kind="folder", findings=(finding,))
    executor, progress = executor or SerialExecutor(), progress or SilentProgress()
    findings = check_all_files(path, manifest.files, executor=executor, progress=progress)
    counts = {"files": len(manifest.files), "bytes": sum(entry.bytes for entry in manifest.files)}
    check = {"corpus": _verify_corpus, "plan": _verify_plan, "shards": _verify_shards}[kind]
    deeper, more_counts, unchecked = check(path, manifest, findings, executor, progress)
    return VerifyReport(
        path=path,
        kind=kind,
        findings=(*findings, *deeper),
        counts={**counts, **more_counts},
        unchecked=tuple(unchecked),
    )


_Checked = tuple[list[Finding], dict[str, int], list[str]]
"""Further findings, what was counted, what could not be checked."""


def _verify_corpus(
    path: Path, manifest: Manifest, damaged: list[Finding], executor: Executor, progress: Progress
) -> _Checked:
    del executor, progress
    if damaged:
        return [], {}, ["documents, since files are damaged"]
    findings: list[Finding] = []
    counts: dict[str, int] = {}
    file = path / DOCUMENTS_FILE
    with named(file, findings), closing(Corpus.open(path, check="sizes")) as corpus:
        counts = {"documents": corpus.num_documents, "tokens": int(corpus.lengths.sum())}
        problems = _table_faults(corpus, manifest)
        findings += [Finding(file=str(file), problem=f"{file}: {problem}") for problem in problems]
        corpus.check_pages()
    return findings, counts, []


def _table_faults(corpus: Corpus, manifest: Manifest) -> list[str]:
    """Return where the table of documents does not say what the token files hold."""
    files, starts, lengths = corpus.locate(np.arange(corpus.num_documents))
    faults = []
    order = np.lexsort((starts, files))
    for number in range(corpus.num_token_files):
        own = order[files[order] == number]
        ends = np.cumsum(lengths[own])
        if not np.array_equal(starts[own], ends - lengths[own]):
            faults.append(f"documents do not lie end to end in token file {number}")
        elif int(ends[-1] if len(ends) else 0) != len(corpus.token_view(number)):
            faults.append(f"documents do not cover token file {number}")
    counted = {
        "num_documents": corpus.num_documents,
        "num_tokens": int(lengths.sum()),
        "num_supervised": int(corpus.supervised.sum()),
    }
    for name, found in counted.items():
        if manifest.facts[name] != found:
            faults.append(f"{name} is {found}, the manifest says {manifest.facts[name]}")
    return faults + mask_faults(corpus)


def _verify_plan(
    path: Path, manifest: Manifest, damaged: list[Finding], executor: Executor, progress: Progress
) -> _Checked:
    del manifest, executor
    plan = Plan.open(path)
    documents, findings, unchecked = open_planned_documents(plan)
    if damaged:
        return findings, {}, [*unchecked, "steps, since files are damaged"]
    faults, num_unreadable = check_blocks(plan, progress=progress)
    findings += faults
    counts = {"steps": plan.num_steps, "packs": plan.num_packs}
    if num_unreadable:
        unchecked = [*unchecked, f"documents, since {num_unreadable} blocks cannot be read"]
    elif documents is not None:
        with named(path, findings):
            findings += check_coverage(plan, documents, progress=progress)
            findings += check_rows_kept(plan, documents)
            findings += check_supervised(plan, documents, progress=progress)
        counts["documents"] = documents.num_documents
    return findings, counts, unchecked


def _verify_shards(
    path: Path, manifest: Manifest, damaged: list[Finding], executor: Executor, progress: Progress
) -> _Checked:
    check, findings, unchecked = open_sharded_plan(path, manifest)
    num_steps, per_folder = int(manifest.facts["num_steps"]), int(manifest.facts["steps_per_folder"])
    indices = range(-(-num_steps // per_folder))
    bad = {str(Path(finding.file).parent) for finding in damaged}
    sound = [index for index in indices if str(path / folder_name(index)) not in bad]
    if len(sound) < len(indices):
        unchecked = [*unchecked, f"{len(indices) - len(sound)} folders of steps, since files are damaged"]
    progress.begin("comparing views", total=len(sound), unit="folders")
    for faults in executor.map(partial(check_folder, check), sound):
        findings += faults
        progress.advance(1)
    progress.end()
    return findings, {"steps": num_steps, "folders": len(sound)}, unchecked
