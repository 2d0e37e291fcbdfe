"""`Membership`: what makes a process one of several ranks: process groups, and a heartbeat while it runs.

There are two kinds, and both end in `Membership.close`:

    launched    `World.join` has made torch's default process group. The heartbeat runs until the end, which
                destroys all process groups.
    existing    a script or an engine has made the default group, and keeps it (`existing_group`). The heartbeat
                runs while ranks work together, and the end destroys the groups that hopline has added.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from hopline.distributed.heartbeat import Heartbeat, NoHeartbeat
from hopline.util.errors import PeerError

LEAVE_S = 5.0
"""Most seconds that a rank which serves the store waits at its end for the others to leave, or to read its error."""
LEFT = "left"
"""The last message of a rank that leaves without an error. Any other is "error TEXT"."""


class GroupHandle:
    """Hopline's only reference to a process group, so that `destroy` can close its connections.

    Gloo closes the connections of a group when nothing refers to the group, not when it is destroyed. Only
    then do ranks that wait for this one get an error. So users of a group hold this handle, and ask it for
    the group at each collective call.
    """

    def __init__(self, group: Any) -> None:
        assert isinstance(group, dist.ProcessGroup)  # on ranks outside the group it would not be
        self._group: dist.ProcessGroup | None = group

    @property
    def group(self) -> dist.ProcessGroup:
        if self._group is None:
            raise RuntimeError("this process group was destroyed")
        return self._group

    def destroy(self, *, broken: bool) -> None:
        """Destroy the group. broken: whether one of its ranks is lost. May be called twice."""
        group = self._group
        self._group = None
        if group is not None:
            # Torch raises one of these if its owner has destroyed all groups before.
            with suppress(RuntimeError, ValueError, AssertionError):
                destroy_group(group, broken=broken)


class Membership:
    """What a rank has made to be one of several. Its world owns it.

    A membership does not refer to its world. The world's finalizer refers to the membership, so otherwise it
    would keep the world alive. Prefetching threads make collective calls too, so a lock guards the heartbeat and
    the last message.

    Args:
        start_heartbeat: Starts a heartbeat that counts from a number of collective calls begun before. After a
            failure the ranks compare their counts, and a count from 0 would make this rank seem to be behind.
        group: The process group of the world's collective calls. None: torch's default group, which the end destroys.
        served_store: The store of the heartbeats, if it ends with this object or with this process. Else None.
    """

    def __init__(
        self,
        start_heartbeat: Callable[[int], Heartbeat | NoHeartbeat],
        group: GroupHandle | None = None,
        *,
        served_store: dist.Store | None = None,
    ) -> None:
        self.groups = [] if group is None else [group]
        """The process groups that the end destroys one by one. The first carries the world's collective calls."""
        self.is_launched = group is None
        self._start_heartbeat = start_heartbeat
        self._served_store = served_store
        self._num_exchanges = 0
        """The number of collective calls that this rank had begun when the last heartbeat was stopped."""
        self._last_words = ""
        self._lock = threading.Lock()
        self._heartbeat: Heartbeat | NoHeartbeat | None = start_heartbeat(0) if self.is_launched else None

    def running_heartbeat(self) -> Heartbeat | NoHeartbeat:
        """The heartbeat, which is started if it does not run. Raises a PeerError after `close`."""
        with self._lock:
            if self._last_words:
                reason = self._last_words.removeprefix("error ")  # the text of the error, or "left"
                raise PeerError(
                    f"this rank has left the others ({reason}), so nothing can be exchanged: make a new Trainer, or "
                    "call hl.World.current() again"
                )
            if self._heartbeat is None:
                self._heartbeat = self._start_heartbeat(self._num_exchanges)
            return self._heartbeat

    def pause_heartbeat(self) -> None:
        """Stop the heartbeat until the next collective call. Nobody waits for this rank meanwhile."""
        with self._lock:
            self._stop_heartbeat(LEFT)

    def close(self, error: str = "", *, broken: bool = False) -> None:
        """Tell the others why this rank leaves, and destroy the process groups. May be called twice.

        error: "" if it ended in good order. broken: whether a rank is lost.
        """
        with self._lock:
            if self._last_words:
                return
            self._last_words = f"error {error[:500]}" if error else LEFT
            if error and self._heartbeat is None:
                self._heartbeat = self._start_heartbeat(self._num_exchanges)  # so that the others can read the error
            heartbeat = self._heartbeat  # `_stop_heartbeat` sets the attribute to None
            self._stop_heartbeat(self._last_words)
            if not self.is_launched:
                for group in self.groups:
                    group.destroy(broken=broken)
            elif dist.is_initialized():
                with suppress(RuntimeError):
                    destroy_group(None, broken=broken)
            # A launcher's store ends with this object, and the others still write to it. The owner's may end with
            # this process: then the others have to read an error first. A stopped heartbeat writes no more, but can
            # still read the last messages of the others.
            must_wait = self._served_store is not None and (self.is_launched or error)
            if must_wait and isinstance(heartbeat, Heartbeat):
                heartbeat.wait_for_others(LEAVE_S)
            self._served_store = None

    def _stop_heartbeat(self, words: str) -> None:
        """Stop the heartbeat if it runs. words: its last message. The caller holds the lock."""
        heartbeat = self._heartbeat
        self._heartbeat = None
        if heartbeat is not None:
            self._num_exchanges = heartbeat.exchanges
            heartbeat.stop(words)


def destroy_group(group: dist.ProcessGroup | None, *, broken: bool) -> None:
    """Destroy a process group. None: the default one and all others. broken: whether a rank is lost."""
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if broken and abort is not None and dist.get_backend(group) == "nccl":
        abort(group)  # `destroy_process_group` would wait for collective calls that never end
    else:
        dist.destroy_process_group(group)
