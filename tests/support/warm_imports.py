"""What the server of `tests.support.warm` imports once, and how processes forked from it differ from spawned ones."""

from __future__ import annotations

import importlib
import multiprocessing
import pkgutil

import hopline
import hopline.distributed.launch
from tests.support import warm

for module in pkgutil.walk_packages(hopline.__path__, "hopline."):
    # Triton is left to the processes that use it: whether it is interpreted is decided when it is imported.
    if not module.name.startswith("hopline.ops.gpu.sampling") and module.name != "hopline.__main__":
        importlib.import_module(module.name)

# A rank ends with its parent, by the system's help. Here the parent in the system's sense is the server, so the check
# would end every rank at once. The tests of that have the marker `spawn`.
hopline.distributed.launch._end_with_parent = lambda parent: None
# A command that was forked from the server starts ranks.
multiprocessing.get_context = warm.get_context
