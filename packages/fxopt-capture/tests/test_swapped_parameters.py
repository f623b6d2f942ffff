"""Nothing that capture leaves behind refers weakly to tensors, which `torch.utils.swap_tensors` refuses."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn

from fxopt_capture import capture
from fxopt_rewrite import infer_shapes


def test_captured_models_can_be_converted_by_swapping() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU()).eval(), torch.randn(3, 4)
    captured = capture(model, x)
    traced = infer_shapes(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4))), x)
    gc.collect()
    for each in (model, captured, traced):
        assert not any(map(weakref.getweakrefs, (*each.parameters(), *each.buffers())))
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        captured.double()
        traced.double()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    torch.testing.assert_close(captured(x.double()), model.double()(x.double()))
