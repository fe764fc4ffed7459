"""The words a user chooses from: in flags, in config files, and in what is made.

In:   nothing: the command line reads this before anything else is imported
Out:  enums, of which ``ringfeed --help`` shows the words (``cli_options.py``) and configs check them
"""

from enum import StrEnum

__all__ = [
    "Balance",
    "Basis",
    "EncodingErrors",
    "LengthBuckets",
    "Overflow",
    "PackShape",
    "Schedule",
    "Unsupervised",
]


class EncodingErrors(StrEnum):
    """What to do with text that is not UTF-8."""

    FAIL = "fail"
    """Refuse it, naming the file."""
    SKIP = "skip"
    """Leave the document out, and count it."""
    BYTES = "bytes"
    """Keep the bytes as they are (byte tokenizer only)."""


class Balance(StrEnum):
    """How pieces become packs."""

    WORK = "work"
    """Packs of like cost in every micro-batch of every step, looking ahead over the window's steps."""
    BEST_FIT = "best_fit"
    """Best-fit decreasing inside the look-ahead window: the least padding, nothing cut."""
    IN_ORDER = "in_order"
    """Next fit: documents stay in drawing order, a pack ends where the next one does not fit."""
    CONCAT = "concat"
    """Concatenate and chop at pack borders: no padding at the end of packs, documents are cut."""
    GIVEN = "given"
    """Rows that were packed before stay as they are, a pack each; a document of no such row has its own."""


class Schedule(StrEnum):
    """How slates are put together into steps, with ``balance=work``."""

    SPREAD = "spread"
    """From the most expensive to the cheapest in each step: steps cost much the same."""
    HOMOGENEOUS = "homogeneous"
    """Of like cost in each step: the micro-batches of a pipeline take equally long."""


class Overflow(StrEnum):
    """What to do with a document longer than a pack."""

    SPLIT = "split"
    """Cut it into pieces of one pack each; no token is lost."""
    TRUNCATE = "truncate"
    """Keep the first pack of it; the lost tokens are counted and named."""
    DROP = "drop"
    """Leave it out; counted and named."""
    ERROR = "error"
    """Refuse to plan."""


class Unsupervised(StrEnum):
    """What to do with a step in which no token is supervised."""

    REFUSE = "refuse"
    """Stop, and name it."""
    REDRAW = "redraw"
    """Let it change a pack with another step of the look-ahead (``redraw.py``)."""


class PackShape(StrEnum):
    """Whether all packs of a run have the same T."""

    FIXED = "fixed"
    """All have the budget."""
    VARIABLE = "variable"
    """Each has its own footprint rounded up, and the budget at most."""


class LengthBuckets(StrEnum):
    """Which T variable packs may have, so that compiled kernels and CUDA graphs see few shapes."""

    NONE = "none"
    """Any multiple that the layout can split."""
    POWERS_OF_TWO = "powers_of_two"
    """Powers of two; where the layout cannot split one, the next multiple that it can."""
    EIGHTHS = "eighths"
    """One to eight eighths of the budget, each rounded up to a multiple that the layout can split."""


class Basis(StrEnum):
    """The shape of the curve."""

    QUADRATIC = "quadratic"
    """a + b * l + c * l^2."""
    PIECEWISE = "piecewise"
    """a + b * l, and a bend upwards at each power of two that documents reach."""
