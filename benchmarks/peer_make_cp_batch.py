"""Time ``make_cp_batch_for_te`` beside nemo-automodel's function of that name, on the same batches.

Run:   OMP_NUM_THREADS=1 benchmarks/.venv/bin/python benchmarks/peer_make_cp_batch.py
Read:  one JSON line per case; ``ratio`` and ``cpu_ratio`` say how many times as long the peer takes. The
       peer asks a TransformerEngine kernel for its indices and ``torch.distributed`` for its rank: it is
       handed both ready, so its side is timed without them. ringfeed computes its indices every time.
"""

import json
import os
import sys
from types import ModuleType

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from bench_cut_all import in_turns, times
from bench_make_cp_batch import CASES, CP_RANK, batches, facts, mesh

from ringfeed.sharding import automodel

try:
    from nemo_automodel.components.distributed.context_parallel.utils import make_cp_batch_for_te
except ImportError as error:
    raise SystemExit(
        f"skipped: {error.name} is not installed; `make bench-venv` installs the peers"
    ) from None


class ReadyIndices(ModuleType):
    """Stands in for TransformerEngine's extension: indices by the stream's length, computed once."""

    def __init__(self) -> None:
        super().__init__("transformer_engine_torch")
        self.ready: dict[tuple[int, ...], torch.Tensor] = {}

    def thd_get_partitioned_indices(
        self, cu_seqlens: torch.Tensor, total_tokens: int, world_size: int, rank: int
    ) -> torch.Tensor:
        """Return the indices of these boundaries."""
        # By content of the first and middle boundary: enough to tell this benchmark's chunks apart.
        key = (total_tokens, len(cu_seqlens), int(cu_seqlens[1]), int(cu_seqlens[len(cu_seqlens) // 2]))
        if key not in self.ready:
            self.ready[key] = automodel.thd_get_partitioned_indices(
                cu_seqlens, total_tokens, world_size, rank
            )
        return self.ready[key]


def main() -> None:
    """Check that both give the same batch, then time them in turns."""
    torch.set_num_threads(1)
    sys.modules["transformer_engine_torch"] = ReadyIndices()
    torch.distributed.get_rank = lambda group=None: CP_RANK  # noqa: ARG005 - the signature that is called
    sources = batches()
    for case, num_chunks in CASES.items():
        settings = {"num_chunks": num_chunks}
        ours = automodel.make_cp_batch_for_te(mesh(), sources[0], **settings)
        theirs = make_cp_batch_for_te(mesh(), sources[0], **settings)
        assert set(ours) == set(theirs)
        for name, value in theirs.items():
            same = torch.equal(ours[name], value) if isinstance(value, torch.Tensor) else ours[name] == value
            assert same, name

        def ringfeed(i: int, settings: dict[str, int] = settings) -> None:
            automodel.make_cp_batch_for_te(mesh(), sources[i], **settings)

        def peer(i: int, settings: dict[str, int] = settings) -> None:
            make_cp_batch_for_te(mesh(), sources[i], **settings)

        found = in_turns({"ringfeed": ringfeed, "nemo_automodel": peer})
        timed = {
            f"{name}_{key}": round(value, 1) for name, one in found.items() for key, value in one.items()
        }
        ratios = times(found, "nemo_automodel", "ringfeed")
        print(json.dumps({"case": f"make_cp_batch/{case}", **ratios, **timed, **facts()}))


if __name__ == "__main__":
    main()
