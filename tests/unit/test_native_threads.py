"""The C++ kernels' threads: any number gives the same bits, several callers share them, and a fork does without."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch
from random_experts import bank_shape, fill, random_call

from moe_runtime.kernels.native import library as native
from moe_runtime.kernels.native_bank import NativeBank

pytestmark = pytest.mark.skipif(native.usual_isa() < 0, reason="the extension was not built")


@pytest.mark.parametrize("name", ["w8a16", "w8a8", "w4a16-g32-zp", "fp8-block", "float16"])
def test_any_number_of_threads_gives_the_same_bits(name: str) -> None:
    banks = [NativeBank(bank_shape(name, experts=8), threads) for threads in (1, 2, 3, 7)]
    fill(*banks)
    for tokens in (1, 30):
        call = random_call(banks[0].shape, tokens, picks=3, seed=tokens)
        first_TH, *others = [call.of(bank) for bank in banks]
        assert all(torch.equal(first_TH, other_TH) for other_TH in others)


def test_callers_in_several_python_threads() -> None:
    banks = [NativeBank(bank_shape(name, experts=8), threads=2) for name in ("w8a16", "w4a16-g64")]
    for bank in banks:
        fill(bank)
    calls = [random_call(banks[0].shape, tokens, picks=2, seed=tokens) for tokens in (1, 5, 40)]
    expected = [[call.of(bank) for call in calls] for bank in banks]
    wrong: list[str] = []

    def work(number: int) -> None:
        for turn in range(60):
            bank, call = (number + turn) % 2, turn % 3
            if not torch.equal(calls[call].of(banks[bank]), expected[bank][call]):
                wrong.append(f"caller {number}, turn {turn}")

    threads = [threading.Thread(target=work, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not any(thread.is_alive() for thread in threads) and not wrong


def test_a_forked_child_starts_threads_of_its_own() -> None:
    bank = NativeBank(bank_shape("w8a16", experts=8), threads=3)
    fill(bank)
    call = random_call(bank.shape, tokens=20, picks=2, seed=11)
    expected_TH = call.of(bank)
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # a child that hangs ends by itself
        os._exit(0 if torch.equal(call.of(bank), expected_TH) and torch.equal(call.of(bank), expected_TH) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert torch.equal(call.of(bank), expected_TH)


def test_a_process_ends_while_its_workers_sleep_or_work() -> None:
    program = """
import threading, torch
from moe_runtime.kernels.bank import BankShape
from moe_runtime.kernels.native_bank import NativeBank
from moe_runtime.quant.formats import FORMATS
bank = NativeBank(BankShape(2, 512, 512, FORMATS["float16"]), threads=4)
for position in range(2):
    bank.store(position, torch.ones(1024, 512).half(), torch.ones(512, 512).half())
def call():
    bank(torch.ones(64, 512), torch.ones(64, 2, dtype=torch.int32), torch.ones(64, 2))
def forever():
    while True:
        call()
call()
threading.Thread(target=forever, daemon=True).start()
call()
print("end")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "end\n"), done.stderr
