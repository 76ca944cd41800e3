import numpy as np, pytest
from tests.emulator import emulated_gpu
from tests.gpu.tools import sanitize
from tests.gpu.tools.fp8_problem import make_fp8, Fp8Case
import cumla.launch.mla.mla_decode_fp8 as D
from cumla.launch.mla.mla_decode_fp8_128 import SPECS

@pytest.mark.parametrize("variant", [0, 3, 4, 6, 9])
@pytest.mark.parametrize("q_len,lens,page", [(1, [700, 70], 64), (2, [130, 65], 16), (1, [200], 1)])
def test_it(variant, q_len, lens, page, monkeypatch):
    monkeypatch.setattr(D, "FP8_128_SPEC", SPECS[variant])
    case = Fp8Case(batch=len(lens), q_len=q_len, kv_len=max(lens), heads=128, form="one", page_size=page, kv_scale="array")
    launched = []
    with emulated_gpu(4) as cupy:
        sanitize.attend_fp8(cupy, make_fp8(np, case, np.array(lens)))
