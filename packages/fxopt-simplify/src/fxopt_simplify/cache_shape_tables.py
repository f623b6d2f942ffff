"""``scores + mask(x.shape[1])`` -> ``scores + tables(x.shape[1])``: masks and positions are computed once per size."""

from __future__ import annotations

from typing import ClassVar

from fxopt_simplify.tables_pass import TablesPass


class CacheShapeTables(TablesPass):
    """``scores + mask(x.shape[1])`` -> ``scores + tables(x.shape[1])``: masks and positions are computed once per size.

    One `ShapeTables` computes what depends only on sizes, literals and buffers, and keeps it for the sizes of the last
    calls: positions, causal masks, rotary tables, and what capture makes of an absent mask. It also keeps weights that
    sums, products or lookups compute from parameters only, and what sizes repeat of them: weight norm, the ``B @ A`` of
    LoRA, Swin's biases of attention, DeBERTa's projected positions. Buffers and parameters may change: loading or
    writing one is noticed, and where gradients flow, each call computes the weights. Layers that read such a weight are
    not packed.

    Refused where the tensor is returned, as it is the same one in each call; what is written in place is not a table.
    A single operation on sizes is left as it is: making a small tensor is as quick as looking it up.

    Source:
        Constant folding by sizes; Hugging Face models cache rotary tables and causal masks in the same way, by hand.

    Cost:
        One call for all tensors of the graph. It keeps them for 8 sets of sizes, up to 16 MiB for each. Computed
        weights are kept once, if they take no more memory than their parameters: a model may take twice its memory.

    >>> import torch
    >>> from fxopt_rewrite import infer_shapes
    >>> def causal(x):
    ...     rows, columns = torch.arange(x.shape[0]).unsqueeze(1), torch.arange(x.shape[0])
    ...     return torch.where(columns <= rows, x, 0.0)
    >>> graph_module = infer_shapes(torch.fx.symbolic_trace(causal), torch.ones(2, 2))
    >>> print(CacheShapeTables()(graph_module).code.strip())
    def forward(self, x):
        getattr_1 = x.shape
        getitem = getattr_1[0];  getattr_1 = None
        getattr_2 = x.shape
        getitem_1 = getattr_2[0];  getattr_2 = None
        shape_tables = self.shape_tables(getitem, getitem_1);  getitem = getitem_1 = None
        where = torch.where(shape_tables, x, 0.0);  shape_tables = x = None
        return where
    """

    takes_sizes: ClassVar[bool] = True
