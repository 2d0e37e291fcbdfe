"""Plain `.npy` files: written in rows, read by memory map, never unpickled. Also arrays as tensors.

A file is NumPy's format 1.0 with a header of fixed size:

    0             HEADER_BYTES
    | header      | rows, row-major, little-endian ...

`ArrayWriter` writes the header last, when it knows the number of rows. A dtype and a shape have exactly one
header, so a reader compares bytes and parses nothing.
"""

from __future__ import annotations

import os
import warnings
import zlib
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

HEADER_BYTES = 128
"""Offset of the data in every file, in bytes: two cache lines. A header of four dimensions fits."""
BYTES_AT_ONCE = 1 << 24
"""Bytes that are written or read at once, which limits the memory for large arrays."""

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}
"""The dtypes that a dataset folder may hold, by their names in the manifest."""
UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)
"""Dtypes that a dataset does not hold, because torch has hardly any operations for them."""


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in the manifest. A dtype that cannot be stored is refused."""
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"Arrays of type {name} cannot be stored: convert it to one of {', '.join(DTYPES)}.")
    return name


def numpy_dtype(dtype: torch.dtype) -> np.dtype:
    """The dtype of the numbers in a file: little-endian, and uint16 for bfloat16, which NumPy lacks."""
    name = "uint16" if dtype == torch.bfloat16 else dtype_name(dtype)
    return np.dtype(name).newbyteorder("<")


def npy_header(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """The header of an array of this dtype and shape: always the same `HEADER_BYTES` bytes.

    It is what `numpy.save` would write, with more spaces before the final newline.
    """
    descr = numpy_dtype(dtype).str
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {tuple(shape)!r}, }}".encode()
    # Magic string and version, then the number of bytes after this prefix of 10 bytes.
    prefix = b"\x93NUMPY\x01\x00" + (HEADER_BYTES - 10).to_bytes(2, "little")
    if len(prefix) + len(text) + 1 > HEADER_BYTES:
        raise ValueError(f"An array of shape {list(shape)} has too many dimensions: store at most four.")
    return prefix + text.ljust(HEADER_BYTES - len(prefix) - 1) + b"\n"


def file_bytes(dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    """Size of the file of an array of this dtype and shape, header included."""
    return HEADER_BYTES + prod(shape) * dtype.itemsize


def read_npy_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """(shape, whether it is in Fortran order, dtype) of an `.npy` file, which is then at its first number."""
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    return read(file)


def as_tensor(array: Any, what: str = "an array") -> Tensor:
    """A tensor over the numbers of `array`, without a copy if possible.

    These are copied: unsigned numbers, which become signed, numbers of another byte order, and arrays with
    negative strides.

    array: A tensor, a NumPy array (which may be a read-only memory map) or a list.
    what: Name of the array, for error messages.
    """
    if isinstance(array, Tensor):
        if array.is_complex():
            raise _not_numbers_error(what, str(array.dtype).removeprefix("torch."))
        if array.dtype not in UNSIGNED:
            return array
        array = array.cpu().numpy()

    array = np.asarray(array)
    # "biuf": bool, signed, unsigned and floating-point. Torch has no real numbers of more than 8 bytes.
    if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
        raise _not_numbers_error(what, str(array.dtype))
    # uint8 stays: torch has all operations for it.
    if array.dtype.kind == "u" and array.dtype.itemsize > 1:
        return _from_numpy(_to_signed(array, what))
    if not array.dtype.isnative or any(stride < 0 for stride in array.strides):
        array = np.ascontiguousarray(array, array.dtype.newbyteorder("="))
    return _from_numpy(array)


def _not_numbers_error(what: str, dtype: str) -> ValueError:
    return ValueError(
        f"{what} holds {dtype} where numbers should be: give numbers, whole or floating-point, of at most 64 bits."
    )


def _to_signed(array: np.ndarray, what: str) -> np.ndarray:
    """Unsigned numbers as int32 or int64. A number that int64 cannot hold is refused."""
    max_int64 = np.iinfo(np.int64).max
    if array.dtype.itemsize == 8 and array.size and array.max() > max_int64:
        numbers = array.reshape(-1)
        position = int(np.argmax(numbers > max_int64))
        raise ValueError(
            f"{what} holds {numbers[position]} at position {position}, which int64 cannot hold: give smaller numbers."
        )
    return array.astype(np.int32 if array.dtype.itemsize == 2 else np.int64)


def _from_numpy(array: np.ndarray) -> Tensor:
    """A tensor over the memory of an array, without torch's warning about read-only arrays."""
    with warnings.catch_warnings():
        # Torch cannot mark a tensor as read-only, and warns. Tables and graphs are not written in place.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)


def map_npy(path: Path, dtype: torch.dtype, shape: tuple[int, ...], *, copy_on_write: bool = False) -> Tensor:
    """The array in a file as a memory-mapped tensor. The caller has checked size and header.

    copy_on_write: Whether the tensor may be written. A page that is written becomes a private copy.
    """
    if not prod(shape):  # a map cannot be empty
        return torch.empty(shape, dtype=dtype)
    mode = "c" if copy_on_write else "r"
    array = np.memmap(path, mode=mode, dtype=numpy_dtype(dtype), offset=HEADER_BYTES, shape=shape)
    tensor = _from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == torch.bfloat16 else tensor


def as_bytes(rows: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, without a copy."""
    return rows.reshape(-1).view(torch.uint8).numpy().data


def checksum_text(crc: int) -> str:
    """A CRC-32 as the manifest writes it."""
    return f"crc32:{crc:08x}"


class ArrayWriter:
    """Writes one `.npy` file in rows: `append` as often as needed, then `close`.

    After an error, `abandon` takes the place of `close`. The writer owns the open file. Rows are written
    `BYTES_AT_ONCE` at a time, and their checksum is computed on the way.
    """

    def __init__(self, path: Path, dtype: torch.dtype, row_shape: tuple[int, ...] = ()) -> None:
        self.path = path
        self.dtype = dtype
        self.row_shape = tuple(row_shape)
        self.num_rows = 0
        self.crc = 0
        self._header = npy_header(dtype, (0, *row_shape))  # refuses what cannot be stored before any work
        self._file: BinaryIO = path.open("wb")
        self._file.write(self._header)

    def append(self, rows: Tensor) -> None:
        """Write rows [n, *row_shape], on the CPU, behind those written before, in the dtype of the file."""
        assert tuple(rows.shape[1:]) == self.row_shape, (rows.shape, self.row_shape)
        row_bytes = prod(self.row_shape) * self.dtype.itemsize
        rows_at_once = max(1, BYTES_AT_ONCE // max(1, row_bytes))
        for start in range(0, rows.size(0), rows_at_once):
            chunk = rows[start : start + rows_at_once].to(self.dtype).contiguous()
            data = as_bytes(chunk)
            self._file.write(data)
            self.crc = zlib.crc32(data, self.crc)
        self.num_rows += rows.size(0)

    def close(self) -> None:
        """Write the header with the number of rows, and wait until the file is on the disk. May be called twice."""
        if self._file.closed:
            return
        self._file.seek(0)
        self._file.write(npy_header(self.dtype, self.shape))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Close the file as it is, after an error."""
        with suppress(OSError):  # on a full disk, the bytes that are still buffered do not fit either
            self._file.close()

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.num_rows, *self.row_shape)
