"""A plan: which pieces of which documents form which pack of which step.

In:   a plan folder, written by ``pipeline/planner/``
Out:  ``StepPacks`` or an Arrow table per step; recipe, chain and sizes for whoever lays packs out

A plan holds no token, no layout and no rank. Opening reads the manifest alone; a step reads its block,
and the last two blocks stay in memory.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pyarrow as pa

from ringfeed.pipeline.manifest import (
    CorruptDataError,
    Manifest,
    describe_difference,
    read_manifest,
    was_replaced,
)
from ringfeed.pipeline.pack_lengths import LengthBuckets, PackLengths, PackShape
from ringfeed.pipeline.plan_blocks import (
    FOOTPRINT_MULTIPLES,
    Block,
    FootprintScan,
    read_block,
)
from ringfeed.pipeline.recipe import Recipe, RecipeSegment
from ringfeed.pipeline.step_packs import StepPacks

if TYPE_CHECKING:
    from ringfeed.pipeline.corpus_set import CorpusSet

__all__ = ["PLAN_FORMAT", "Plan"]

PLAN_FORMAT = "ringfeed-plan"
_BLOCKS_KEPT = 2


class Plan:
    """An opened plan folder. Safe to share between threads."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Use ``Plan.open``."""
        self.path = folder
        self._folder = folder
        """Where the files are now."""
        self.manifest = manifest
        self._facts: dict[str, Any] = manifest.facts
        self.segments = tuple(map(RecipeSegment.from_json, manifest.made_from["segments"]))
        """Recipe segments in step order; the first begins at step 0."""
        self._recipe = self.segments[0].recipe
        self._fingerprint = self._recipe.fingerprint
        self._first_steps: list[int] = self._facts["first_steps"]
        self._blocks: OrderedDict[int, Block] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def open(cls, path: str | Path) -> "Plan":
        """Open the finished plan at ``path``; reads the manifest alone.

        Raises:
            ValueError: if there is no plan, or a half-written one.
            CorruptDataError: if its manifest is damaged.
        """
        folder = Path(path)
        return cls(folder, read_manifest(folder, format=PLAN_FORMAT))

    @property
    def is_growing(self) -> bool:
        """Is it still being made (``plan_growth.py``)? Whatever is said of the whole is then said so far."""
        return False

    @property
    def recipe(self) -> Recipe:
        """What shaped the first steps."""
        return self._recipe

    @property
    def recipe_fingerprint(self) -> str:
        """Fingerprint of the first recipe segment; the chain starts with it."""
        return self._fingerprint

    @property
    def num_steps(self) -> int:
        return int(self._facts["num_steps"])

    @property
    def num_packs(self) -> int:
        return int(self._facts["num_packs"])

    @property
    def num_blocks(self) -> int:
        return len(self._first_steps)

    @property
    def packs_per_step(self) -> int:
        return self._recipe.packs_per_step

    @property
    def pack_tokens(self) -> int:
        """Slot budget of every pack at ``pad_multiple``: what fixed packs have, and variable ones at most."""
        return self._recipe.pack_tokens

    @property
    def pack_lengths(self) -> PackLengths:
        """The rule for T of each pack at the plan's own multiple; a view rounds up at its layout's."""
        return PackLengths(
            budget=self.pack_tokens,
            multiple=self.pad_multiple,
            shape=PackShape(self._recipe.pack_shape),
            buckets=LengthBuckets(self._recipe.length_buckets),
        )

    @property
    def pad_multiple(self) -> int:
        return self._recipe.pad_multiple

    @property
    def slate_size(self) -> int:
        return self._recipe.slate_size

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the corpora in command order."""
        return tuple(source.name for source in self._recipe.sources)

    @property
    def largest_num_pieces(self) -> int:
        """Most pieces in one pack of the plan, tail slots not counted."""
        return int(self._facts["largest_num_pieces"])

    @property
    def least_supervised(self) -> int | None:
        """Fewest supervised tokens in one step of the plan; None where masks are unknown."""
        least: int | None = self._facts["least_supervised"]
        return least

    @property
    def num_epochs(self) -> int:
        """How often a document is drawn at most: once in each epoch that its source has begun."""
        return int(self._facts["num_epochs"])

    @property
    def replaced_steps(self) -> tuple[tuple[int, int], ...]:
        """Ranges of steps (first, end) that other ones took the place of when the plan was extended."""
        extensions = self.manifest.made_from["extensions"]
        return tuple((entry["first_step"], entry["end_step"]) for entry in extensions)

    @property
    def report(self) -> dict[str, Any]:
        """What ``plan --report --json`` prints."""
        return dict(self._facts["report"])

    def refresh(self) -> int:
        """Return ``num_steps``; a growing plan looks for new blocks first."""
        return self.num_steps

    def wait_for_step(self, i: int, *, stop: threading.Event | None = None) -> bool:  # noqa: ARG002
        """Return whether the plan has step ``i``; a growing one waits for the answer."""
        return 0 <= i < self.num_steps

    def step(self, i: int) -> pa.Table:
        """Return step ``i`` with one row per pack, as ``pipeline/step_packs.py`` ``SCHEMA`` says.

        Raises:
            ValueError: if the plan has no step ``i``.
            CorruptDataError: if the step's block is damaged.
        """
        block = self._block_with(i)
        first, last = block.row_range(i)
        return block.table.slice(first, last - first)

    def step_packs(self, i: int) -> StepPacks:
        """Return step ``i`` as arrays (read-only); errors as ``step``."""
        block = self._block_with(i)
        first, last = block.row_range(i)
        return block.rows.step_packs(first, last, chain=block.facts.chains[i - block.facts.first_step])

    def chain(self, i: int) -> str:
        """Return h_i, 32 hex digits; ``i`` = -1 gives the value before the first step. Errors as ``step``."""
        if i == -1:
            return self._fingerprint
        facts = self._block_with(i).facts
        return facts.chains[i - facts.first_step]

    def block(self, number: int) -> Block:
        """Return block ``number``, hash-checked, from memory if it was used lately.

        Raises:
            ValueError: if there is no such block.
            CorruptDataError: if the block is damaged; names the file.
        """
        if not 0 <= number < self.num_blocks:
            raise ValueError(
                f"block {number} is not in {self.path}: it has blocks 0 to {self.num_blocks - 1}"
            )
        with self._lock:
            block = self._blocks.pop(number, None) or self._read_block(number)
            self._blocks[number] = block
            while len(self._blocks) > _BLOCKS_KEPT:
                self._blocks.popitem(last=False)
        return block

    def blocks(self) -> Iterator[Block]:
        """Read all blocks in order, each hash-checked, holding one at a time."""
        for number in range(self.num_blocks):
            yield self._read_block(number)

    def largest_footprint(self, multiple: int) -> int | None:
        """Return the tokens of the largest pack at ``multiple`` if the plan stores it, else None.

        Of a growing plan it is the largest pack so far: 0 before its first block.
        """
        if multiple not in FOOTPRINT_MULTIPLES:
            return None
        largest = self._facts["footprints"]
        return int(largest[FOOTPRINT_MULTIPLES.index(multiple)]) if largest else 0

    def scan_footprints(self, *, multiple: int, budget: int) -> FootprintScan:
        """Read the whole plan and count the packs that take more than ``budget`` tokens at ``multiple``."""
        return FootprintScan.of(self.blocks(), multiple=multiple, budget=budget)

    def corpus_paths(self) -> list[Path]:
        """Return where the plan expects its corpora: stored relative to the plan's folder.

        Raises:
            ValueError: if the plan was made from lengths alone.
        """
        if any(source.kind != "corpus" for source in self._recipe.sources):
            raise ValueError(
                f"{self.path} was planned from lengths alone (--lengths): it can be read and measured, "
                "but there are no tokens to load; plan a corpus instead"
            )
        return self.source_paths()

    def source_paths(self) -> list[Path]:
        """Return where the plan expects what it was made from, corpora or a file of lengths."""
        return [(self.path / path).resolve() for path in self._facts["source_paths"]]

    def corpus_fingerprints(self) -> list[str]:
        """Return the fingerprint of each corpus in command order."""
        return [source.fingerprint for source in self._recipe.sources]

    def open_corpora(
        self,
        override: str | Path | Sequence[str | Path] | None = None,
        *,
        check: Literal["table", "sizes"] = "sizes",
    ) -> "CorpusSet":
        """Open the plan's corpora, or those at ``override``, and check that they are the planned ones.

        Args:
            override: paths in command order.
            check: as in ``Corpus.open``. A rank of a large run must not read the whole table, so by default
                rows are checked where they are used.

        Raises:
            ValueError: if they are not what the plan was made from (with the difference), or it was made from
                lengths alone.
        """
        from ringfeed.pipeline.corpus_set import CorpusSet

        paths: Sequence[str | Path] = self.corpus_paths()
        if override is not None:
            paths = [override] if isinstance(override, str | Path) else list(override)
        corpora = CorpusSet.open(paths, check=check)
        self._check_corpora(corpora, paths)
        return corpora

    def _check_corpora(self, corpora: "CorpusSet", paths: Sequence[str | Path]) -> None:
        found = corpora.made_from()
        if [entry["fingerprint"] for entry in found] == self.corpus_fingerprints():
            return
        planned = self._facts["source_made_from"]
        difference = describe_difference({"corpora": planned}, {"corpora": found})
        shown = ", ".join(str(path) for path in paths)
        raise ValueError(
            f"{self.path} was not planned from {shown} ({difference}); pass the corpora that it was "
            "planned from, in command order, or plan again"
        )

    def _read_block(self, number: int) -> Block:
        try:
            return read_block(self._folder, self.manifest.files[number])
        except CorruptDataError:
            if not was_replaced(self.path, self.manifest):
                raise
        raise ValueError(
            f"{self.path} was extended since it was opened, and block {number} has other steps now; open it "
            "again and load the last state"
        )

    def _block_with(self, step: int) -> Block:
        if not 0 <= step < self.num_steps:
            raise ValueError(f"step {step} is not in {self.path}: it has steps 0 to {self.num_steps - 1}")
        return self.block(int(np.searchsorted(self._first_steps, step, side="right")) - 1)
