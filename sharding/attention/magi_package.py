"""Whether the MagiAttention that is installed can be used, and what is wrong if not.

In:   the installed package ``magi_attention``, if any
Out:  its module ``api``, or an error that says which of four things is missing

MagiAttention is built from source (https://github.com/SandAI-org/MagiAttention). The package of that name on
PyPI is an empty placeholder, and an unbuilt checkout imports with a warning only: neither can be told from a
working one by importing the package's top.
"""

import importlib
import importlib.util
import inspect
import warnings
from typing import Any

from ringfeed.sharding.magi.partition import MAGI_VERSION
from ringfeed.sharding.optional import MissingDependencyError

__all__ = ["is_magi_available", "load_magi"]

_PACKAGE = "magi_attention"
_EXTENSIONS = ("magi_attn_ext", "magi_attn_comm")
_SOURCE = "https://github.com/SandAI-org/MagiAttention"
_NAMES = (
    "DispatchConfig",
    "DistAttnConfig",
    "calc_attn",
    "get_most_recent_key",
    "get_position_ids",
    "magi_attn_flex_key",
    "roll",
    "undispatch",
)
_KEY_PARAMETERS = ("num_heads_q", "num_heads_kv", "cp_group_or_mesh", "dist_attn_config")
_CONFIG_FIELDS = ("chunk_size", "uneven_shard", "alg")


def is_magi_available() -> bool:
    """Return whether ``load_magi`` would succeed; False also where the package's imports fail."""
    try:
        load_magi()
    except ImportError:
        return False
    return True


def load_magi() -> Any:
    """Return ``magi_attention.api``.

    Raises:
        MissingDependencyError: if MagiAttention is absent, or what is there is PyPI's placeholder.
        ImportError: if it is too old (what it lacks is named), its extension is not built, or one of its
            own imports fails; that last error is left as it is.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        raise MissingDependencyError(
            f"MagiAttention is not installed (no package {_PACKAGE!r}); build version {MAGI_VERSION} or "
            f"newer from {_SOURCE}",
            name=_PACKAGE,
        )
    api = _import_api()
    if lacking := _lacking(api):
        raise ImportError(
            f"MagiAttention is too old: it lacks {', '.join(lacking)}; build version {MAGI_VERSION} or newer "
            f"from {_SOURCE}",
            name=_PACKAGE,
        )
    return api


def _import_api() -> Any:
    try:
        with warnings.catch_warnings():
            # The package's top only warns of a missing extension; what follows fails by itself.
            warnings.filterwarnings("ignore", message="Failed to import magi_attn")
            api = importlib.import_module(f"{_PACKAGE}.api")
            _import_extension()
    except ModuleNotFoundError as error:
        if error.name == f"{_PACKAGE}.api":
            raise MissingDependencyError(
                f"{_PACKAGE!r} is there but has no {_PACKAGE}.api: it is the empty placeholder from PyPI; "
                f"run: pip uninstall {_PACKAGE}, then build MagiAttention from {_SOURCE}",
                name=_PACKAGE,
            ) from error
        _explain_extension(error)
        raise
    except ImportError as error:
        _explain_extension(error)
        raise
    return api


def _import_extension() -> None:
    # Kernels import it late, in the first forward.
    importlib.import_module(f"{_PACKAGE}.{_EXTENSIONS[0]}")


def _explain_extension(error: ImportError) -> None:
    told = f"{error.name} {error}"
    extension = next((name for name in _EXTENSIONS if name in told), None)
    if extension is not None:
        raise ImportError(
            f"MagiAttention is there, but its extension {extension} is not built or does not load ({error}); "
            "run in its source folder: pip install --no-build-isolation .",
            name=f"{_PACKAGE}.{extension}",
        ) from error


def _lacking(api: Any) -> list[str]:
    lacking = [name for name in _NAMES if not hasattr(api, name)]
    wanted = (("magi_attn_flex_key", _KEY_PARAMETERS), ("DispatchConfig", _CONFIG_FIELDS))
    for owner, parameters in wanted:
        if owner not in lacking:
            known = inspect.signature(getattr(api, owner)).parameters
            lacking += [f"{owner}({name}=)" for name in parameters if name not in known]
    return lacking
