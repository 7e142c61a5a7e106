"""The trainer's FP8 beside vLLM's: what its own activation quantiser makes of the same rows."""

import pytest
import torch

from prl.kernels.quantise import dequantise_rows, quantise_rows

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("width", [2048, 6144])
def test_rows_are_quantised_as_vllm_does(device, width):
    utils = pytest.importorskip("vllm.model_executor.layers.quantization.utils.fp8_utils", reason="vLLM is not installed")
    x_MK = torch.randn(512, width, device=device, dtype=torch.bfloat16)
    codes_MK, scales_BM = quantise_rows(x_MK)
    theirs_MK, their_scales_MB = utils.per_token_group_quant_fp8(x_MK, 128, use_ue8m0=False)
    torch.testing.assert_close(scales_BM.T.contiguous(), their_scales_MB.float(), rtol=1e-6, atol=0)
    # A quotient beside a tie may round either way, where one side multiplies by the reciprocal.
    apart_MK = dequantise_rows(codes_MK, scales_BM) != dequantise_rows(theirs_MK, their_scales_MB.T.contiguous())
    assert apart_MK.float().mean() < 1e-3
