"""Lists the device types that ship, with the peak figures of their data sheets.

``docs/devices.md`` says what each figure was compared with. Rates of fp64 that no sheet states are those of fp32 by 64
from Ampere's GA10x on, by 32 in Turing: so many units of fp32 there are per unit of fp64.
"""

from functools import lru_cache

from hetero.spec.devices import DataSheet, DeviceCatalogue, DeviceType

_MULTIPROCESSORS = {
    **dict.fromkeys(("V100-16", "V100-32", "V100S-32"), 80),
    **{"T4": 40, "RTX-2080Ti": 68, "Titan-RTX": 72},
    **dict.fromkeys(("A100-40", "A100-80", "A800"), 108),
    **{"A30": 56, "A10": 72, "A10G": 80, "A40": 84, "A6000": 84, "RTX-3090": 82},
    **{"RTX-4090": 128, "RTX-6000-Ada": 142, "L4": 58, "L20": 92, "L40S": 142},
    **dict.fromkeys(("H100", "H100-NVL", "H800", "H200", "GH200"), 132),
    **{"H100-PCIe": 114, "H20": 78, "B200": 148},
}
"""Streaming multiprocessors as the architecture whitepapers have them."""


def _gpu(
    name: str,
    memory_gib: int,
    capability: tuple[int, int] | None,
    cuda_name: str,
    gb_per_s: tuple[float, float | None],
    tflops: tuple[float | None, float, float | None, float | None, float, float | None],
    source: str,
) -> DeviceType:
    """A GPU; ``gb_per_s`` of memory and NVLink, ``tflops`` in the order fp64, fp32, tf32, bf16, fp16, fp8."""
    memory, nvlink = gb_per_s
    fp64, fp32, tf32, bf16, fp16, fp8 = tflops
    return DeviceType(
        name=name,
        memory_gib=memory_gib,
        compute_capability=capability,
        cuda_name=cuda_name,
        data_sheet=DataSheet(
            memory_gb_per_s=memory,
            fp64_tflops=fp64,
            fp32_tflops=fp32,
            tf32_tflops=tf32,
            bf16_tflops=bf16,
            fp16_tflops=fp16,
            fp8_tflops=fp8,
            nvlink_gb_per_s=nvlink,
            multiprocessors=_MULTIPROCESSORS.get(name),
            source=source,
        ),
    )


_VOLTA = "NVIDIA V100 data sheet, SXM2"
_TURING = "NVIDIA Turing GPU architecture whitepaper"
_A100 = "NVIDIA A100 data sheet, SXM"
_GA102 = "NVIDIA Ampere GA102 GPU architecture whitepaper"
_ADA = "NVIDIA Ada GPU architecture whitepaper"
_HOPPER = "NVIDIA H100 data sheet, SXM"

SHIPPED_DEVICES = DeviceCatalogue(
    (
        DeviceType(name="cpu"),
        _gpu("V100-16", 16, (7, 0), "*V100-*16GB*", (900, 300), (7.8, 15.7, None, None, 125, None), _VOLTA),
        _gpu("V100-32", 32, (7, 0), "*V100-*32GB*", (900, 300), (7.8, 15.7, None, None, 125, None), _VOLTA),
        _gpu(
            "V100S-32",
            32,
            (7, 0),
            "*V100S-*32GB*",
            (1134, None),
            (8.2, 16.4, None, None, 130, None),
            "NVIDIA V100 data sheet, V100S",
        ),
        _gpu("T4", 16, (7, 5), "* T4", (320, None), (0.25, 8.1, None, None, 65, None), "NVIDIA T4 data sheet"),
        _gpu("RTX-2080Ti", 11, (7, 5), "*RTX 2080 Ti", (616, 100), (0.42, 13.4, None, None, 53.8, None), _TURING),
        _gpu("Titan-RTX", 24, (7, 5), "*TITAN RTX", (672, 100), (0.51, 16.3, None, None, 130.5, None), _TURING),
        _gpu("A100-40", 40, (8, 0), "*A100-*40GB*", (1555, 600), (9.7, 19.5, 156, 312, 312, None), _A100),
        _gpu("A100-80", 80, (8, 0), "*A100*80GB*", (2039, 600), (9.7, 19.5, 156, 312, 312, None), _A100),
        _gpu(
            "A800", 80, (8, 0), "*A800*", (2039, 400), (9.7, 19.5, 156, 312, 312, None), "NVIDIA A800 data sheet, SXM"
        ),
        _gpu("A30", 24, (8, 0), "* A30", (933, 200), (5.2, 10.3, 82, 165, 165, None), "NVIDIA A30 data sheet"),
        _gpu("A10", 24, (8, 6), "* A10", (600, None), (0.49, 31.2, 62.5, 125, 125, None), "NVIDIA A10 data sheet"),
        _gpu("A10G", 24, (8, 6), "* A10G", (600, None), (0.55, 35, 35, 70, 70, None), "NVIDIA A10G data sheet"),
        _gpu("A40", 48, (8, 6), "* A40", (696, 112.5), (0.58, 37.4, 74.8, 149.7, 149.7, None), "NVIDIA A40 data sheet"),
        _gpu("A6000", 48, (8, 6), "*RTX A6000", (768, 112.5), (0.6, 38.7, 77.4, 154.8, 154.8, None), _GA102),
        _gpu("RTX-3090", 24, (8, 6), "*RTX 3090", (936, 112.5), (0.56, 35.6, 35.6, 71, 71, None), _GA102),
        _gpu("RTX-4090", 24, (8, 9), "*RTX 4090", (1008, None), (1.29, 82.6, 82.6, 165.2, 165.2, 330.3), _ADA),
        _gpu("RTX-6000-Ada", 48, (8, 9), "*RTX 6000 Ada*", (960, None), (1.42, 91.1, 182.1, 364.2, 364.2, 728.5), _ADA),
        _gpu("L4", 24, (8, 9), "* L4", (300, None), (0.47, 30.3, 60, 121, 121, 242.5), "NVIDIA L4 data sheet"),
        _gpu("L20", 48, (8, 9), "* L20", (864, None), (None, 59.8, 59.8, 119.5, 119.5, 239), "NVIDIA L20 data sheet"),
        _gpu("L40S", 48, (8, 9), "* L40S", (864, None), (1.43, 91.6, 183, 362, 362, 733), "NVIDIA L40S data sheet"),
        _gpu("H100", 80, (9, 0), "*H100*HBM3", (3350, 900), (34, 67, 494.5, 989.5, 989.5, 1979), _HOPPER),
        _gpu(
            "H100-PCIe",
            80,
            (9, 0),
            "*H100 PCIe*",
            (2000, 600),
            (26, 51, 378, 756, 756, 1513),
            "NVIDIA H100 data sheet of 2022, PCIe",
        ),
        _gpu(
            "H100-NVL",
            94,
            (9, 0),
            "*H100 NVL*",
            (3900, 600),
            (30, 60, 417.5, 835.5, 835.5, 1670.5),
            "NVIDIA H100 data sheet, NVL",
        ),
        _gpu(
            "H800", 80, (9, 0), "*H800*", (3350, 400), (1, 67, 494.5, 989.5, 989.5, 1979), "NVIDIA H800 data sheet, SXM"
        ),
        _gpu("H20", 96, (9, 0), "* H20", (4000, 900), (1, 44, 74, 148, 148, 296), "NVIDIA H20 data sheet"),
        _gpu(
            "H200",
            141,
            (9, 0),
            "* H200",
            (4800, 900),
            (34, 67, 494.5, 989.5, 989.5, 1979),
            "NVIDIA H200 data sheet, SXM",
        ),
        _gpu(
            "GH200",
            96,
            (9, 0),
            "*GH200 ???GB",
            (4000, 900),
            (34, 67, 494, 990, 990, 1979),
            "NVIDIA GH200 data sheet, 96 GB HBM3",
        ),
        _gpu(
            "B200",
            180,
            (10, 0),
            "* B200*",
            (7700, 1800),
            (37, 75, 1125, 2250, 2250, 4500),
            "NVIDIA HGX B200 data sheet, an eighth of the system",
        ),
        _gpu(
            "GB200",
            186,
            (10, 0),
            "* GB200*",
            (8000, 1800),
            (40, 80, 1250, 2500, 2500, 5000),
            "NVIDIA GB200 NVL72 data sheet, a 72nd of the system",
        ),
        # Planned for by their data sheets only: nothing of this program has run on ROCm.
        _gpu(
            "MI250X",
            64,
            None,
            "*MI250X*",
            (1638, None),
            (23.9, 47.9, None, 191.5, 191.5, None),
            "AMD Instinct MI250X data sheet, one of its two dies, which are a device each",
        ),
        _gpu(
            "MI300X",
            192,
            None,
            "*MI300X*",
            (5300, 896),
            (81.7, 163.4, 653.7, 1307.4, 1307.4, 2614.9),
            "AMD Instinct MI300X data sheet",
        ),
    )
)


@lru_cache
def shipped_and(described: tuple[DeviceType, ...]) -> DeviceCatalogue:
    """The devices that a file may name which itself describes some; its own count where a name ships as well."""
    return SHIPPED_DEVICES.plus(described)
