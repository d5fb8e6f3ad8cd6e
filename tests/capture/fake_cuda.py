"""Eight CUDA devices that compute nothing, in a torch that was built without CUDA.

Autograd and indexing ask torch for a guard of the tensors' device, which a build without CUDA does not have, so that
there fake tensors of such a device can run forward only. torch brings a guard for its own tests, `FakeGuardImpl`, with
eight devices: a library of a few lines registers it for CUDA and says that CUDA is there. A process that loaded it must
compute on nothing but fake tensors, so that it is a process of its own.
"""

from __future__ import annotations

import ctypes
import importlib.util
import shutil
from pathlib import Path

from tests.waits import run_program

_SOURCE = """
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/FakeGuardImpl.h>

namespace c10::impl {
using FakeCuda = FakeGuardImpl<DeviceType::CUDA>;
C10_REGISTER_GUARD_IMPL(CUDA, FakeCuda)
}  // namespace c10::impl

namespace at {
struct CUDAHooks : CUDAHooksInterface {  // torch looks this class up by its name
  CUDAHooks(CUDAHooksArgs) {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return false; }
  DeviceIndex deviceCount() const override { return c10::impl::kFakeGuardImplMaxDevices; }
};
REGISTER_CUDA_HOOKS(CUDAHooks)
}  // namespace at
"""

COMPILER = shutil.which("c++")


def compile_library(directory: Path) -> Path:
    """Compile the library, in a second or two; needs a C++ compiler."""
    assert COMPILER is not None
    source, library = directory / "fake_cuda.cpp", directory / "fake_cuda.so"
    source.write_text(_SOURCE)
    torch = importlib.util.find_spec("torch")
    assert torch is not None and torch.origin is not None
    torch_root = Path(torch.origin).parent  # not always below this environment: it may see another's
    run_program(
        [
            COMPILER, "-shared", "-fPIC", "-std=c++20", f"-I{torch_root / 'include'}", str(source), "-o", str(library),
            f"-L{torch_root / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch_root / 'lib'}",
        ],
        check=True, capture_output=True, timeout=120,
    )  # fmt: skip
    return library


def load_library(library: Path) -> None:
    """Load what `compile_library` made; before torch is imported, which looks for CUDA as it starts."""
    ctypes.CDLL(str(library))
