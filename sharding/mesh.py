"""The mesh as plain numbers: its axes, and which rank is where along them.

In:   a ``MeshShape``, or the names and sizes of a mesh that somebody else built
Out:  ``RankCoords`` of a rank and back, the ranks of a group, sizes and submeshes

Nothing here needs torch or a process group; ``mesh_build.py`` makes the real ``DeviceMesh``.

Ranks count along the last axis first, so ``tp`` peers are neighbours, then ``cp`` peers. Two more
names stand for axes taken together: ``dp`` (dp_replicate, dp_shard) and ``dp_cp`` (those and cp).
"""

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from typing import Any, TypedDict

__all__ = [
    "AXES",
    "FLAT_AXES",
    "LoaderRanks",
    "MeshShape",
    "RankCoords",
    "get_submesh",
    "mesh_axis_size",
]

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""The axes, outermost first."""
FLAT_AXES = {"dp": ("dp_replicate", "dp_shard"), "dp_cp": ("dp_replicate", "dp_shard", "cp")}
"""Names for axes taken together, and which those are."""

# Where ranks that are too many or too few can go, in the order in which a user would want it.
_GROWS = ("dp_shard", "dp_replicate", "cp", "pp", "tp")


class LoaderRanks(TypedDict):
    """What ``Loader`` and ``Batch`` call a rank."""

    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int


@dataclass(frozen=True, slots=True)
class RankCoords:
    """Where one rank stands along each axis, outermost first."""

    pp: int = 0
    dp_replicate: int = 0
    dp_shard: int = 0
    cp: int = 0
    tp: int = 0


@dataclass(frozen=True, slots=True)
class MeshShape:
    """Ranks along each axis, outermost first; their product is the number of ranks.

    Raises:
        ValueError: if a size is no integer of at least 1.
    """

    pp: int = 1
    """Pipeline stages."""
    dp_replicate: int = 1
    """Replicas of the sharded model (HSDP)."""
    dp_shard: int = 1
    """Ranks over which parameters are sharded (FSDP)."""
    cp: int = 1
    """Context-parallel ranks, which share a chunk."""
    tp: int = 1
    """Tensor-parallel ranks."""

    def __post_init__(self) -> None:
        for axis, size in zip(AXES, self.sizes, strict=True):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{axis} must be an integer of at least 1, got {size!r}")

    @classmethod
    def from_axes(cls, axes: Mapping[str, int]) -> "MeshShape":
        """Read a mesh that is given as axis name -> size, outermost first.

        Args:
            axes: some of ``AXES`` in that order; the others have size 1. Of a ``DeviceMesh`` m:
                ``dict(zip(m.mesh_dim_names, m.shape))``.

        Raises:
            ValueError: if an axis is unknown, the order is another one, or a size is wrong. Ranks are
                counted in this order, so another one would give every rank the wrong tokens.
        """
        unknown = [axis for axis in axes if axis not in AXES]
        if unknown:
            parts = FLAT_AXES.get(unknown[0])
            hint = f" ({unknown[0]} is {' and '.join(parts)} taken together)" if parts else ""
            raise ValueError(
                f"unknown mesh axis {unknown[0]!r}{hint}; known, outermost first: {', '.join(AXES)}"
            )
        shape = cls(**axes)
        ordered = [axis for axis in AXES if axis in axes]
        if list(axes) != ordered:
            raise ValueError(
                f"mesh axes are in the order {', '.join(axes)}, but ranks count along "
                f"{', '.join(ordered)} (outermost first); the mesh that fits: {shape}"
            )
        return shape

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes in the order of ``AXES``."""
        return astuple(self)

    @property
    def num_ranks(self) -> int:
        """Ranks in the mesh."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """Return the ranks along ``axis``, one of ``AXES`` or ``FLAT_AXES``.

        Raises:
            ValueError: if there is no such axis.
        """
        return math.prod(getattr(self, part) for part in _parts(axis))

    def check_num_ranks(self, num_ranks: int) -> None:
        """Refuse a world of another size, and say which shape would fit it.

        Raises:
            ValueError: if ``num_ranks`` is below 1 or not the product of the sizes.
        """
        if num_ranks < 1:
            raise ValueError(f"num_ranks must be at least 1, got {num_ranks}")
        if num_ranks != self.num_ranks:
            product = " * ".join(f"{axis}={size}" for axis, size in zip(AXES, self.sizes, strict=True))
            raise ValueError(
                f"{product} is {self.num_ranks} ranks, but the world has {num_ranks}; "
                f"what would fit: {self.fitted(num_ranks)}"
            )

    def fitted(self, num_ranks: int) -> "MeshShape":
        """Return the shape of ``num_ranks`` ranks that differs least from this one.

        One axis changes if that is enough: dp_shard before dp_replicate, cp, pp and tp. Otherwise tp,
        cp and pp keep what divides the world, and dp_shard takes the rest.
        """
        sizes = dict(zip(AXES, self.sizes, strict=True))
        for axis in _GROWS:
            others = self.num_ranks // sizes[axis]
            if num_ranks % others == 0:
                return MeshShape(**{**sizes, axis: num_ranks // others})
        rest = num_ranks
        for axis in ("tp", "cp", "pp"):
            sizes[axis] = math.gcd(sizes[axis], rest)
            rest //= sizes[axis]
        return MeshShape(**{**sizes, "dp_replicate": 1, "dp_shard": rest})

    def coords(self, rank: int) -> RankCoords:
        """Return where ``rank`` stands.

        Raises:
            ValueError: if there is no such rank.
        """
        if not 0 <= rank < self.num_ranks:
            raise ValueError(
                f"rank={rank} must be at least 0 and below {self.num_ranks}, the ranks of {self}"
            )
        coords = {}
        for axis in reversed(AXES):
            rank, coords[axis] = divmod(rank, getattr(self, axis))
        return RankCoords(**coords)

    def rank(self, coords: RankCoords) -> int:
        """Return the rank that stands at ``coords``: the inverse of ``coords``.

        Raises:
            ValueError: if a coordinate is outside the mesh.
        """
        for axis in AXES:
            if not 0 <= getattr(coords, axis) < getattr(self, axis):
                raise ValueError(
                    f"coordinate {axis}={getattr(coords, axis)} must be at least 0 and below "
                    f"{axis}={getattr(self, axis)}"
                )
        return self._index(AXES, coords)

    def axis_rank(self, axis: str, rank: int) -> int:
        """Return what ``rank`` is along ``axis``, one of ``AXES`` or ``FLAT_AXES``: 0 <= r < size(axis).

        Raises:
            ValueError: if there is no such axis or rank.
        """
        return self._index(_parts(axis), self.coords(rank))

    def group(self, axis: str, rank: int) -> list[int]:
        """Return the ranks that share ``axis`` with ``rank``, itself included, in the order along it.

        Raises:
            ValueError: if there is no such axis or rank.
        """
        parts, here = _parts(axis), self.coords(rank)
        others = [part for part in AXES if part not in parts]
        place = self._index(others, here)
        # Ranks rise along every axis, so those that agree on the other axes come in its order.
        return [peer for peer in range(self.num_ranks) if self._index(others, self.coords(peer)) == place]

    def loader_ranks(self, rank: int) -> LoaderRanks:
        """Return what ``Loader`` and ``Batch`` call this rank.

        Raises:
            ValueError: if there is no such rank.
        """
        return {
            "dp_rank": self.axis_rank("dp", rank),
            "dp_size": self.size("dp"),
            "cp_rank": self.axis_rank("cp", rank),
            "cp_size": self.cp,
        }

    def _index(self, axes: Any, coords: RankCoords) -> int:
        index = 0
        for axis in axes:
            index = index * int(getattr(self, axis)) + int(getattr(coords, axis))
        return index


def get_submesh(device_mesh: Any, dim: str) -> Any:
    """Return the submesh of axis ``dim``, None where there is none.

    None without a mesh, without ``mesh_dim_names``, with names of None, and without that axis.

    Args:
        device_mesh: a ``DeviceMesh``, any mapping of axis names to submeshes that has
            ``mesh_dim_names``, or None. A ``DeviceMesh`` does not list flattened axes there:
            ``mesh_build.flat_submesh`` knows those.
        dim: the name of the axis.
    """
    if device_mesh is None or dim not in (getattr(device_mesh, "mesh_dim_names", None) or ()):
        return None
    return device_mesh[dim]


def mesh_axis_size(device_mesh: Any, dim: str) -> int:
    """Return the size of axis ``dim``, 0 where ``get_submesh`` finds none."""
    submesh = get_submesh(device_mesh, dim)
    return 0 if submesh is None else int(submesh.size())


def _parts(axis: str) -> tuple[str, ...]:
    if axis in AXES:
        return (axis,)
    if axis not in FLAT_AXES:
        raise ValueError(f"unknown mesh axis {axis!r}; known: {', '.join([*AXES, *FLAT_AXES])}")
    return FLAT_AXES[axis]
