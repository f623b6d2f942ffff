"""The distribution that each of fxopt's passes and pipelines is in, for the error about one that is not installed."""

_BY_DISTRIBUTION = {
    "fxopt": "inference",
    "fxopt-core": "deep-copy lint-and-recompile",
    "fxopt-linear": "merge-linears fuse-bias-in-linear",
    "fxopt-norm": "fold-batch-norm fuse-batch-norm2d-in-conv2d fuse-batch-norm1d-in-conv1d fuse-batch-norm3d-in-conv3d "
    "fuse-batch-norm-in-conv-transpose fuse-batch-norm1d-in-linear merge-parallel-convolutions",
    "fxopt-arith": "change-true-div-to-mul-by-inverse",
    "fxopt-cpu": "cpu-inference cpu-inference-int8 cpu-inference-int8-static cpu-inference-bf16 kernels fuse-attention "
    "fuse-norms fuse-linears fuse-convolutions plan-regions",
    "fxopt-simplify": "simplify remove-no-ops eliminate-common-subexpressions eliminate-dead-code cache-shape-tables "
    "fold-constants fold-weights fuse-activations fuse-products fuse-scaled-dot-product-attention",
}

#: Distribution by name of a pass or pipeline.
SHIPPED_NAMES = {name: home for home, names in _BY_DISTRIBUTION.items() for name in names.split()}

#: The distributions of fxopt that have a plugin; for example, fxopt-linear has `fxopt_linear.plugin` as `linear`.
SHIPPED = tuple(_BY_DISTRIBUTION)
