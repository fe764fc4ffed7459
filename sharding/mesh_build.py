"""Make the real ``DeviceMesh`` of a ``MeshShape``.

In:   a ``MeshShape`` (``mesh.py``); the launcher's variables (``mesh_environment.py``)
Out:  a ``DeviceMesh`` with the axes of ``AXES``, and ``dp`` and ``dp_cp`` flattened
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from ringfeed.sharding.mesh import AXES, FLAT_AXES, MeshShape
from ringfeed.sharding.mesh_environment import RankEnvironment, read_rank_environment

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["build_device_mesh", "flat_submesh"]

_BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


def build_device_mesh(
    shape: MeshShape | Mapping[str, int], device: Literal["cpu", "cuda"] = "cpu"
) -> "DeviceMesh":
    """Return the mesh of ``shape`` over all ranks; every rank calls this with the same arguments.

    ``mesh["cp"]`` is the submesh of an axis, ``flat_submesh(mesh, "dp")`` and ``"dp_cp"`` are the flattened
    ones, ``mesh.get_group`` knows the group of each: over ``dp`` ranks get different packs, over ``dp_cp``
    different tokens, so losses are summed there.

    Where no process group exists, one is made as the launcher says, with gloo for ``cpu`` and nccl for
    ``cuda``, and ``cuda`` takes the device of the local rank. One that exists is used as it is.

    Args:
        shape: ranks along each axis, or a mapping for ``MeshShape.from_axes``; the product is the
            number of ranks.
        device: what the mesh's tensors lie on.

    Raises:
        ValueError: if ``device`` is neither, the product is not the number of ranks or the axes stand
            in another order (the shape that would fit is named), or no launcher says which rank this is.
    """
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    if not isinstance(shape, MeshShape):
        shape = MeshShape.from_axes(shape)
    if not isinstance(device, str) or device not in _BACKENDS:
        raise ValueError(f"device must be one of {', '.join(_BACKENDS)}, got {device!r}")
    if dist.is_initialized():
        shape.check_num_ranks(dist.get_world_size())
    else:
        environment = read_rank_environment()
        # Before the ranks meet: a wrong shape is told at once, not after a timeout.
        shape.check_num_ranks(environment.world_size)
        _start(environment, device)
    mesh = init_device_mesh(device, shape.sizes, mesh_dim_names=AXES)
    for name in FLAT_AXES:
        flat_submesh(mesh, name)
    return mesh


def flat_submesh(mesh: "DeviceMesh", name: str) -> "DeviceMesh":
    """Return the one-dimensional mesh of axes taken together; FSDP takes that of ``dp_cp``.

    ``mesh[name]`` is the same mesh, with a warning that torch will not find it by name for ever.

    Args:
        mesh: from ``build_device_mesh``.
        name: one of ``FLAT_AXES``.

    Raises:
        ValueError: if there is no such name.
    """
    if name not in FLAT_AXES:
        raise ValueError(f"name={name!r} must be one of {', '.join(FLAT_AXES)}; mesh[{name!r}] is one axis")
    # The one that is there already, after the first time.
    return mesh[FLAT_AXES[name]]._flatten(name)


def _start(environment: RankEnvironment, device: str) -> None:
    import torch
    import torch.distributed as dist

    if device == "cuda":
        # Slurm and Ray may show each process its own device only, which then is number 0.
        num_devices = torch.cuda.device_count()
        if num_devices > 1 and environment.local_rank >= num_devices:
            raise ValueError(
                f"local rank {environment.local_rank} has no device of its own: this machine shows "
                f"{num_devices}; start at most {num_devices} processes on it"
            )
        torch.cuda.set_device(environment.local_rank if num_devices > 1 else 0)
    dist.init_process_group(
        _BACKENDS[device],
        init_method=environment.init_method,
        rank=environment.rank,
        world_size=environment.world_size,
    )
