"""The Triton GEMMs and LM head, interpreted: `triton_gemm.py`."""

from pathlib import Path

import pytest

from tests.kernels import interpreted

pytest.importorskip("triton")


@pytest.mark.timeout(400)  # less than a minute where nothing else runs
def test_under_the_interpreter(tmp_path: Path) -> None:
    interpreted.run("triton_gemm.py", tmp_path, PRL_KERNELS="triton")
