"""The structs and numbers that the emulated libraries declare by hand, against the real headers where there are any."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sysconfig
from collections.abc import Iterator
from enum import IntEnum
from importlib import import_module
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "csrc"

# Ours, the header's.
CUDA_STRUCTS = {
    "Location": ("CUmemLocation", {"type": "type", "id": "id"}),
    "AllocationProp": (
        "CUmemAllocationProp",
        {
            "type": "type",
            "requested_handle_types": "requestedHandleTypes",
            "location": "location",
            "win32_handle_meta_data": "win32HandleMetaData",
            "flags": "allocFlags",
            "flags.compression_type": "allocFlags.compressionType",
            "flags.rdma_capable": "allocFlags.gpuDirectRDMACapable",
            "flags.usage": "allocFlags.usage",
            "flags.reserved": "allocFlags.reserved",
        },
    ),
    "AccessDesc": ("CUmemAccessDesc", {"location": "location", "flags": "flags"}),
    "FabricHandle": ("CUmemFabricHandle", {"data": "data"}),
    "Uuid": ("CUuuid", {"bytes": "bytes"}),
}
CUDA_NUMBERS = {
    "vmm::kSuccess": "CUDA_SUCCESS",
    "vmm::kInvalidValue": "CUDA_ERROR_INVALID_VALUE",
    "vmm::kOutOfMemory": "CUDA_ERROR_OUT_OF_MEMORY",
    "vmm::kInvalidDevice": "CUDA_ERROR_INVALID_DEVICE",
    "vmm::kOperatingSystem": "CUDA_ERROR_OPERATING_SYSTEM",
    "vmm::kCaptureUnsupported": "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
    "vmm::emulation::kNotInitialized": "CUDA_ERROR_NOT_INITIALIZED",
    "vmm::emulation::kDeinitialized": "CUDA_ERROR_DEINITIALIZED",
    "vmm::emulation::kNotSupported": "CUDA_ERROR_NOT_SUPPORTED",
    "vmm::kAccessNone": "CU_MEM_ACCESS_FLAGS_PROT_NONE",
    "vmm::kAccessRead": "CU_MEM_ACCESS_FLAGS_PROT_READ",
    "vmm::kAccessReadWrite": "CU_MEM_ACCESS_FLAGS_PROT_READWRITE",
    "vmm::emulation::kNoDevices": "CUDA_ERROR_NO_DEVICE",
    "kInvalidContext": "CUDA_ERROR_INVALID_CONTEXT",
    "kInvalidHandle": "CUDA_ERROR_INVALID_HANDLE",
    "kNotFound": "CUDA_ERROR_NOT_FOUND",
    "kContextIsDestroyed": "CUDA_ERROR_CONTEXT_IS_DESTROYED",
    "kNotPermitted": "CUDA_ERROR_NOT_PERMITTED",
    "kAllocationPinned": "CU_MEM_ALLOCATION_TYPE_PINNED",
    "kLocationDevice": "CU_MEM_LOCATION_TYPE_DEVICE",
    "kLocationHost": "CU_MEM_LOCATION_TYPE_HOST",
    "kLocationHostNumaCurrent": "CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT",
    "kGranularityMinimum": "CU_MEM_ALLOC_GRANULARITY_MINIMUM",
    "kGranularityRecommended": "CU_MEM_ALLOC_GRANULARITY_RECOMMENDED",
    "kHandleNone": "CU_MEM_HANDLE_TYPE_NONE",
    "kHandlePosixFile": "CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR",
    "kHandleFabric": "CU_MEM_HANDLE_TYPE_FABRIC",
    "kCompressionGeneric": "CU_MEM_ALLOCATION_COMP_GENERIC",
    "kMemoryTypeDevice": "CU_MEMORYTYPE_DEVICE",
    "kCaptureNone": "CU_STREAM_CAPTURE_STATUS_NONE",
    "kCaptureActive": "CU_STREAM_CAPTURE_STATUS_ACTIVE",
    "kCaptureGlobal": "CU_STREAM_CAPTURE_MODE_GLOBAL",
    "kCaptureRelaxed": "CU_STREAM_CAPTURE_MODE_RELAXED",
    "kStreamNonBlocking": "CU_STREAM_NON_BLOCKING",
    "kSymbolFound": "CU_GET_PROC_ADDRESS_SUCCESS",
    "kSymbolNotFound": "CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND",
    "kSymbolVersionNotSufficient": "CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT",
    "kMultiprocessorCount": "CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT",
    "kIntegrated": "CU_DEVICE_ATTRIBUTE_INTEGRATED",
    "kPciBusId": "CU_DEVICE_ATTRIBUTE_PCI_BUS_ID",
    "kPciDeviceId": "CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID",
    "kPciDomainId": "CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID",
    "kUnifiedAddressing": "CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING",
    "kComputeCapabilityMajor": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
    "kComputeCapabilityMinor": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
    "kVirtualMemorySupported": "CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED",
    "kPosixFileSupported": "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED",
    "kRdmaWithVmmSupported": "CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED",
    "kFabricSupported": "CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED",
    "kPointerMemoryType": "CU_POINTER_ATTRIBUTE_MEMORY_TYPE",
    "kPointerDevicePointer": "CU_POINTER_ATTRIBUTE_DEVICE_POINTER",
    "kPointerDeviceOrdinal": "CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL",
    "kPointerRangeStart": "CU_POINTER_ATTRIBUTE_RANGE_START_ADDR",
    "kPointerRangeSize": "CU_POINTER_ATTRIBUTE_RANGE_SIZE",
    "kPointerMapped": "CU_POINTER_ATTRIBUTE_MAPPED",
    "kPointerAllowedHandleTypes": "CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES",
    "kPointerAccessFlags": "CU_POINTER_ATTRIBUTE_ACCESS_FLAGS",
    "kPointerMappingSize": "CU_POINTER_ATTRIBUTE_MAPPING_SIZE",
    "kPointerMappingBase": "CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR",
}

HIP_STRUCTS = {
    "Location": ("hipMemLocation", {"type": "type", "id": "id"}),
    "AllocationProp": (
        "hipMemAllocationProp",
        {
            "type": "type",
            "requested_handle_type": "requestedHandleType",
            "location": "location",
            "win32_handle_meta_data": "win32HandleMetaData",
            "flags": "allocFlags",
            "flags.compression_type": "allocFlags.compressionType",
            "flags.rdma_capable": "allocFlags.gpuDirectRDMACapable",
            "flags.usage": "allocFlags.usage",
        },
    ),
    "AccessDesc": ("hipMemAccessDesc", {"location": "location", "flags": "flags"}),
    "Uuid": ("hipUUID", {"bytes": "bytes"}),
}
HIP_NUMBERS = {
    "vmm::kInvalidValue": "hipErrorInvalidValue",
    "vmm::kOutOfMemory": "hipErrorOutOfMemory",
    "vmm::kInvalidDevice": "hipErrorInvalidDevice",
    "vmm::emulation::kNotInitialized": "hipErrorNotInitialized",
    "vmm::emulation::kNoDevices": "hipErrorNoDevice",
    "vmm::emulation::kNotSupported": "hipErrorNotSupported",
    "vmm::kAccessReadWrite": "hipMemAccessFlagsProtReadWrite",
    "kInvalidHandle": "hipErrorInvalidHandle",
    "kUnknown": "hipErrorUnknown",
    "kAllocationPinned": "hipMemAllocationTypePinned",
    "kLocationDevice": "hipMemLocationTypeDevice",
    "kGranularityMinimum": "hipMemAllocationGranularityMinimum",
    "kGranularityRecommended": "hipMemAllocationGranularityRecommended",
    "kHandlePosixFile": "hipMemHandleTypePosixFileDescriptor",
    "kCaptureGlobal": "hipStreamCaptureModeGlobal",
    "kCaptureRelaxed": "hipStreamCaptureModeRelaxed",
    "kIntegrated": "hipDeviceAttributeIntegrated",
    "kPciBusId": "hipDeviceAttributePciBusId",
    "kPciDeviceId": "hipDeviceAttributePciDeviceId",
    "kPciDomainId": "hipDeviceAttributePciDomainId",
    "kRdmaWithVmmSupported": "hipDeviceAttributeGPUDirectRDMAWithHipVMMSupported",
    "kFabricSupported": "hipDeviceAttributeHandleTypeFabricSupported",
    "kVirtualMemorySupported": "hipDeviceAttributeVirtualMemoryManagementSupported",
    "kPointerDeviceOrdinal": "HIP_POINTER_ATTRIBUTE_DEVICE_ORDINAL",
    "kPointerRangeStart": "HIP_POINTER_ATTRIBUTE_RANGE_START_ADDR",
    "kPointerRangeSize": "HIP_POINTER_ATTRIBUTE_RANGE_SIZE",
}


def site_packages() -> Path:
    return Path(sysconfig.get_paths()["purelib"])


def cuda_folders() -> Iterator[Path]:
    compiler = shutil.which("nvcc")
    if compiler:
        yield Path(compiler).resolve().parents[1] / "include"
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(variable):
            yield Path(home, "include")
    yield Path("/usr/local/cuda/include")
    yield from site_packages().glob("nvidia/*/include")


def hip_folders() -> Iterator[Path]:
    homes = (os.environ.get("ROCM_PATH"), os.environ.get("ROCM_HOME"), "/opt/rocm", "/usr")
    folders = [Path(home, "include") for home in homes if home]
    for folder in (*folders, *site_packages().glob("_rocm_sdk_*/include")):
        version = folder / "hip/hip_version.h"
        found = re.search(r"HIP_VERSION_MAJOR (\d+)", version.read_text()) if version.is_file() else None
        if found and int(found[1]) >= 6:  # before, the structs were others
            yield folder


def has(ours: str, theirs: str) -> str:
    return f'static_assert(static_cast<long>({ours}) == static_cast<long>({theirs}), "{ours} is not {theirs}");\n'


def checks(space: str, structs: dict[str, tuple[str, dict[str, str]]], numbers: dict[str, str]) -> str:
    text = f"using namespace {space};\n"
    for ours, (theirs, fields) in structs.items():
        text += has(f"sizeof({space}::{ours})", f"sizeof({theirs})")
        text += has(f"alignof({space}::{ours})", f"alignof({theirs})")
        for our_field, their_field in fields.items():
            text += has(f"offsetof({space}::{ours}, {our_field})", f"offsetof({theirs}, {their_field})")
            our_size = f"sizeof(std::declval<{space}::{ours}>().{our_field})"
            text += has(our_size, f"sizeof(std::declval<{theirs}>().{their_field})")
    return text + "".join(has(ours, theirs) for ours, theirs in numbers.items())


def compile_against(header: str, folders: Iterator[Path], own: str, text: str, tmp_path: Path, *options: str) -> None:
    folder = next((folder for folder in folders if (folder / header).is_file()), None)
    if folder is None:
        pytest.skip(f"no {header} on this machine, or too old a one")
    compile_text(f'#include <{header}>\n#include "{own}"\n{text}', tmp_path, f"-isystem{folder}", *options)


def compile_text(text: str, tmp_path: Path, *options: str) -> None:
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler on this machine")
    source = tmp_path / "layouts.cpp"
    includes = ("<cstddef>", "<utility>", '"core/access.h"', '"emulation/emulation.h"')
    source.write_text("".join(f"#include {name}\n" for name in includes) + text)
    command = [compiler, "-std=c++17", "-fsyntax-only", f"-I{SOURCES}", *options, str(source)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_cuda_declarations_are_those_of_the_real_header(tmp_path: Path) -> None:
    text = checks("vmm::cuda", CUDA_STRUCTS, CUDA_NUMBERS)
    compile_against("cuda.h", cuda_folders(), "cuda/abi.h", text, tmp_path)


def test_hip_declarations_are_those_of_the_real_header(tmp_path: Path) -> None:
    text = checks("vmm::hip", HIP_STRUCTS, HIP_NUMBERS)
    compile_against("hip/hip_runtime_api.h", hip_folders(), "hip/abi.h", text, tmp_path, "-D__HIP_PLATFORM_AMD__")


def test_hip_numbers_are_those_of_the_binding(tmp_path: Path) -> None:
    hip = import_module("hip").hip
    enums = [kind for kind in vars(hip).values() if isinstance(kind, type) and issubclass(kind, IntEnum)]
    known = {name: int(value) for kind in enums for name, value in kind.__members__.items()}
    text = "".join(has(ours, str(known[theirs])) for ours, theirs in HIP_NUMBERS.items())
    compile_text(f'#include "hip/abi.h"\nusing namespace vmm::hip;\n{text}', tmp_path)


def test_a_wrong_declaration_is_seen(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="kCaptureActive is not CU_STREAM_CAPTURE_STATUS_NONE"):
        compile_against(
            "cuda.h",
            cuda_folders(),
            "cuda/abi.h",
            checks("vmm::cuda", {}, {"kCaptureActive": "CU_STREAM_CAPTURE_STATUS_NONE"}),
            tmp_path,
        )
