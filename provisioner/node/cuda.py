"""Ask the CUDA driver whether the GPUs work, in a process of its own: a broken driver may hang or kill whoever asks.

Prints one JSON object: {"gpus": [{"name", "memory_bytes", "works"}], "error": "..."}.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any, Final

PROBE_BYTES: Final = 1 << 20
NAME_BYTES: Final = 256
LIBRARIES: Final = ("libcuda.so.1", "libcuda.so")


class CudaError(Exception):
    """The driver said no."""


class Driver:
    """The few calls that are needed."""

    def __init__(self, library: Any) -> None:
        self._library = library

    def call(self, name: str, *arguments: Any) -> None:
        """Call a driver function, or raise CudaError with its code."""
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise CudaError(f"{name} says {code}")

    def count(self) -> int:
        """Return how many GPUs there are."""
        count = ctypes.c_int()
        self.call("cuInit", 0)
        self.call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def look(self, index: int) -> dict[str, Any]:
        """Name a GPU, and send a megabyte there and back."""
        device, memory = ctypes.c_int(), ctypes.c_size_t()
        name = ctypes.create_string_buffer(NAME_BYTES)
        self.call("cuDeviceGet", ctypes.byref(device), index)
        self.call("cuDeviceGetName", name, NAME_BYTES, device)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(memory), device)
        found = {"name": name.value.decode(errors="replace"), "memory_bytes": memory.value, "works": "yes"}
        try:
            self._round_trip(device)
        except CudaError as error:
            found["works"] = str(error)
        return found

    def _round_trip(self, device: ctypes.c_int) -> None:
        context, there = ctypes.c_void_p(), ctypes.c_uint64()
        sent = ctypes.create_string_buffer(bytes(range(256)) * (PROBE_BYTES // 256), PROBE_BYTES)
        back = ctypes.create_string_buffer(PROBE_BYTES)
        self.call("cuCtxCreate_v2", ctypes.byref(context), 0, device)
        try:
            self.call("cuMemAlloc_v2", ctypes.byref(there), ctypes.c_size_t(PROBE_BYTES))
            self.call("cuMemcpyHtoD_v2", there, sent, ctypes.c_size_t(PROBE_BYTES))
            self.call("cuMemcpyDtoH_v2", back, there, ctypes.c_size_t(PROBE_BYTES))
        finally:
            self.call("cuCtxDestroy_v2", context)
        if back.raw != sent.raw:
            raise CudaError("memory came back with other bytes")


def look() -> dict[str, Any]:
    """Look at every GPU."""
    library = None
    for name in LIBRARIES:
        try:
            library = ctypes.CDLL(name)
            break
        except OSError:
            continue
    if library is None:
        return {"gpus": [], "error": "there is no libcuda here"}
    driver = Driver(library)
    try:
        return {"gpus": [driver.look(index) for index in range(driver.count())], "error": ""}
    except (CudaError, AttributeError) as error:
        return {"gpus": [], "error": str(error)}


def main() -> int:
    """Print what was found."""
    sys.stdout.write(json.dumps(look()) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
