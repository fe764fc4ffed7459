"""One cp rank of ``test_torch_cp.py``: run all checks one after the other and write what became of each.

Usage: SCRIPT FOLDER NUM_RANKS RANK
"""

import importlib.util
import json
import sys
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


def load_checks(path: Path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module.CHECKS


def outcome(check, mesh) -> str:
    try:
        check(mesh)
    except BaseException:
        return traceback.format_exc()
    return "ok"


def main(folder: Path, num_ranks: int, rank: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous-{num_ranks}",
        world_size=num_ranks,
        rank=rank,
        timeout=timedelta(seconds=60),
    )
    mesh = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("cp",))
    outcomes: dict[str, str] = {}
    for path in sorted(Path(__file__).parent.glob("*_checks.py")):
        outcomes |= {f"{path.stem}/{check.__name__}": outcome(check, mesh) for check in load_checks(path)}
    (folder / f"outcomes-{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
