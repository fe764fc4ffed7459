"""Values of an Arrow array as numpy sees them, without pandas.

In:   an array of whole numbers without nulls
Out:  a read-only numpy array over the same memory

``pa.Array.to_numpy`` imports pandas, where it is installed, the first time that it is called: 0.3 s of CPU
before a rank's first batch, for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["numpy_values"]


def numpy_values(array: pa.Array) -> npt.NDArray[Any]:
    """Return the values of ``array``, which live as long as what is returned.

    Raises:
        ArrowInvalid: if it has nulls.
    """
    if array.null_count:
        raise pa.ArrowInvalid(f"{array.null_count} of {len(array)} values are null")
    dtype = np.dtype(array.type.to_pandas_dtype())
    memory = array.buffers()[1] if len(array) else b""
    values = np.frombuffer(
        memory, dtype, count=len(array), offset=array.offset * dtype.itemsize if memory else 0
    )
    # The memory may be another process's too: the object store is mapped writable.
    values.flags.writeable = False
    return values
