"""What must hold for one framework: `python -m tests.interop.checks jax values`, in a process of its own.

Frameworks do not always bear each other (TensorFlow 2.21 and then Paddle 3.3 in one process end it), and memory can
only be measured where nothing else runs. Every check ends with an error, or prints what it measured.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import psutil
import torch

import hopline as hl
from hopline import interop
from hopline.data.synthetic import planted_partition

BATCHES = 1000
WARM_UP = 100
KEPT = 100
ALLOWED_MIB = 32.0
"""What 1000 batches may leave behind; a batch is more than 1 MiB, and 100 that are kept must exceed it."""
TYPES = ("float32", "float16", "bfloat16", "int32", "int16", "uint8", "bool", "int64", "float64")
LACKS: dict[str, tuple[str, ...]] = {"numpy": ("bfloat16",), "jax": ("int64", "float64")}
"""Types that a framework does not share as it is set up here, and must refuse."""


def module(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


def pointer(name: str, array: Any) -> int:
    """Where the framework itself says the array's memory is."""
    if name == "numpy":
        return array.ctypes.data
    if name == "jax":
        return array.unsafe_buffer_pointer()
    if name == "cupy":
        return array.data.ptr
    if name == "paddle":
        return array.data_ptr()
    capsule = module("tensorflow").experimental.dlpack.to_dlpack(array)  # TensorFlow has no other way to tell
    return torch.from_dlpack(capsule).data_ptr()


def own_array(name: str, dtype: str) -> Any:
    """An array that the framework has made: 0 .. 127 in that type."""
    values = np.arange(128).astype("float32" if dtype == "bfloat16" else dtype)
    if name == "numpy":
        return values
    if name == "jax":
        return module("jax").numpy.asarray(values).astype(dtype)
    if name == "cupy":
        return module("cupy").asarray(values)
    if name == "paddle":
        return module("paddle").to_tensor(values).astype(dtype)
    return module("tensorflow").cast(values, dtype)


def values(name: str, device: str) -> None:
    """Both directions: equal values at the same address."""
    lacking = LACKS.get(name, ())
    for dtype in (t for t in TYPES if t not in lacking):
        for shape in ((128,), (16, 8), (0, 4), ()):
            tensor = (torch.arange(128)[: torch.Size(shape).numel()].view(shape)).to(getattr(torch, dtype)).to(device)
            try:
                array = interop.to(tensor, name)
            except ValueError:
                assert (name, dtype) == ("cupy", "bfloat16")  # which only newer releases of CuPy know
                continue
            assert tuple(array.shape) == shape, (dtype, array.shape)
            assert dtype in str(array.dtype).lower(), (dtype, array.dtype)
            back = interop.from_any(array)
            assert torch.equal(back, tensor)
            if tensor.numel():
                assert pointer(name, array) == back.data_ptr() == tensor.data_ptr(), (dtype, shape)
        if name == "cupy" and dtype == "bfloat16":
            continue
        array_of_framework = own_array(name, dtype)
        tensor_of_array = interop.from_any(array_of_framework)
        assert tensor_of_array.data_ptr() == pointer(name, array_of_framework), dtype
        assert torch.equal(tensor_of_array.cpu(), torch.arange(128).to(getattr(torch, dtype)))
    print(f"{len(TYPES) - len(lacking)} types, both directions, same address")


def lifetime(name: str, device: str) -> None:
    """Either side may let go first."""
    array = interop.to(torch.full((1000,), 3.0, device=device), name)
    tensor = interop.from_any(own_array(name, "float32"))
    gc.collect()
    junk = [torch.full((1000,), 7.0, device=device) for _ in range(200)]
    assert interop.from_any(array).eq(3).all()
    assert tensor.cpu().tolist() == list(range(128))
    print(f"both alive beside {len(junk)} new arrays")


def dataset() -> hl.Dataset:
    return planted_partition(
        num_nodes=20_000, num_edges=400_000, num_classes=4, num_features=64, num_train=4096, num_valid=100, seed=1
    )


def batches(name: str, device: str, count: int, data: hl.Dataset, pad: bool = False) -> Iterator[tuple[Any, Any]]:
    """Batches as a user of the framework draws them: seeds, samples and rows are all its arrays."""
    sampler = interop.Sampler(data, (10, 5), device=device, to=name, index_dtype=torch.int32, pad=pad)
    rows = data.x.read(torch.arange(data.num_nodes)).to(device)
    features = interop.table(rows, to=name)
    for step in range(count):
        seeds = interop.to(torch.arange(256, dtype=torch.int32, device=device) + step % 50 * 256, name)
        sample = sampler.sample(seeds)
        yield sample, features[sample.n_id]


def sampling(name: str, device: str) -> None:
    """The framework's samples and rows are those that torch gets."""
    data = dataset()
    plain = interop.Sampler(data, (10, 5), device=device)
    for step, (sample, x) in enumerate(batches(name, device, 5, data)):
        expected = plain.sample(torch.arange(256) + step * 256)
        assert torch.equal(interop.from_any(sample.n_id).long(), expected.n_id)
        assert torch.equal(interop.from_any(x).cpu(), data.x.read(expected.n_id.cpu()))
        for one, other in zip(sample.adjs, expected.adjs, strict=True):
            assert torch.equal(interop.from_any(one.edge_index).long(), other.edge_index)
            assert torch.equal(interop.from_any(one.e_id).long(), other.e_id)
            assert one.size == other.size
    print("5 batches equal")


def used_mib(name: str, device: str) -> float:
    """What this process has in use; of a GPU by its allocators, since other processes may use the same GPU."""
    gc.collect()
    if device == "cpu":
        return psutil.Process().memory_info().rss / 2**20
    torch.cuda.synchronize()
    used = torch.cuda.memory_allocated()
    if name == "cupy":
        used += module("cupy").get_default_memory_pool().used_bytes()
    elif name == "jax":
        used += (module("jax").devices()[0].memory_stats() or {}).get("bytes_in_use", 0)
    return used / 2**20


def memory(name: str, device: str) -> None:
    """1000 batches leave nothing behind; 100 batches that are kept show that it would be seen."""
    data = dataset()
    # JAX remembers every shape it has seen, which takes tens of MiB before it levels off: it gets batches of one shape.
    source = batches(name, device, WARM_UP + BATCHES + KEPT, data, pad=name == "jax")

    def draw() -> tuple[Any, Any]:
        sample, x = next(source)
        assert interop.from_any(x).size(0) == sample.adjs[0].size[0]  # there and back
        return sample, x

    for _ in range(WARM_UP):
        draw()
    before = used_mib(name, device)
    for _ in range(BATCHES):
        draw()
    growth = used_mib(name, device) - before
    before = used_mib(name, device)
    held_batches = [draw() for _ in range(KEPT)]
    control = used_mib(name, device) - before
    print(f"{growth:.1f} MiB more after {BATCHES} batches; {control:.1f} MiB for {len(held_batches)} that were kept")
    assert growth < ALLOWED_MIB, f"{growth:.1f} MiB were left behind"
    assert control > 2 * ALLOWED_MIB, f"only {control:.1f} MiB: this check could not have failed"


def answer(pipe: Any, sampler: interop.Sampler, features: interop.Features) -> None:
    sample = sampler.sample([1, 2, 3])
    x = features[sample.n_id]
    pipe.send((type(x).__module__, interop.from_any(sample.n_id).tolist(), interop.from_any(x).cpu().tolist()))
    pipe.recv()
    rows = interop.from_any(features[torch.tensor([5], device=sampler.device)]).tolist()
    pipe.send((int(sampler.graph.indices[7]), rows))


def process(name: str, device: str) -> None:
    """A spawned process gets the same memory, in the framework's arrays."""
    data = dataset()
    sampler = interop.Sampler(data, (4, 4), device=device, to=name, index_dtype=torch.int32)
    features = interop.table(data.x, to=name)
    assert len(pickle.dumps((sampler, features))) < 4_000
    context: Any = multiprocessing.get_context("spawn")
    our_end, their_end = context.Pipe()
    child = context.Process(target=answer, args=(their_end, sampler, features))
    child.start()
    where, n_id, rows = our_end.recv()
    expected = interop.from_any(sampler.sample([1, 2, 3]).n_id)
    assert where.startswith(name) or (name == "jax" and where.startswith("jaxlib")), where
    assert n_id == expected.tolist()
    assert rows == data.x.read(expected.long().cpu()).tolist()
    features.write([5], torch.full((1, 64), 0.25))
    if device == "cpu":
        sampler.graph.indices[7] = 123  # written here, after the other process has opened it
    our_end.send(None)
    assert our_end.recv() == (int(sampler.graph.indices[7]), [[0.25] * 64])
    child.join(20)
    print("the other process read what was written here")


CHECKS: dict[str, Callable[[str, str], None]] = {
    check.__name__: check for check in (values, lifetime, sampling, memory, process)
}

if __name__ == "__main__":
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # else JAX takes most of a GPU at once
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    framework, check, where = (*sys.argv[1:], "cpu")[:3]
    CHECKS[check](framework, where)
