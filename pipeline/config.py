"""What a user may set, one model per command: the single source of the rules.

In:   flags (``cli.py``) and one section of a YAML file (``config_file.py``)
Out:  a frozen, checked model, or one line with field, value, rule and way out

Every field is both a flag (``pack_tokens`` is ``--pack-tokens``) and a key of its section. Flags win
over the file. Rules that need data (does this layout fit this plan?) live where the data is.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003  (pydantic needs it at run time)
from typing import Annotated, Any, ClassVar, Self

from pydantic import Field, PrivateAttr, model_validator

from ringfeed.pipeline.config_base import CommandConfig, Count, Flag, Natural, Text
from ringfeed.pipeline.ingest_options import IngestOptions
from ringfeed.pipeline.plan_config import ExtendConfig, FitCostConfig, PlanConfig, ReportConfig
from ringfeed.pipeline.sources.encoding import EncodingErrors

__all__ = [
    "SECTIONS",
    "CommandConfig",
    "ConvertConfig",
    "DemoConfig",
    "ExtendConfig",
    "FitCostConfig",
    "IngestConfig",
    "InspectConfig",
    "PlanConfig",
    "ReportConfig",
    "ServeConfig",
    "ShardConfig",
    "VerifyConfig",
    "ViewsConfig",
]


class IngestConfig(CommandConfig):
    """``ringfeed ingest``: text or token columns into a corpus."""

    arguments: ClassVar[dict[str, str]] = {"sources": "SRC...", "output": "-o CORPUS"}
    alternatives = (
        frozenset({"text_column", "tokens_column"}),
        frozenset({"mask_column", "labels_column"}),
    )

    sources: Annotated[tuple[Path, ...], Field(min_length=1)] = Field(
        description="files, or folders that are read recursively"
    )
    output: Path = Field(description="the corpus folder to make")
    tokenizer: Text = Field("bytes", description="'bytes', or a tokenizer.json of Hugging Face tokenizers")
    text_column: Text | None = Field(None, description="the column that holds the text")
    tokens_column: Text | None = Field(None, description="the column that holds lists of token ids")
    mask_column: Text | None = Field(None, description="the column with a flag per token: is it trained on?")
    labels_column: Text | None = Field(None, description="or: a label per token, -100 or the token itself")
    lengths_column: Text | None = Field(None, description="the sequence lengths of rows packed before")
    padded_lengths_column: Text | None = Field(None, description="beside it, what each one occupies")
    pad_id: Natural | None = Field(None, description="the pad token of a tokens column, 0 if not given")
    name: Text | None = Field(None, description="the corpus's name, by default its folder's")
    encoding_errors: EncodingErrors = Field(
        EncodingErrors.FAIL, description="what to do with text that is not UTF-8"
    )

    glob: Text | None = Field(None, description="names of files to read in folders, such as *.py")

    _options: IngestOptions = PrivateAttr()

    def to_options(self) -> IngestOptions:
        """Return what the ingest takes; it has the rules between fields."""
        return self._options

    @model_validator(mode="after")
    def _check(self) -> Self:
        self._options = IngestOptions(**dict(self))
        if self.tokens_column is not None and "tokenizer" in self.model_fields_set:
            raise ValueError(
                f"tokenizer={self.tokenizer!r} has nothing to do: tokens_column={self.tokens_column!r} "
                "holds token ids already; leave one of the two out"
            )
        return self


class ViewsConfig(CommandConfig):
    """What commands share that cut a plan into views."""

    plan: Path = Field(description="the plan folder")
    cp: Count = Field(description="context-parallel ranks that share a pack")
    layout: Text = Field(description="which rank holds which token")
    layout_options: dict[str, Any] = Field({}, description="options of the layout, such as threshold=512")
    tp: Count = Field(1, description="tensor-parallel ranks (sequence parallel) that share a view")
    unit: Count = Field(1, description="FP8 unit of the local length")
    slot_budget: Count | None = Field(None, description="slots of a pack, where the plan's are too few")
    skip: Path | None = Field(None, description="a text file of document ids to leave out")
    corpus: tuple[Path, ...] = Field((), description="corpus folders, where the plan's own paths moved")


class ShardConfig(ViewsConfig):
    """``ringfeed shard``: the views of all cp ranks, written ahead of training."""

    arguments: ClassVar[dict[str, str]] = {"plan": "PLAN", "output": "-o SHARDS"}

    output: Path = Field(description="the shards folder to make")
    workers: Count | None = Field(None, description="ranges of steps in work at once, by default one a CPU")


class ServeConfig(ViewsConfig):
    """``ringfeed serve``: views for trainer ranks, built when they ask."""

    arguments: ClassVar[dict[str, str]] = {"plan": "PLAN"}

    host: Text = Field("127.0.0.1", description="the address to listen on")
    port: Natural = Field(0, description="the directory's port, 0 for any that is free")
    public_host: Text | None = Field(None, description="what ranks call this machine, if not the host")
    token_file: Path | None = Field(None, description="a file with the token that ranks must bear")
    tls_cert: Path | None = Field(None, description="the servers' certificate")
    tls_key: Path | None = Field(None, description="the certificate's key")
    tls_client_ca: Path | None = Field(None, description="whose signature ranks' certificates must bear")
    open: Flag = Field(default=False, description="whether anyone who reaches the port may read")
    max_streams: Count | None = Field(None, description="ranks that one feeder serves at once")
    feeder_port: Natural = Field(0, description="the port of every feeder, 0 for any that is free")
    builders: Count | None = Field(None, description="builders in all, by default one a CPU")
    block_bytes: Count | None = Field(None, description="ids and labels that one rank gets in a block")
    node_bytes: Count | None = Field(None, description="memory for blocks on a node")
    metrics_port: Natural = Field(0, description="the metrics port of a Ray that is started here, 0 for any")
    name: Text | None = Field(None, description="the name of the service on its Ray")
    namespace: Text | None = Field(None, description="the namespace of Ray that the name is in")
    plan_from: Path | None = Field(None, description="a config file whose section plan is planned meanwhile")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("tls_cert and tls_key go together; give both --tls-cert and --tls-key")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ValueError("tls_client_ca is for encrypted servers; give --tls-cert and --tls-key, too")
        return self


class ConvertConfig(CommandConfig):
    """``ringfeed convert``: files of rows that were packed before, into the views of all cp ranks."""

    arguments: ClassVar[dict[str, str]] = {"sources": "SRC...", "output": "-o SHARDS"}

    sources: Annotated[tuple[Path, ...], Field(min_length=1)] = Field(
        description="files of rows, or folders that are read recursively"
    )
    output: Path = Field(description="the shards folder to make; corpus and plan go to SHARDS.rows")
    cp: Count = Field(description="context-parallel ranks that share a row")
    layout: Text = Field(description="which rank holds which token")
    layout_options: dict[str, Any] = Field({}, description="options of the layout, such as threshold=512")
    tp: Count = Field(1, description="tensor-parallel ranks (sequence parallel) that share a view")
    unit: Count = Field(1, description="FP8 unit of the local length")
    batch_rows: Count = Field(1, description="rows in a step: the rows of one global batch")
    pack_tokens: Count | None = Field(None, description="slots of every row, by default the longest row's")
    pad_id: Natural = Field(0, description="the token of padding")
    tokens_column: Text = Field("input_ids", description="the column of token ids")
    lengths_column: Text = Field("seq_lens", description="the column of sequence lengths")
    padded_lengths_column: Text | None = Field(
        None, description="the column of what each occupies, by default seq_lens_padded if there is one"
    )
    labels_column: Text | None = Field(
        None, description="the column of shifted labels, by default labels if there is one"
    )
    workers: Count | None = Field(None, description="ranges of steps in work at once, by default one a CPU")


class VerifyConfig(CommandConfig):
    """``ringfeed verify``: find every fault of a corpus, plan or shards folder."""

    arguments: ClassVar[dict[str, str]] = {"path": "PATH"}

    path: Path = Field(description="the corpus, plan or shards folder to check")
    workers: Count | None = Field(None, description="threads that read files, by default one a CPU")
    quarantine: Path | None = Field(None, description="a skip list to write, of documents that are damaged")


class InspectConfig(ReportConfig):
    """``ringfeed inspect``: what a folder holds, as text."""

    arguments: ClassVar[dict[str, str]] = {"path": "PATH"}

    path: Path = Field(description="the corpus, plan or shards folder to look into")
    step: Natural | None = Field(None, description="also show this step, pack by pack")


class DemoConfig(CommandConfig):
    """``ringfeed demo``: the whole line on the standard library's sources."""

    output: Path | None = Field(None, description="where to keep the files; by default they are deleted")
    steps: Count = Field(20, description="training steps of each of the two runs")
    workers: Count | None = Field(None, description="CPUs that the local Ray may use")


SECTIONS: dict[str, type[CommandConfig]] = {
    "ingest": IngestConfig,
    "plan": PlanConfig,
    "extend": ExtendConfig,
    "fit-cost": FitCostConfig,
    "shard": ShardConfig,
    "serve": ServeConfig,
    "convert": ConvertConfig,
    "verify": VerifyConfig,
    "inspect": InspectConfig,
    "demo": DemoConfig,
}
"""Sections of a config file, which are the commands."""
