"""Load a package that only some installs have, or say which install to make."""

import importlib
from types import ModuleType

__all__ = ["MissingDependencyError", "load_optional"]


class MissingDependencyError(ImportError):
    """An optional package is not installed."""


def load_optional(module: str, *, extra: str, needed_for: str) -> ModuleType:
    """Import ``module`` where it is used, never at the top of a file.

    Raises:
        MissingDependencyError: if the package is absent.
        ImportError: if it is present but broken; that error is left as it is.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # A package that is there but lacks one of its own imports is a broken
        # install. "Please install it" would then send the reader the wrong way.
        is_absent = f"{module}.".startswith(f"{error.name}.")
        if not is_absent:
            raise
        raise MissingDependencyError(
            f"{needed_for} needs {error.name!r}, which is not installed; "
            f"run: pip install 'ringfeed[{extra}]'",
            name=error.name,
        ) from error
