"""Tensors as arrays of other frameworks, and back, over the same memory.

DLPack is a protocol by which frameworks hand over an array without a copy: a pointer, a shape, strides and
a dtype. `from_any` makes a tensor over an array, and `to` makes an array over a tensor.

A framework that cannot share a tensor may copy it silently, or end the process. So `to` checks the tensor before it
calls the framework, and its error has the line of code that helps. A write on one side is seen on the other.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.dlpack import to_dlpack

ALIGNED_BYTES = 64
"""Bytes to which CPU memory must be aligned. JAX copies other memory, and TensorFlow ends the process."""


def from_any(array: Any) -> Tensor:
    """Return a tensor over the memory of any framework's array. Lists and numbers become a new tensor.

    Raises:
        TypeError: The argument is no array, or it is a variable, such as TensorFlow's.
        ValueError: The array cannot be shared with torch.

    Example:
        >>> import numpy as np
        >>> array = np.zeros(2)
        >>> hl.interop.from_any(array)[0] = 1.0
        >>> array
        array([1., 0.])
    """
    if isinstance(array, Tensor):
        return array
    if isinstance(array, list | tuple | range | int | float | np.generic):
        return torch.as_tensor(array)
    kind = f"{type(array).__module__.split('.')[0]}'s {type(array).__name__}"
    try:
        if isinstance(array, np.ndarray):
            with warnings.catch_warnings():
                # Torch has no read-only tensors: it makes a writable one and warns. No warning here, since graphs
                # and features are only read. `hl.interop.table` refuses to write into a read-only array.
                warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
                return torch.from_numpy(array)
        if hasattr(array, "__dlpack__"):
            return torch.from_dlpack(array)
    except (BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{kind} cannot be shared with torch ({error}): pass a plain array of numbers") from error
    if hasattr(array, "read_value"):  # a tf.Variable
        raise TypeError(f"{kind} is a variable: pass its value, variable.read_value()")
    raise TypeError(f"{kind} is no array that can be shared (it has no __dlpack__): pass one, or a list of numbers")


def _to_numpy(tensor: Tensor) -> Any:
    _check(tensor, "NumPy")
    if tensor.device.type != "cpu":
        raise ValueError("NumPy arrays are in host memory: type tensor.cpu() first, which copies, or ask for cupy")
    return _convert("NumPy", tensor, lambda: tensor.numpy())


def _to_jax(tensor: Tensor) -> Any:
    jax = _import("jax")
    _check(tensor, "JAX", must_be_aligned=True)
    is_64_bits = tensor.dtype in (torch.int64, torch.uint64, torch.float64, torch.complex128)
    if is_64_bits and not jax.config.jax_enable_x64:
        raise ValueError(
            f"JAX would copy {tensor.dtype} to 32 bits: type jax.config.update('jax_enable_x64', True) at the start, "
            "or give 32 bits, by tensor.int() or tensor.float(); a Sampler does so with index_dtype=torch.int32"
        )
    return _convert("JAX", tensor, lambda: jax.dlpack.from_dlpack(tensor, copy=False))


def _to_tensorflow(tensor: Tensor) -> Any:
    tensorflow = _import("tensorflow")
    _check(tensor, "TensorFlow", must_be_aligned=True)
    if tensor.is_cuda and not tensorflow.config.list_physical_devices("GPU"):
        raise ValueError("this TensorFlow sees no GPU: type tensor.cpu() first, which copies")
    # TensorFlow and Paddle take a capsule. JAX and CuPy take the tensor itself, and ask it for a capsule.
    from_dlpack = tensorflow.experimental.dlpack.from_dlpack
    return _convert("TensorFlow", tensor, lambda: from_dlpack(_capsule(tensor)))


def _to_paddle(tensor: Tensor) -> Any:
    paddle = _import("paddle")
    _check(tensor, "Paddle")
    if tensor.is_cuda and not paddle.is_compiled_with_cuda():
        raise ValueError("this Paddle has no CUDA: type tensor.cpu() first, which copies")
    return _convert("Paddle", tensor, lambda: paddle.utils.dlpack.from_dlpack(_capsule(tensor)))


def _capsule(tensor: Tensor) -> Any:
    """A DLPack capsule. It names no stream, so its reader would not wait for kernels in torch's queue: this does."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()
    return to_dlpack(tensor)


def _to_cupy(tensor: Tensor) -> Any:
    cupy = _import("cupy")
    _check(tensor, "CuPy")
    if not tensor.is_cuda:
        raise ValueError("CuPy arrays are on a GPU: type tensor.cuda() first, which copies, or ask for numpy")
    return _convert("CuPy", tensor, lambda: cupy.from_dlpack(tensor))


FRAMEWORKS: dict[str, Callable[[Tensor], Any]] = {
    "torch": lambda tensor: tensor,
    "numpy": _to_numpy,
    "jax": _to_jax,
    "tensorflow": _to_tensorflow,
    "paddle": _to_paddle,
    "cupy": _to_cupy,
}
"""The function that makes an array of each framework from a tensor."""


def to(tensor: Tensor, framework: str) -> Any:
    """Return the tensor as an array of the named framework, over the same memory.

    JAX takes its arrays for constant, so their tensors must not be written any more.

    Args:
        tensor: Contiguous, without a gradient. On the host for NumPy, on a GPU for CuPy.
        framework: "torch", "numpy", "jax", "tensorflow", "paddle" or "cupy".

    Raises:
        ValueError: There is no such framework, or it cannot share the tensor.
        ImportError: The framework is not installed.

    Example:
        >>> hl.interop.to(torch.arange(3), "numpy")
        array([0, 1, 2])
    """
    return converter(framework)(tensor)


def converter(framework: str) -> Callable[[Tensor], Any]:
    """The function that makes an array of a framework from a tensor. Raises a ValueError for an unknown name."""
    if framework not in FRAMEWORKS:
        raise ValueError(f"there is no framework {framework!r} here: choose from {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[framework]


def _import(name: str) -> Any:
    """Import a framework, or raise an ImportError that says how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        install = "cupy-cuda13x (or 12x)" if name == "cupy" else "'hopline[interop]'"
        raise ImportError(f"{name} cannot be imported ({error}): pip install {install}") from error


def _check(tensor: Tensor, framework: str, *, must_be_aligned: bool = False) -> None:
    """Refuse a tensor that cannot be shared as it is. The error says what to type."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"this is a {type(tensor).__name__}: type from_any(array) first, which makes a tensor of it")
    problem = ""
    if tensor.requires_grad:
        problem = "requires a gradient, which does not cross frameworks: type tensor.detach() first"
    elif tensor.layout != torch.strided:
        problem = "is sparse: type tensor.to_dense() first, or share its indices and values"
    elif not tensor.is_contiguous():
        problem = "is not contiguous: type tensor.contiguous() first, which copies"
    elif must_be_aligned and not tensor.is_cuda and tensor.numel() and tensor.data_ptr() % ALIGNED_BYTES:
        problem = f"does not start at a multiple of {ALIGNED_BYTES} bytes: type tensor.clone() first, which copies"
    if problem:
        raise ValueError(f"{framework} cannot share this tensor: it {problem}")


def _convert(framework: str, tensor: Tensor, convert: Callable[[], Any]) -> Any:
    """The result of `convert`. An error of the framework becomes a ValueError that says what to type."""
    try:
        return convert()
    except Exception as error:  # each framework has its own exception types
        raise ValueError(
            f"{framework} cannot share a tensor of {tensor.dtype} on {tensor.device} ({error}): type tensor.float(), "
            ".int() or .cpu() first, which copies"
        ) from error


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy if it is not contiguous or not aligned for all frameworks.

    A tensor over a NumPy array may be misaligned, since NumPy aligns its memory less strictly than torch.
    """
    tensor = tensor.contiguous()
    return tensor.clone() if tensor.data_ptr() % ALIGNED_BYTES else tensor
