"""Neighbour sampling and feature tables for other frameworks, with their arrays in and out.

A training loop in NumPy, CuPy, JAX, TensorFlow or Paddle uses two objects:

    seeds --> Sampler.sample --> edges of each layer -----------------+--> the framework's model
                             --> n_id --> Features[n_id] --> rows ----+

Arrays are not copied: `dlpack` makes a framework's array over the memory of a tensor, and back. `Sampler`
and `Features` can be sent to other processes of the host. Their pickle is a handle, and all processes read
the same memory (`shared`).

    sampler   `Sampler` and its samples; batches of hopline as another framework's arrays
    arrays    graphs and feature tables from other frameworks' arrays, and shared between processes
    dlpack    tensors as arrays of each framework, and back

Arguments and shapes are public, so change them with care. The folder imports from `budget` and the layers
below it.
"""

import importlib.util
import sys

from hopline.distributed.shared_memory import release
from hopline.interop.arrays import Features, graph, graph_from_edges, shared, table
from hopline.interop.dlpack import FRAMEWORKS, from_any, to
from hopline.interop.sampler import Adj, Sample, Sampler, batch_to

# TensorFlow and Triton each bring an LLVM. Triton's ends the process if it is loaded second. So it is
# loaded here, unless TensorFlow came before.
if "tensorflow" not in sys.modules and all(importlib.util.find_spec(name) for name in ("tensorflow", "triton")):
    importlib.import_module("triton._C.libtriton")

__all__ = [
    "FRAMEWORKS",
    "Adj",
    "Features",
    "Sample",
    "Sampler",
    "batch_to",
    "from_any",
    "graph",
    "graph_from_edges",
    "release",
    "shared",
    "table",
    "to",
]
