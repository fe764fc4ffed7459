"""``build_device_mesh`` over real gloo processes that think srun started them."""

import socket
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist


def test_axes_and_flattened_axes_have_their_members(run_ranks, tmp_path):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    (tmp_path / "port").write_text(str(port))

    run_ranks(Path(__file__).with_name("mesh_rank.py"), num_ranks=4, folder=tmp_path)
