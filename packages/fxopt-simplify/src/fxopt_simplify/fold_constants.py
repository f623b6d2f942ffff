"""``x + tril(ones(4, 4))`` -> ``x + constants()``: what no input decides is computed once."""

from __future__ import annotations

from typing import ClassVar

from fxopt_simplify.tables_pass import TablesPass


class FoldConstants(TablesPass):
    """``x + tril(ones(4, 4))`` -> ``x + constants()``: what no input decides is computed once.

    `CacheShapeTables` without the sizes: what depends on literals alone, and on buffers and parameters, which may
    change. Nothing is computed while the pass runs, and archives hold the computation and not its result, however large
    that is.

    Refused where the tensor is returned, as it is the same one in each call; what is written in place is not a
    constant.

    Source:
        Constant folding (Aho, Lam, Sethi, Ullman: Compilers, 8.5.4). Weights are not constants here: what is computed
        from them is computed again when they are loaded or trained.

    Cost:
        One call for all constants of the graph, which keeps them, up to 16 MiB, or up to the memory of the
        parameters that they are computed from.

    >>> import torch
    >>> from fxopt_rewrite import infer_shapes
    >>> graph = torch.fx.Graph()
    >>> x, ones = graph.placeholder("x"), graph.call_function(torch.ones, (2, 2))
    >>> _ = graph.output(graph.call_function(torch.add, (x, graph.call_method("tril", (ones,)))))
    >>> graph_module = infer_shapes(torch.fx.GraphModule({}, graph), torch.ones(2, 2))
    >>> print(FoldConstants()(graph_module).code.strip())
    def forward(self, x):
        shape_tables = self.shape_tables()
        add = torch.add(x, shape_tables);  x = shape_tables = None
        return add
    """

    takes_sizes: ClassVar[bool] = False
