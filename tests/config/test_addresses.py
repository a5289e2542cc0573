import pytest

from cluster.config.doors import (
    from_here,
    host_of,
    is_loopback,
    joined,
    url_of,
)

HOSTS = {
    "127.0.0.1": "127.0.0.1",
    "0.0.0.0": "0.0.0.0",
    "::1": "::1",
    "[::1]": "::1",
    "[::]": "::",
    "0:0:0:0:0:0:0:0": "::",
    "FE80::1%eth0": "fe80::1%eth0",
    "localhost": "localhost",
    "gpu_7.example.org": "gpu_7.example.org",
    "5f3c": "5f3c",
}
NO_HOSTS = (
    *("256.1.1.1", "1.2.3", "1", "127.0.0.01", "[127.0.0.1]", "[::1", "::1]", ":::", "1::2::3"),
    *("127.0.0.1:8000", "[::1]:8000", "/tmp/socket", "http://127.0.0.1", "*", "a..b", "-a"),
    *("", " ", "a b", "a\n", "user@host"),
)


@pytest.mark.parametrize("text", HOSTS)
def test_a_host_is_an_ip_address_or_a_name(text: str):
    assert host_of(text) == HOSTS[text]


@pytest.mark.parametrize("text", NO_HOSTS)
def test_what_nobody_could_listen_at_is_no_host(text: str):
    with pytest.raises(ValueError, match="write an IP address, such as"):
        host_of(text)


NO_URLS = "a ftp://a http:// http://256.1.1.1 http://a:0 http://a:70000 http://[::1 //a a:4318/v1"


@pytest.mark.parametrize("text", ["http://a b", " http://a", "http://a\n", *NO_URLS.split()])
def test_what_cannot_be_asked_over_http_is_no_url(text: str):
    with pytest.raises(ValueError, match=r"."):
        url_of(text)


@pytest.mark.parametrize("text", ["https://[::1]:4318/v1/traces", "http://collector/v1", ""])
def test_a_url_has_a_host_and_maybe_a_port_and_a_path(text: str):
    assert url_of(text) == text


def test_an_ipv6_address_has_brackets_before_a_port():
    assert (joined("::1", 9), joined("localhost", 80)) == ("[::1]:9", "localhost:80")


def test_hosts_are_read_as_servers_read_them():
    assert all(is_loopback(host) for host in ("127.0.0.1", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "a.b"))
    assert (from_here("0.0.0.0"), from_here("::")) == ("127.0.0.1", "::1")
    assert from_here("10.0.0.1") == "10.0.0.1"
