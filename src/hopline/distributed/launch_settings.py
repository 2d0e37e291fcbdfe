"""Settings of the processes that train together.

The module imports no torch, so that reading them is fast.
"""

from __future__ import annotations

from typing import Literal

from hopline.util.config import check_fields, settings


@settings
class LaunchSettings:
    """How many processes train together, and how they find each other."""

    devices: int | Literal["auto"] = 1
    """Processes to start on this host, or under each task of torchrun or srun. auto: one per GPU."""
    address: str | None = None
    """Where ranks meet: the host of rank 0, a port, or both, as HOST, :PORT or HOST:PORT. Default: the host
    that the launcher names, and a free port or one made from the number of the Slurm job."""
    timeout_s: float = 600.0
    """Seconds to wait for a rank that does not answer."""

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.devices, int) and self.devices < 1:
            raise ValueError(f"devices must be at least 1 or 'auto', not {self.devices}")
        _host_and_port(self.address)
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, not {self.timeout_s}")

    @property
    def host(self) -> str | None:
        return _host_and_port(self.address)[0]

    @property
    def port(self) -> int | None:
        return _host_and_port(self.address)[1]


def _host_and_port(address: str | None) -> tuple[str | None, int | None]:
    """(host, port) of an address. Each is None if the address does not name it.

    An IPv6 address without brackets (fe80::1) is a host alone. With a port it has brackets:
    [fe80::1]:29500.
    """
    if address is None:
        return None, None
    is_bare_ipv6 = address.count(":") > 1 and "]" not in address
    has_port = ":" in address and not is_bare_ipv6 and not address.endswith("]")
    host, _, port = address.rpartition(":") if has_port else (address, "", "")
    host = host.removeprefix("[").removesuffix("]")
    has_wrong_character = " " in address or "/" in address or "[" in host or "]" in host
    if has_wrong_character or not (host or port):
        raise ValueError(
            f"address must be a host, a port or both, such as address=node1:29500 or address=:29500, not {address!r}"
        )
    if has_port and not (port.isdecimal() and 0 < int(port) < 1 << 16):
        raise ValueError(f"address must end in a port between 1 and 65535, such as {host}:29500, not {address!r}")
    return host or None, int(port) if port else None
