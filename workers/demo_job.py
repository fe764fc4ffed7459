"""What the demo and its training processes tell each other, as JSON.

In:   a ``TrainJob``, written by the demo (``demo_ranks.py``)
Out:  losses and a ``TrainResult`` from each process (``demo_train.py``)

Neither torch nor Ray is imported here: the demo's own process needs no torch.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

__all__ = ["RankRecord", "TrainJob", "TrainResult", "read_record"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainJob:
    """One training run over dp x cp processes."""

    name: str
    folder: Path
    """For records, logs and the rendezvous."""
    source: Path
    """Plan or shards."""
    layout: str | None
    """None takes the shards' own."""
    dp_size: int
    cp_size: int
    steps: int
    slots_per_step: int
    """Of the whole step, to show how far a rank is."""
    vocab_size: int
    is_sharded: bool
    """Gathered attention over a cp group; otherwise plain attention, document by document."""

    @property
    def num_ranks(self) -> int:
        """Processes of the run."""
        return self.dp_size * self.cp_size

    @property
    def slots_per_rank(self) -> int:
        """Slots of a step that one rank holds."""
        return self.slots_per_step // self.num_ranks

    @property
    def rendezvous(self) -> Path:
        """File through which the ranks meet: no port is opened to wait for them."""
        return self.folder.resolve() / f"{self.name}-rendezvous"

    def record(self, rank: int) -> Path:
        """Where rank ``rank`` writes its losses and, last, its result."""
        return self.folder / f"{self.name}-{rank}.jsonl"

    def log(self, rank: int) -> Path:
        """What rank ``rank`` prints."""
        return self.folder / f"{self.name}-{rank}.log"

    def to_json(self) -> str:
        """Return this as one JSON line."""
        return json.dumps({**asdict(self), "folder": str(self.folder), "source": str(self.source)})

    @classmethod
    def from_json(cls, text: str) -> "TrainJob":
        """Rebuild a job from ``to_json()``."""
        facts = json.loads(text)
        return cls(**{**facts, "folder": Path(facts["folder"]), "source": Path(facts["source"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainResult:
    """What one process counted and measured."""

    tokens: int
    """Real tokens that it held."""
    bytes: int
    """Of the tensors it was handed."""
    train_seconds: float
    load_tokens: int
    """Real tokens of all batches but the first, loaded once without training."""
    load_seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RankRecord:
    """All that one process wrote."""

    losses: tuple[float, ...]
    """The loss of each step, the same on every rank."""
    result: TrainResult


def read_record(path: Path) -> RankRecord:
    """Read the record of a process that ended well."""
    *steps, last = [json.loads(line) for line in path.read_text().splitlines()]
    return RankRecord(losses=tuple(step["loss"] for step in steps), result=TrainResult(**last))
