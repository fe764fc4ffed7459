"""Make a corpus from files of text or tokens.

In:   ``IngestOptions``: sources, tokenizer, output
Out:  a corpus folder (``pipeline/corpus.py``), and an ``IngestReport``

    list inputs -> cut parts -> read and tokenise each (executor) -> append in order -> publish

Every arrow is deterministic, so a run that was killed and started again ends with the same bytes.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from ringfeed.pipeline.corpus import CORPUS_FORMAT, INPUTS_FILE
from ringfeed.pipeline.corpus_writer import publish_corpus, write_inputs
from ringfeed.pipeline.document_writer import DocumentWriter
from ringfeed.pipeline.executor import Executor, SerialExecutor
from ringfeed.pipeline.ingest_options import IngestOptions, IngestReport
from ringfeed.pipeline.manifest import Manifest, canonical_json
from ringfeed.pipeline.progress import Progress
from ringfeed.pipeline.sources.columns import has_narrow_tokens
from ringfeed.pipeline.sources.encoding import EncodingErrors
from ringfeed.pipeline.sources.inputs import InputError, InputFile, SourceKind, list_inputs
from ringfeed.pipeline.sources.parts import Part
from ringfeed.pipeline.sources.read_part import PartReader, column_type, cut_parts
from ringfeed.pipeline.sources.rows import ColumnChoice
from ringfeed.pipeline.staging import StagedFolder
from ringfeed.pipeline.tokenizer import Tokenizer, make_tokenizer

__all__ = ["IngestOptions", "IngestReport", "run_ingest"]

_UINT16_VOCABULARY = 1 << 16


@dataclass(frozen=True, kw_only=True, slots=True)
class _Recipe:
    """All that decides the tokens, whatever the input."""

    column: ColumnChoice
    tokenizer: Tokenizer | None
    pad_id: int
    token_dtype: str
    encoding_errors: EncodingErrors

    def facts(self) -> dict[str, Any]:
        return {
            "tokenizer": {"kind": "tokens"} if self.tokenizer is None else self.tokenizer.facts(),
            "pad_id": self.pad_id,
            "token_dtype": self.token_dtype,
            "encoding_errors": str(self.encoding_errors),
        }


def run_ingest(
    options: IngestOptions, *, progress: Progress, executor: Executor | None = None
) -> IngestReport:
    """Ingest, or go on where a stopped run with the same options was, or find it done.

    Args:
        options: what to ingest.
        progress: told how far it is.
        executor: where parts are read and tokenised; here, one after the other, by default. The
            result is the same.

    Raises:
        ValueError: if the options or the input are wrong, or the output is of another request.
        MissingDependencyError: if the tokenizer file needs the extra ``hf``.
        OSError: if the disk is full; run it again when there is room.
    """
    started = time.monotonic()
    inputs = list_inputs(options.sources, glob=options.glob)
    _refuse_output_in_source(options)
    recipe = _make_recipe(options, inputs)
    request = _request(options, recipe, inputs)
    with StagedFolder.open(options.output, format=CORPUS_FORMAT, made_from=request) as staged:
        manifest = staged.finished
        if manifest is not None:
            progress.log(f"{options.output} is complete already; nothing to do")
        else:
            try:
                manifest = _ingest(staged, options, recipe, inputs, progress, executor or SerialExecutor())
            except InputError:
                # The same request fails the same way again, and a mended input is another request.
                staged.discard()
                raise
        return _report(options, manifest, staged, time.monotonic() - started)


def _ingest(
    staged: StagedFolder,
    options: IngestOptions,
    recipe: _Recipe,
    inputs: Sequence[InputFile],
    progress: Progress,
    executor: Executor,
) -> Manifest:
    if not (staged.path / INPUTS_FILE).exists():
        write_inputs(
            staged.path / INPUTS_FILE,
            sources=[file.source for file in inputs],
            names=[file.name for file in inputs],
            sizes=[file.bytes for file in inputs],
        )
    writer = DocumentWriter(
        staged, token_dtype=recipe.token_dtype, token_file_bytes=_token_file_size(options, inputs)
    )
    if staged.resumed:
        progress.log(f"{staged.path}: going on after {writer.state.num_documents:,} documents")
    parts = list(cut_parts(inputs, part_bytes=options.part_bytes))
    _append_all(writer, parts[writer.state.part :], recipe, progress, executor)
    if writer.num_documents == 0:
        raise InputError(
            f"{', '.join(map(str, options.sources))}: no document with a token in {len(inputs)} files "
            f"({writer.state.skipped_empty} empty, {writer.state.skipped_encoding} not UTF-8)"
        )
    return publish_corpus(
        staged,
        writer,
        shaped_by=recipe.facts(),
        facts={"name": options.corpus_name, **recipe.facts()},
    )


def _append_all(
    writer: DocumentWriter,
    parts: Sequence[Part],
    recipe: _Recipe,
    progress: Progress,
    executor: Executor,
) -> None:
    reader = PartReader(
        column=recipe.column,
        tokenizer=recipe.tokenizer,
        token_dtype=recipe.token_dtype,
        encoding_errors=recipe.encoding_errors,
    )
    progress.begin("ingest", total=sum(part.bytes for part in parts), unit="bytes")
    try:
        for part, batch in zip(parts, executor.map(reader, parts), strict=True):
            writer.append(batch)
            progress.advance(part.bytes)
    finally:
        progress.end()


def _make_recipe(options: IngestOptions, inputs: Sequence[InputFile]) -> _Recipe:
    column = options.column
    kinds = [column_type(file, column) for file in inputs]
    if column.is_tokens:
        for file in inputs:
            if file.kind is SourceKind.TEXT:
                raise InputError(
                    f"{file.path} is text, but tokens_column={column.name!r} asks for tokens; "
                    "ingest text into a corpus of its own"
                )
        is_narrow = all(kind is not None and has_narrow_tokens(kind) for kind in kinds)
        tokenizer, pad_id = None, options.pad_id or 0
    else:
        tokenizer = make_tokenizer(options.tokenizer)
        if options.encoding_errors is EncodingErrors.BYTES and options.tokenizer != "bytes":
            raise ValueError(
                f"encoding_errors=bytes needs tokenizer=bytes, not {options.tokenizer!r}; use fail or skip"
            )
        is_narrow, pad_id = tokenizer.vocab_size <= _UINT16_VOCABULARY, tokenizer.pad_id
    return _Recipe(
        column=column,
        tokenizer=tokenizer,
        pad_id=pad_id,
        token_dtype="uint16" if is_narrow else "int32",
        encoding_errors=options.encoding_errors,
    )


def _request(options: IngestOptions, recipe: _Recipe, inputs: Sequence[InputFile]) -> dict[str, Any]:
    """Return all that decides the output: a rerun must have the same."""
    sources = []
    for number, source in enumerate(options.sources):
        files = [file for file in inputs if file.source == number]
        listing = [[file.name, file.bytes, file.mtime_ns] for file in files]
        sources.append(
            {
                "name": Path(os.path.realpath(source)).name,
                "num_files": len(files),
                "bytes": sum(file.bytes for file in files),
                "names_sizes_times": xxhash.xxh3_64_hexdigest(canonical_json(listing).encode()),
            }
        )
    return {
        "name": options.corpus_name,
        "sources": sources,
        "column": asdict(recipe.column),
        "glob": options.glob,
        "token_file_bytes": _token_file_size(options, inputs),
        "part_bytes": options.part_bytes,
        **recipe.facts(),
    }


def _token_file_size(options: IngestOptions, inputs: Sequence[InputFile]) -> int:
    return options.token_file_size(sum(file.bytes for file in inputs))


def _refuse_output_in_source(options: IngestOptions) -> None:
    output = Path(os.path.realpath(options.output))
    for source in options.sources:
        if Path(os.path.realpath(source)) in [output, *output.parents]:
            raise ValueError(
                f"output={options.output} lies in the source {source}, so a rerun would read it; "
                "choose one outside"
            )


def _report(options: IngestOptions, manifest: Manifest, staged: StagedFolder, seconds: float) -> IngestReport:
    facts = manifest.facts
    return IngestReport(
        output=options.output,
        name=facts["name"],
        documents=facts["num_documents"],
        tokens=facts["num_tokens"],
        supervised=facts["num_supervised"],
        skipped_empty=facts["skipped_empty"],
        skipped_encoding=facts["skipped_encoding"],
        files=facts["num_inputs"],
        seconds=seconds,
        fingerprint=manifest.fingerprint,
        resumed=staged.resumed,
        already_finished=staged.finished is not None,
    )
