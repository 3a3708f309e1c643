"""Experts on the CPU, in every format, by the C++ kernels: one call a layer (native/experts.cpp says how).

Legend: T tokens, K picks, H hidden, I intermediate, E experts.
"""

from ctypes import byref

import torch
from torch import Tensor

from moe_runtime.kernels.bank import BankShape, ExpertBank, Weight
from moe_runtime.kernels.native import library as native
from moe_runtime.kernels.native import records


class NativeBank(ExpertBank):
    """`threads`: how many cores a call takes, this thread's included. isa: native.isa_named's number.

    bfloat16 experts see activations as bfloat16 where the machine has products of such pairs; all others see them to
    float32 or, with whole numbers for weights, to 16 bits of the largest of a group. store may not run beside a call.
    """

    def __init__(self, shape: BankShape, threads: int = 1, isa: int | None = None) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}: expected at least 1")
        self.shape, self.threads = shape, threads
        self._isa = native.usual_isa() if isa is None else isa
        found = native.library()
        assert found is not None and self._isa >= 0, "ask native.usual_isa() first"
        self._experts = found.moe_experts
        self._stored_E = torch.zeros(shape.experts, dtype=torch.uint8)
        # Scales may be wider than the format asks for, which the first expert shows.
        self._scales: torch.dtype | None = None
        self._memory: tuple[records.Memory, ...] = ()
        self._bank = self._planned(shape.format.scales)

    def _planned(self, scales: torch.dtype | None) -> native.Bank:
        shape = self.shape
        return native.Bank(
            gate_up=records.plan(shape.format, shape.intermediate, shape.hidden, scales, self._isa, gated=True),
            down=records.plan(shape.format, shape.hidden, shape.intermediate, scales, self._isa),
            stored=self._stored_E.data_ptr(),
            experts=shape.experts,
        )

    def _allocate(self, scales: torch.dtype | None) -> None:
        bank = self._planned(scales)
        self._memory = tuple(records.Memory(self.shape.experts * each.bytes) for each in (bank.gate_up, bank.down))
        bank.gate_up_records, bank.down_records = (memory.address for memory in self._memory)
        self._bank, self._scales = bank, scales

    def store(self, position: int, gate_up_2IH: Weight, down_HI: Weight) -> None:
        shape = self.shape
        self._check_position(position)
        scales = self._scales if self._memory else records.scales_dtype(gate_up_2IH)
        records.check("gate_up", gate_up_2IH, shape.format, (2 * shape.intermediate, shape.hidden), scales)
        records.check("down", down_HI, shape.format, (shape.hidden, shape.intermediate), scales)
        if not self._memory:
            self._allocate(scales)
        gate_up, down = self._places(position)
        records.pack(self._bank.gate_up, gate_up, gate_up_2IH)
        records.pack(self._bank.down, down, down_HI)
        self._stored_E[position] = 1

    def fetch(self, position: int) -> tuple[Weight, Weight]:
        self._check_position(position)
        if not self._stored_E[position]:
            raise ValueError(f"position {position} holds no expert")
        gate_up, down = self._places(position)
        form = self.shape.format
        return (
            records.unpack(self._bank.gate_up, gate_up, form, self._scales),
            records.unpack(self._bank.down, down, form, self._scales),
        )

    def __call__(self, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> Tensor:
        self._check_call(x_TH, slots_TK, weights_TK)
        x_TH, slots_TK, weights_TK = x_TH.contiguous(), slots_TK.contiguous(), weights_TK.float().contiguous()
        y_TH = torch.empty_like(x_TH)
        call = native.Call(
            x=x_TH.data_ptr(),
            slots=slots_TK.data_ptr(),
            weights=weights_TK.data_ptr(),
            y=y_TH.data_ptr(),
            tokens=x_TH.shape[0],
            picks=slots_TK.shape[1],
            x_type=records.NUMBERS[x_TH.dtype],
            wide_slots=slots_TK.dtype == torch.int64,
            threads=self.threads,
            isa=self._isa,
        )
        match self._experts(byref(self._bank), byref(call)):
            case native.OK:
                return y_TH
            case native.BAD_SLOT:
                raise ValueError(f"slot {call.bad_slot} of a bank of {self.shape.experts} experts")
            case native.EMPTY_SLOT:
                raise ValueError(f"position {call.bad_slot} holds no expert")
            case _:
                raise MemoryError("no memory for the experts' activations")

    @property
    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory)

    def _places(self, position: int) -> tuple[int, int]:
        gate_up, down = self._memory
        return gate_up.address + position * self._bank.gate_up.bytes, down.address + position * self._bank.down.bytes

    def _check_position(self, position: int) -> None:
        if not 0 <= position < self.shape.experts:
            raise ValueError(f"position {position} of a bank of {self.shape.experts} experts")

    def _check_call(self, x_TH: Tensor, slots_TK: Tensor, weights_TK: Tensor) -> None:
        if x_TH.dim() != 2 or x_TH.shape[1] != self.shape.hidden or x_TH.dtype not in records.X_DTYPES:
            raise ValueError(f"x is {x_TH.dtype} {list(x_TH.shape)}: expected floats [tokens, {self.shape.hidden}]")
        if slots_TK.dim() != 2 or len(slots_TK) != len(x_TH) or slots_TK.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"slots are {slots_TK.dtype} {list(slots_TK.shape)}: expected integers [{len(x_TH)}, picks]"
            )
        if weights_TK.shape != slots_TK.shape or not weights_TK.is_floating_point():
            raise ValueError(
                f"weights are {weights_TK.dtype} {list(weights_TK.shape)}: expected floats {list(slots_TK.shape)}"
            )
        for name, tensor in (("x", x_TH), ("slots", slots_TK), ("weights", weights_TK)):
            if tensor.device.type != "cpu":
                raise ValueError(f"{name} is on {tensor.device}: expected the CPU")
