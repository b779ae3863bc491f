"""Which addresses a server of a run file may have."""

import ipaddress

import pytest

from engine_plugin_processes.http.addresses import METADATA, AddressRefused, check_address

REFUSED = [
    *sorted(map(str, METADATA)),
    "10.1.2.3",
    "172.16.0.1",
    "192.168.1.1",
    "127.0.0.1",
    "0.0.0.0",
    "100.64.0.1",
    "169.254.1.1",
    "224.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fe80::1%eth0",
    "fc00::1",
    "ff02::1",
    "::ffff:127.0.0.1",
    "::ffff:169.254.169.254",
    "::ffff:a9fe:a9fe",
    "::169.254.169.254",
    "64:ff9b::10.0.0.1",
    "2002:a9fe:a9fe::1",
]


@pytest.mark.parametrize("address", REFUSED)
def test_a_name_that_leads_to_an_address_that_is_not_public_is_refused(address):
    with pytest.raises(AddressRefused, match=r"'scorer\.test' leads to .* allow_addresses = "):
        check_address("scorer.test", address, [])


@pytest.mark.parametrize("address", ["8.8.8.8", "2001:4860:4860::8888", "::ffff:8.8.8.8", "64:ff9b::8.8.8.8"])
def test_public_addresses_are_allowed(address):
    check_address("scorer.test", address, [])


@pytest.mark.parametrize(
    ("host", "address"),
    [("localhost", "127.0.0.1"), ("LOCALHOST", "::1"), ("127.0.0.1", "127.0.0.1"), ("[::1]", "::1")],
)
def test_loopback_is_allowed_where_the_run_file_says_it(host, address):
    check_address(host, address, [])


def test_what_is_named_is_allowed_and_a_metadata_service_only_by_itself():
    networks = [ipaddress.ip_network(each) for each in ("10.1.0.0/16", "169.254.0.0/16", "fd00::/8")]
    check_address("scorer.test", "10.1.2.3", networks)
    check_address("scorer.test", "::ffff:10.1.2.3", networks)
    for address in ("10.2.0.1", "169.254.169.254", "fd00:ec2::254"):
        with pytest.raises(AddressRefused):
            check_address("scorer.test", address, networks)
    check_address("scorer.test", "169.254.169.254", [ipaddress.ip_network("169.254.169.254")])
