"""URLs that requests name lead only where they may."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import threading
from typing import Any

import pytest

from omniq import net_guard
from omniq.errors import ConfigError, InvalidRequest
from omniq.net_guard import check_url, checked_url, is_public


def names(monkeypatch: pytest.MonkeyPatch, *addresses: str) -> list[str]:
    """Has the name service answer ``addresses`` for every name; the names that were asked for."""
    asked: list[str] = []

    def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        asked.append(host)
        return [(0, 0, 0, "", (address, port)) for address in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


@pytest.mark.parametrize(
    "url",
    [
        "https://127.0.0.1/",
        "https://127.1/",
        "https://2130706433/",
        "https://0x7f000001/",
        "https://0177.0.0.1/",
        "https://0/",
        "https://10.0.0.1/",
        "https://172.16.9.9/",
        "https://192.168.1.1/",
        "https://169.254.169.254/latest/meta-data",
        "https://100.64.0.1/",
        "https://224.0.0.1/",
        "https://255.255.255.255/",
        "https://[::1]/",
        "https://[::]/",
        "https://[::ffff:10.0.0.1]/",
        "https://[fe80::1]/",
        "https://[fd00::1]/",
        "https://[fec0::1]/",
        "https://[64:ff9b::a00:1]/",
        "https://[2002:a00:1::]/",
        "https://[ff0e::1]/",
        "https://[3fff::1]/",
        "https://192.88.99.1/",
        "https://localhost/",
    ],
)
def test_addresses_that_are_not_public_are_refused_however_they_are_written(url: str) -> None:
    with pytest.raises(InvalidRequest, match="not public"):
        check_url(url, allow=["*"])


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://example.com/", "scheme https"),
        ("ftp://example.com/", "scheme https"),
        ("file:///etc/passwd", "scheme https"),
        ("example.com", "scheme https"),
        ("", "scheme https"),
        ("https://", "name a host"),
        ("https:///path", "name a host"),
        ("https://a:b@example.com/", "user name"),
        ("https://@example.com/", "user name"),
        ("https://example.com:0/", "port"),
        ("https://example.com:99999/", "must be a URL"),
        ("https://exa mple.com/", "spaces"),
        ("https://example.com/\r\nx: y", "control"),
        ("https://example.com\\@127.0.0.1/", "backslashes"),
        ("https://exämple.com/", "ASCII"),
        ("https://[::1/", "must be a URL"),
        ("https://[fe80::1%25eth0]/", "host"),
        ("https://-a.com/", "name a host"),
        ("https://example.com/" + "a" * 3000, "at most 2048"),
    ],
)
def test_what_is_no_plain_url_is_refused_before_anything_is_asked(
    url: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = names(monkeypatch, "93.184.215.14")
    with pytest.raises(InvalidRequest, match=message) as refused:
        check_url(url, allow=["*"], field="webhook.url")
    assert refused.value.fields[0]["field"] == "webhook.url"
    assert asked == []


def test_the_address_that_was_checked_is_the_one_to_connect_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = names(monkeypatch, "93.184.215.14")
    target = check_url("https://Example.com:8443/a/b?c=d#e", allow=["example.com"])
    assert asked == ["example.com"]
    assert target.pinned_url == "https://93.184.215.14:8443/a/b?c=d"
    assert target.host_header == "example.com:8443"
    assert check_url("https://example.com", allow=["*"]).host_header == "example.com"
    names(monkeypatch, "2606:2800:21f::1")
    target = check_url("https://example.com/", allow=["*"])
    assert target.pinned_url == "https://[2606:2800:21f::1]:443/"


def test_a_name_with_one_private_address_among_public_ones_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names(monkeypatch, "93.184.215.14", "10.0.0.1")
    for allow in (["*"], ["inside.example.com"]):
        with pytest.raises(InvalidRequest, match="not public") as refused:
            check_url("https://inside.example.com/", allow=allow)
        assert "10.0.0.1" not in str(refused.value)
    check_url("https://inside.example.com/", allow=["*", "10.0.0.0/8"])


def test_only_hosts_of_the_list_may_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    names(monkeypatch, "93.184.215.14")
    for host, allow, fine in (
        ("example.com", ["example.com"], True),
        ("EXAMPLE.com.", ["Example.COM"], True),
        ("www.example.com", ["example.com"], False),
        ("www.example.com", ["*.example.com"], True),
        ("example.com", ["*.example.com"], False),
        ("badexample.com", ["*.example.com"], False),
        ("example.com", [], False),
        ("example.com", ["93.184.0.0/16"], True),
    ):
        if fine:
            check_url(f"https://{host}/", allow=allow)
        else:
            with pytest.raises(InvalidRequest, match="not allowed"):
                check_url(f"https://{host}/", allow=allow)


def test_private_networks_may_be_allowed_by_name_of_the_network() -> None:
    target = check_url("http://127.0.0.1:9/", allow=["127.0.0.0/8"], schemes=("http", "https"))
    assert (target.address, target.port) == ("127.0.0.1", 9)
    assert check_url("https://[::ffff:127.0.0.1]/", allow=["127.0.0.1"]).address == "127.0.0.1"


def test_a_faulty_list_is_an_error_of_the_configuration() -> None:
    for entry in ("", "10.0.0.1/8", "*.", "http://x", "300.1.1.1", "*.*.com"):
        with pytest.raises(ConfigError, match="no host to allow"):
            check_url("https://example.com/", allow=[entry])


def test_unknown_names_are_said_to_be_unknown() -> None:
    with pytest.raises(InvalidRequest, match="not known"):
        check_url("https://no-such-host.invalid/", allow=["*"])


def test_public_addresses_are_public() -> None:
    assert is_public(ipaddress.ip_address("8.8.8.8"))
    assert is_public(ipaddress.ip_address("2001:4860:4860::8888"))
    assert not is_public(ipaddress.ip_address("::ffff:192.168.0.1"))


def test_a_name_that_is_not_on_the_list_is_not_even_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = names(monkeypatch, "8.8.8.8")
    with pytest.raises(InvalidRequest, match="not allowed"):
        check_url("https://secret.attacker.example/", allow=["example.com", "*.example.com"])
    assert asked == []


async def test_a_slow_name_service_holds_up_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """More look-ups than there are threads for anything else, none of which comes back."""
    answer = threading.Event()
    monkeypatch.setattr(net_guard, "LOOKUP_SECONDS", 0.2)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer.wait(30) and [])
    slow = [checked_url(f"https://a{i}.example/", allow=["*"], field="f") for i in range(40)]
    looking = asyncio.gather(*slow, return_exceptions=True)
    try:
        async with asyncio.timeout(20):
            assert await asyncio.to_thread(lambda: "done") == "done"
            found = await looking
    finally:
        answer.set()
    assert all(isinstance(e, InvalidRequest) and "0.2 s" in e.message for e in found)
