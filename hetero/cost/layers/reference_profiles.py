"""Chooses the measured profiles that an estimate is made from.

The profiles of the device itself come first; those of one arithmetic only, since TF32 is several times as fast as
fp32. Another device, where that is allowed, takes as many times its kernels' seconds as the nearest one that was
measured; in an arithmetic that no profile of the device has, kernels take what was published of them (:mod:`.kernels`).
"""

import dataclasses
from collections.abc import Mapping, Sequence

from hetero.cost.layers.confidence import Confidence
from hetero.cost.layers.kernels import Kernels, achieved_rates
from hetero.cost.layers.layer_kernels import ComputePass
from hetero.cost.layers.throughput_fit import NOMINAL_HOST, Throughput, fit, nominal
from hetero.errors import ConfigError
from hetero.plan.ir import Precision
from hetero.spec.devices import DataSheet, DeviceType
from hetero.spec.profile import Arithmetic, LayerKind, Profile, ProfileStore
from hetero.units import GB

UPDATE_BYTES: Mapping[Precision, float] = {"fp64": 280, "fp32": 140, "bf16": 61, "fp16": 61}
"""Bytes per parameter that an update would move at the data sheet's bandwidth. In fp32 about what the shipped profiles
show (medians of 133 to 184), which were made without a fused Adam. In half precision counted: a fused Adam reads fp32
weight, gradient and two moments and writes all but the gradient (28), norm and clipping read the gradient twice and
write it (12), the half-precision copy is written from the weight (6); at three quarters of the bandwidth."""


class ReferenceProfiles:
    """Throughputs by device, kind of layer and pass; each is fitted once.

    Args:
        precision: of the model to be estimated.
        arithmetic: of its fp32 products; by default what most profiles of a device have.
        data_sheets: estimate devices without any profile as well.
    """

    def __init__(
        self, profiles: ProfileStore, *, precision: Precision, arithmetic: Arithmetic | None, data_sheets: bool
    ) -> None:
        self.profiles = profiles
        self._precision = precision
        self._arithmetic = arithmetic
        self._data_sheets = data_sheets
        self._throughputs: dict[tuple[str, LayerKind, ComputePass], tuple[Throughput, Confidence]] = {}

    def throughput(self, device: str, kind: LayerKind, compute_pass: ComputePass) -> tuple[Throughput, Confidence]:
        """What ``device`` achieves on layers of ``kind``.

        Raises:
            ConfigError: ``device`` has no profile, and data sheets are not allowed or there are none.
        """
        key = device, kind, compute_pass
        if key not in self._throughputs:
            self._throughputs[key] = self._fit(device, kind, compute_pass)
        return self._throughputs[key]

    def arithmetic_of(self, device: str) -> Arithmetic:
        """The number format of the products that are estimated on ``device``.

        Raises:
            ConfigError: as :meth:`throughput`.
        """
        return self._wanted_arithmetic(self._of_one_arithmetic(device)[0])

    def update_s_per_parameter(self, device: str) -> tuple[float, Confidence]:
        """Seconds of the update of one parameter: the median over the blocks measured on ``device`` in this precision,
        else :data:`UPDATE_BYTES` over its memory bandwidth.

        Raises:
            ConfigError: ``device`` has neither a measured update nor a data sheet.
        """
        rates = sorted(
            update.update_s / memory.parameters
            for profile in self.profiles
            if profile.device == device and profile.precision == self._precision
            for update in profile.updates
            if update.kind == "block" and (memory := profile.memory_of("block", tp=update.tp)) is not None
        )
        if rates:
            return rates[len(rates) // 2], Confidence.ESTIMATED
        wanted = f"update of a block in {self._precision}"
        return UPDATE_BYTES[self._precision] / (
            self.data_sheet(device, wanted=wanted).memory_gb_per_s * GB
        ), Confidence.DATA_SHEET

    def _fit(self, device: str, kind: LayerKind, compute_pass: ComputePass) -> tuple[Throughput, Confidence]:
        references = self._of_one_arithmetic(device)
        own = references[0].device == device
        have, wanted = references[0].arithmetic, self._wanted_arithmetic(references[0])
        if wanted != have:
            # What layers reach with other units says nothing of these.
            basis = Confidence.ESTIMATED if achieved_rates(self._type(device)).source else Confidence.DATA_SHEET
            return nominal(self._kernels(device, wanted), compute_pass, references if own else ()), basis
        kernels = self._kernels(references[0].device, have)
        fitted = fit(references, kernels, kind=kind, compute_pass=compute_pass)
        if fitted is None and kind != "block":
            # A head is a product and a softmax, an embedding is rows: both are parts of a block.
            fitted = fit(references, kernels, kind="block", compute_pass=compute_pass)
        if fitted is None:
            raise ConfigError(f"no profile of {references[0].device!r} has the {compute_pass} of a block; measure one")
        if own:
            return fitted, Confidence.ESTIMATED
        return dataclasses.replace(fitted, kernels=self._kernels(device, wanted)), Confidence.DATA_SHEET

    def _kernels(self, device: str, arithmetic: str) -> Kernels:
        # The host CPU has no data sheet; whatever is asked of it has been measured on it.
        sheet = self._type(device).data_sheet or NOMINAL_HOST
        return Kernels(self._type(device), sheet, arithmetic=arithmetic)

    def _type(self, device: str) -> DeviceType:
        return self.profiles.device_types.of(device)

    def _wanted_arithmetic(self, reference: Profile) -> Arithmetic:
        if self._precision == "fp32":
            return self._arithmetic or (reference.arithmetic if reference.precision == "fp32" else "fp32")
        return self._precision

    def _of_one_arithmetic(self, device: str) -> Sequence[Profile]:
        """Profiles of one arithmetic, of ``device`` or of the profiled one that is nearest to it."""
        if self._data_sheets and device not in self.profiles.devices():
            device = self._nearest_profiled(device)
        found = self.profiles.of_device(device)
        exact = [profile for profile in found if profile.precision == self._precision] or found
        arithmetics = [profile.arithmetic for profile in exact]
        chosen = self._arithmetic if self._arithmetic in arithmetics else max(arithmetics, key=arithmetics.count)
        return [profile for profile in exact if profile.arithmetic == chosen]

    def _nearest_profiled(self, device: str) -> str:
        """The profiled device of the nearest generation, among them the one with the nearest memory bandwidth.

        A heuristic: generations differ most in what they reach of their peak.
        """
        if not self.profiles.devices():
            raise ConfigError(f"no profiles at all to estimate {device!r} from; load the shipped ones, or measure")
        sheet, capability = self.data_sheet(device, wanted="speed"), self._type(device).compute_capability or (0, 0)

        def distance(name: str) -> tuple[int, float]:
            generation = (self._type(name).compute_capability or (0, 0))[0]
            return abs(generation - capability[0]), abs(
                self.data_sheet(name, wanted="memory bandwidth").memory_gb_per_s - sheet.memory_gb_per_s
            )

        return min(self.profiles.devices(), key=distance)

    def data_sheet(self, device: str, *, wanted: str) -> DataSheet:
        """The data sheet of ``device``, from which ``wanted`` is to be taken.

        Raises:
            ConfigError: it has none.
        """
        sheet = self._type(device).data_sheet
        if sheet is None:
            if device not in self.profiles.devices():
                raise ConfigError(f"device {device!r} has neither a profile nor a data sheet; profile it first")
            raise ConfigError(
                f"device {device!r} has no data sheet, and its profiles do not tell its {wanted}; profile that, or "
                "give its device type a data_sheet"
            )
        return sheet
