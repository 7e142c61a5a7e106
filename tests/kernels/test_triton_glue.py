"""The Triton kernels other than GEMMs, interpreted: `triton_glue.py`."""

from pathlib import Path

import pytest

from tests.kernels import interpreted

pytest.importorskip("triton")


@pytest.mark.timeout(400)  # half a minute where nothing else runs
def test_under_the_interpreter(tmp_path: Path) -> None:
    interpreted.run("triton_glue.py", tmp_path)
