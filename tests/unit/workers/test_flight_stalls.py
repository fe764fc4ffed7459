"""A connection is broken by the address of its peer, and no other one is."""

import socket

import pytest

from ringfeed.workers.flight_options import ServerOptions
from ringfeed.workers.flight_stalls import break_connection


@pytest.mark.parametrize(
    ("listen", "connect", "written"),
    [
        ("127.0.0.1", "127.0.0.1", "ipv4:127.0.0.1"),
        ("::", "127.0.0.1", "ipv4:127.0.0.1"),
        ("::1", "::1", "ipv6:%5B::1%5D"),
    ],
    ids=["IPv4", "IPv4 at a port of both", "IPv6"],
)
def test_the_connection_of_one_peer_is_broken(listen, connect, written):
    family = socket.AF_INET6 if ":" in listen else socket.AF_INET
    # Of those that are looked at before.
    local = socket.socketpair()
    with socket.create_server((listen, 0), family=family, dualstack_ipv6=listen == "::") as server:
        port = server.getsockname()[1]
        ends = []
        for _ in range(2):
            client = socket.create_connection((connect, port), timeout=20)
            ends.append((client, server.accept()[0]))
        (broken, _), (other, accepted) = ends
        number = broken.getsockname()[1]

        assert not break_connection(f"{written}:{number}", port=port + 1)
        assert break_connection(f"{written}:{number}", port=port)

        assert broken.recv(1) == b""
        accepted.send(b"x")
        assert other.recv(1) == b"x"
        for pair in (*ends, local):
            for end in pair:
                end.close()
        assert not break_connection(f"{written}:{number}", port=port)
        assert not break_connection("unix:/a/path", port=port)


def test_no_time_at_all_is_refused():
    with pytest.raises(ValueError, match="stall_seconds=0 must be above 0"):
        ServerOptions(stall_seconds=0)
