"""Token, TLS and mTLS: who fits gets the plan's bytes, who does not gets one line, at once."""

import time
from itertools import islice

import pytest

from ringfeed.pipeline.flight_choice import FlightPatience
from ringfeed.workers.flight_options import Exposure, ServerOptions, ServerTls

TOKEN, OTHER_TOKEN = "correct-horse-battery", "another-horse-battery"
EVERYWHERE = "0.0.0.0"  # noqa: S104 - the rule for it is tested


def options(certificates, *, client_ca=None, token=TOKEN):
    tls = ServerTls(
        cert=certificates / "server.pem",
        key=certificates / "server.key",
        client_ca=None if client_ca is None else certificates / client_ca,
    )
    return ServerOptions(tls=tls, token=token)


def files(certificates, ca="ca", own=None):
    named = {"ca": certificates / f"{ca}.pem"}
    return named if own is None else named | {k: certificates / f"{own}.{e}" for k, e in KINDS}


KINDS = (("cert", "pem"), ("key", "key"))


def refused(load, url, **shown):
    """Return the one line that a rank is told, and how long it took."""
    began = time.monotonic()
    with pytest.raises(ConnectionError) as told:
        load(url, **shown)
    assert "\n" not in str(told.value)
    return str(told.value), time.monotonic() - began


def test_the_right_token_gets_the_bytes_of_the_plan(serve, plan, load, assert_same_batches, monkeypatch):
    server = serve(ServerOptions(token=TOKEN))
    expected = list(load(plan, layout="te"))
    with load(server.url, token=TOKEN) as loader:
        assert_same_batches(loader, expected)
    monkeypatch.setenv("RINGFEED_TOKEN", TOKEN)
    with load(server.url) as loader:
        assert_same_batches(islice(loader, 2), expected[:2])


@pytest.mark.parametrize(
    ("token", "told"),
    [(None, "no bearer token"), ("wrong-horse", "wrong bearer token"), (TOKEN + "x", "wrong")],
)
def test_another_token_is_refused_at_once(serve, load, token, told):
    text, seconds = refused(load, serve(ServerOptions(token=TOKEN)).url, token=token)

    assert told in text
    assert "RINGFEED_TOKEN" in text
    assert TOKEN not in text
    assert seconds < FlightPatience().open_seconds / 2


@pytest.mark.parametrize("own", [None, "rank"])
def test_tls_and_mtls_give_the_bytes_of_the_plan(serve, plan, load, certificates, assert_same_batches, own):
    server = serve(options(certificates, client_ca=None if own is None else "ca.pem"))
    assert server.url.startswith("grpc+tls://")
    expected = list(load(plan, layout="te"))

    for url in (server.url, server.url.replace("grpc+tls", "flight")):
        with load(url, token=TOKEN, tls=files(certificates, own=own)) as loader:
            assert_same_batches(loader, expected)


@pytest.mark.parametrize(
    ("client_ca", "shown", "told"),
    [
        (None, {"ca": "other"}, "certificate verify failed"),
        (None, None, "certificate verify failed"),
        ("ca.pem", {}, "certificate of this rank that it knows"),
        ("ca.pem", {"own": "other"}, "certificate of this rank that it knows"),
    ],
)
def test_a_certificate_that_does_not_fit_is_told_soon(serve, load, certificates, client_ca, shown, told):
    server = serve(options(certificates, client_ca=client_ca))
    tls = None if shown is None else files(certificates, **shown)

    text, seconds = refused(load, server.url, token=TOKEN, tls=tls)

    assert told in text
    assert seconds < FlightPatience().open_seconds / 2


def test_the_other_protocol_is_told(serve, load, certificates):
    secure, plain = serve(options(certificates)), serve(ServerOptions(token=TOKEN))

    assert "use grpc+tls://" in refused(load, secure.url.replace("grpc+tls", "flight"), token=TOKEN)[0]
    text = refused(load, plain.url.replace("flight", "grpc+tls"), token=TOKEN, tls=files(certificates))[0]
    assert "does not speak TLS" in text


def test_a_server_that_lost_its_token_file_refuses_a_rank_in_the_middle(serve, load):
    server = serve(ServerOptions(token=TOKEN))
    with load(server.url, token=TOKEN, prefetch_bytes=0) as loader:
        next(iter(loader))
        server.stop()
        serve(ServerOptions(token=OTHER_TOKEN, port=server.port))
        with pytest.raises(ConnectionError, match="wrong bearer token"):
            list(loader)


def test_an_address_that_others_reach_needs_a_token_or_a_word(serve):
    with pytest.raises(ValueError, match=r"host='0\.0\.0\.0' can be reached .*--token-file"):
        ServerOptions(host=EVERYWHERE)
    serve(ServerOptions(host=EVERYWHERE, token=TOKEN))
    serve(ServerOptions(host=EVERYWHERE, exposure=Exposure.OPEN))


def test_a_key_of_another_certificate_is_told(serve, certificates):
    tls = ServerTls(cert=certificates / "server.pem", key=certificates / "rank.key")
    with pytest.raises(ValueError, match=r"cannot listen .* do not fit"):
        serve(ServerOptions(tls=tls))


def test_a_port_in_use_is_refused_though_grpc_would_share_it(serve):
    first = serve()
    with pytest.raises(ValueError, match=f"cannot listen on 127.0.0.1:{first.port}: .*take another port"):
        serve(ServerOptions(port=first.port))
