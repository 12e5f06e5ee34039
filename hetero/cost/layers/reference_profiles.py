"""Chooses the measured profiles that an estimate is made from, and scales them where they are not of the same kind.

The profiles of the device itself come first; those of one arithmetic only, since TF32 is several times as fast as
fp32. Another precision or arithmetic, or another device where that is allowed, is scaled by data sheets.
"""

from collections.abc import Sequence

from hetero.cost.layers.confidence import Confidence
from hetero.cost.layers.throughput_fit import ComputePass, Throughput, fit
from hetero.errors import ConfigError
from hetero.plan.ir import Precision
from hetero.spec.devices import DataSheet
from hetero.spec.profile import Arithmetic, LayerKind, Profile, ProfileStore
from hetero.units import GB

UPDATE_BYTES_PER_PARAMETER = 28
"""Adam in fp32 reads weight, gradient and two moments, and writes all but the gradient."""


class ReferenceProfiles:
    """Fitted throughputs by device, kind of layer and pass; each is fitted once.

    Args:
        precision: of the model to be estimated.
        arithmetic: of its fp32 products; by default what most profiles of a device have.
        data_sheets: estimate devices without any profile as well.
    """

    def __init__(
        self, profiles: ProfileStore, *, precision: Precision, arithmetic: Arithmetic | None, data_sheets: bool
    ) -> None:
        self._profiles = profiles
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
        """Seconds of the update of one parameter: the median over the blocks measured on ``device``, else 28 bytes
        over its memory bandwidth.

        Raises:
            ConfigError: ``device`` has neither a measured update nor a data sheet.
        """
        rates = sorted(
            max(0.0, update.update_s - profile.isolation_s) / memory.parameters
            for profile in self._profiles
            if profile.device == device
            for update in profile.updates
            if update.kind == "block" and (memory := profile.memory_of("block", tp=update.tp)) is not None
        )
        if rates:
            return rates[len(rates) // 2], Confidence.ESTIMATED
        return UPDATE_BYTES_PER_PARAMETER / (self.data_sheet(device).memory_gb_per_s * GB), Confidence.DATA_SHEET

    def _fit(self, device: str, kind: LayerKind, compute_pass: ComputePass) -> tuple[Throughput, Confidence]:
        references = self._of_one_arithmetic(device)
        measured_on = self._profiles.device_types.of(references[0].device)
        fitted = fit(references, measured_on, kind=kind, compute_pass=compute_pass)
        if fitted is None and kind != "block":
            # A head is a product and a softmax, an embedding is rows: both are parts of a block.
            fitted = fit(references, measured_on, kind="block", compute_pass=compute_pass)
        if fitted is None:
            raise ConfigError(f"no profile of {references[0].device!r} has the {compute_pass} of a block; measure one")
        have, wanted = references[0].arithmetic, self._wanted_arithmetic(references[0])
        if references[0].device == device and wanted == have:
            return fitted, Confidence.ESTIMATED
        here, there = self.data_sheet(references[0].device), self.data_sheet(device)
        return fitted.on(here, there, arithmetic=have, other_arithmetic=wanted), Confidence.DATA_SHEET

    def _wanted_arithmetic(self, reference: Profile) -> Arithmetic:
        if self._precision == "fp32":
            return self._arithmetic or (reference.arithmetic if reference.precision == "fp32" else "fp32")
        return self._precision

    def _of_one_arithmetic(self, device: str) -> Sequence[Profile]:
        """Profiles of one arithmetic, of ``device`` or of the profiled one that is nearest to it."""
        if self._data_sheets and device not in self._profiles.devices():
            device = self._nearest_profiled(device)
        found = self._profiles.of_device(device)
        exact = [profile for profile in found if profile.precision == self._precision] or found
        arithmetics = [profile.arithmetic for profile in exact]
        chosen = self._arithmetic if self._arithmetic in arithmetics else max(arithmetics, key=arithmetics.count)
        return [profile for profile in exact if profile.arithmetic == chosen]

    def _nearest_profiled(self, device: str) -> str:
        """The profiled device of the nearest generation, among them the one with the nearest memory bandwidth.

        A heuristic: generations differ most in what they reach of their peak.
        """
        if not self._profiles.devices():
            raise ConfigError(f"no profiles at all to estimate {device!r} from; load the shipped ones, or measure")
        sheet, capability = self.data_sheet(device), self._profiles.device_types.of(device).compute_capability or (0, 0)

        def distance(name: str) -> tuple[int, float]:
            generation = (self._profiles.device_types.of(name).compute_capability or (0, 0))[0]
            return abs(generation - capability[0]), abs(self.data_sheet(name).memory_gb_per_s - sheet.memory_gb_per_s)

        return min(self._profiles.devices(), key=distance)

    def data_sheet(self, device: str) -> DataSheet:
        """The data sheet of ``device``.

        Raises:
            ConfigError: it has none.
        """
        sheet = self._profiles.device_types.of(device).data_sheet
        if sheet is None:
            raise ConfigError(f"device {device!r} has neither a profile nor a data sheet; profile it first")
        return sheet
