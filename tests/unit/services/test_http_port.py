import socket

import pytest

from services.errors import UnavailableError
from services.stack.http_port import settle_port


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "localhost"])
def test_a_taken_port_is_refused_and_a_free_one_stays_free(host: str) -> None:
    port = settle_port(host, 0)
    assert port > 0
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with pytest.raises(UnavailableError, match=rf"{host}:{port}: Address already in use"):
            settle_port(host, port)
    assert settle_port(host, port) == port


@pytest.mark.parametrize("host", ["256.1.1.1", "no-such-host.invalid"])
def test_a_host_that_is_not_ours_is_named(host: str) -> None:
    with pytest.raises(UnavailableError, match=f"cannot listen on {host}:80"):
        settle_port(host, 80)
