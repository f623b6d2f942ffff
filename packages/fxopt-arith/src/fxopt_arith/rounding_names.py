"""Names of the operations whose results may jump when the last bit of an input changes, and of those that absorb it.

Names are those of `fxopt_rewrite.Effects`: ``"floor"`` for function, method and operator alike, ``"nn.Threshold"`` for
modules, without a leading ``special_`` and a trailing ``_``.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


ROUNDING = _names(
    """
    floor ceil round trunc fix frac fmod mod modf remainder floor_divide floordiv ifloordiv imod divmod
    sign sgn signbit heaviside frexp angle atan2 arctan2 threshold _threshold hardshrink nn.Threshold nn.Hardshrink
    eq ne lt le gt ge greater greater_equal less less_equal not_equal equal is_ is_not contains isclose allclose isin
    argmax argmin argsort mode searchsorted bucketize histc histogram histogramdd _histogramdd_bin_edges
    _histogramdd_from_bin_cts _histogramdd_from_bin_tensors unique _unique _unique2 unique_dim unique_consecutive
    unique_dim_consecutive nonzero nonzero_static nonzero_numpy argwhere count_nonzero is_nonzero
    logical_and logical_or logical_xor logical_not not_ truth all any hash_tensor
    int bool long short char byte item _local_scalar_dense tolist numpy __int__ __bool__ __index__ __floor__ __ceil__
    __round__ __trunc__ builtins.int builtins.bool builtins.float builtins.complex builtins.round builtins.max
    builtins.min builtins.sorted builtins.any builtins.all builtins.divmod builtins.hash builtins.str builtins.repr
    int_repr one_hot embedding embedding_bag nn.Embedding nn.EmbeddingBag arange range
    bernoulli multinomial poisson binomial _standard_gamma _sample_dirichlet _assert_async _functional_assert_async
    to_sparse to_sparse_coo to_sparse_csr to_sparse_csc to_sparse_bsr to_sparse_bsc _to_sparse
    linalg_matrix_rank linalg_pinv linalg_lstsq linalg_slogdet slogdet pinverse geqrf qr linalg_qr svd linalg_svd
    _linalg_svd _linalg_slogdet _linalg_eigh linalg_eig linalg_eigh linalg_eigvals linalg_lu linalg_lu_factor
    linalg_lu_factor_ex _lu_with_info linalg_ldl_factor linalg_ldl_factor_ex linalg_inv_ex linalg_solve_ex
    linalg_cholesky_ex
    """
)
"""Operations that round, compare or cast to integers, or whose result depends on an order of values or a branch."""

ROUNDING_PREFIXES = ("quantize_per_", "fake_quantize_", "_fake_quantize_", "fused_moving_avg_obs", "choose_qparams")
"""Prefixes of operations that quantise."""

ROUNDING_SUFFIXES = ("_backward", "_backward_data")
"""Suffixes of derivatives: those of continuous functions may jump."""

WITH_INDICES = _names(
    """
    cummax cummin sort topk kthvalue max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices
    adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices
    fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
    """
)
"""Operations that return values, which are continuous, and their indices, which are not."""

WITH_INDICES_OF_DIM = _names("max min median nanmedian")
"""Operations that return values and indices if they are given a dimension."""

WITH_INDICES_IN_ATEN = _names(
    "adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d"
)
"""Operators that return values and indices, unlike the functions of ``torch.nn.functional`` with the same name."""

RETURN_INDICES = {
    **dict.fromkeys(("max_pool1d", "max_pool2d", "max_pool3d"), 6),
    **dict.fromkeys(("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d"), 2),
    **dict.fromkeys(("fractional_max_pool2d", "fractional_max_pool3d"), 4),
}
"""Position of the flag that makes a function return indices, too."""

_POLYNOMIALS = "chebyshev_polynomial_"
JUMPS_BY = {
    "copysign": (1, "other"),
    "hinge_embedding_loss": (1, "target"),
    "nn.HingeEmbeddingLoss": (1, "target"),
    "cosine_embedding_loss": (2, "target"),
    "nn.CosineEmbeddingLoss": (2, "target"),
    "poisson_nll_loss": (1, "target"),
    "nn.PoissonNLLLoss": (1, "target"),
    "fractional_max_pool2d": (3, "_random_samples"),
    "fractional_max_pool3d": (3, "_random_samples"),
    "fractional_max_pool2d_with_indices": (3, "_random_samples"),
    "fractional_max_pool3d_with_indices": (3, "_random_samples"),
    **{f"{kind}{_POLYNOMIALS}{letter}": (1, "n") for kind in ("", "shifted_") for letter in "tuvw"},
    **dict.fromkeys(("hermite_polynomial_h", "hermite_polynomial_he"), (1, "n")),
    **dict.fromkeys(("laguerre_polynomial_l", "legendre_polynomial_p"), (1, "n")),
}
"""The only argument that an operation rounds or compares, by position and name."""

QUANTILES = _names("quantile nanquantile")
"""Operations that round ``q``, except with linear interpolation."""

GRID_SAMPLERS = _names("grid_sample grid_sampler grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback")
"""Operations that round the grid in mode ``"nearest"``."""

ORDERS = {
    **dict.fromkeys(("norm", "linalg_norm", "linalg_vector_norm", "pdist", "_pdist_forward", "normalize"), (1, "p")),
    **dict.fromkeys(("dist", "cdist", "_cdist_forward", "pairwise_distance"), (2, "p")),
}
"""Norms, which count nonzero values if their order is 0: position and name of the order (or ``ord``)."""

MIXING = _names(
    """
    matmul imatmul __matmul__ mm bmm mv dot vdot addmm addbmm addmv baddbmm einsum tensordot linear bilinear
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution softmax log_softmax softmin
    gumbel_softmax logsumexp layer_norm batch_norm group_norm instance_norm rms_norm normalize norm linalg_norm
    local_response_norm scaled_dot_product_attention multi_head_attention_forward
    nn.Linear nn.Bilinear nn.Conv1d nn.Conv2d nn.Conv3d nn.ConvTranspose1d nn.ConvTranspose2d nn.ConvTranspose3d
    nn.Softmax nn.Softmax2d nn.LogSoftmax nn.Softmin nn.LayerNorm nn.GroupNorm nn.RMSNorm nn.LocalResponseNorm
    nn.BatchNorm1d nn.BatchNorm2d nn.BatchNorm3d nn.InstanceNorm1d nn.InstanceNorm2d nn.InstanceNorm3d
    nn.MultiheadAttention nn.LSTM nn.GRU nn.RNN nn.LSTMCell nn.GRUCell nn.RNNCell
    """
)
"""Operations that sum products of many values, or normalise: they round anyway, so a last bit is lost in them."""

SHAPE_ONLY = _names(
    """
    size shape dim ndim ndimension numel nelement stride dtype device layout is_floating_point is_complex requires_grad
    zeros_like ones_like empty_like rand_like randn_like new_zeros new_ones new_empty len isinstance
    """
)
"""Operations that only read the shape or the dtype of their input."""

CASTING_WRITES = _names("setitem __setitem copy fill")
"""Writes that convert to the dtype of the tensor that they write to."""

CASTS = _names("to type type_as _to_copy")
"""Conversions that may take their dtype from another value."""

SELECTING = _names("getitem __getitem index _unsafe_index")
"""Selections: a change of an index jumps to another element."""
