"""Settings of the processes that train together: plain data, so that reading them needs no torch."""

from __future__ import annotations

from typing import Literal

from hopline.util.config import check_fields, settings


@settings
class LaunchSettings:
    """How many processes train together, and how they find each other."""

    devices: int | Literal["auto"] = 1
    """Processes to start on this host, or under each task of torchrun or srun; auto is one per GPU."""
    backend: Literal["gloo", "nccl"] | None = None
    """What carries the exchanges: nccl on GPUs and gloo on CPUs by default."""
    address: str | None = None
    """The host of rank 0; found by itself in most places."""
    port: int | None = None
    """The port at which ranks meet; a free one, or one made from the number of the Slurm job, by default."""
    timeout_s: float = 600.0
    """Seconds to wait for a rank that does not answer."""

    def __post_init__(self) -> None:
        check_fields(self)
        if isinstance(self.devices, int) and self.devices < 1:
            raise ValueError(f"devices must be at least 1 or 'auto', not {self.devices}")
        if self.port is not None and not 0 < self.port < 1 << 16:
            raise ValueError(f"port must be between 1 and 65535, not {self.port}; leave it out to get a free one")
        if self.address is not None and (not self.address.strip() or " " in self.address or "/" in self.address):
            raise ValueError(
                f"address must be the name or number of a host, such as address=node1, not {self.address!r}"
            )
        if self.address is not None and self.address.count(":") == 1:
            host, _, port = self.address.partition(":")
            raise ValueError(f"address must be a host alone: write address={host} port={port or 29500}")
        if not self.timeout_s > 0:
            raise ValueError(f"timeout_s must be above 0, not {self.timeout_s}")
