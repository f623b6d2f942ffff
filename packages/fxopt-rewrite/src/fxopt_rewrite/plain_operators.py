"""The operators that an untrusted graph may call: they compute on tensors and numbers, and do nothing else.

An operator of a new torch is refused until it is listed, but for those of ``torch.fft``, ``torch.linalg`` and
``torch.special``. None here opens, writes or maps a file, takes a function or a pickle, or reads memory by its address;
tests compare the list with all that torch has registered.
"""

from __future__ import annotations

import re
from functools import cache

from torch._ops import OpOverload

from fxopt_core import operator_path

_ATEN = """
    abs absolute acos acosh adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d
    adaptive_max_pool2d adaptive_max_pool3d add addbmm addcdiv addcmul addmm addmv addr adjoint affine_grid_generator
    alias alias_copy all allclose alpha_dropout amax amin aminmax angle any arange arccos arccosh arcsin arcsinh
    arctan arctan2 arctanh argmax argmin argsort argwhere as_strided as_strided_copy as_strided_scatter asin asinh
    atan atan2 atanh atleast_1d atleast_2d atleast_3d avg_pool1d avg_pool2d avg_pool3d baddbmm bartlett_window
    batch_norm batch_norm_elemt batch_norm_gather_stats batch_norm_gather_stats_with_counts batch_norm_stats
    batch_norm_update_stats bernoulli bilinear binary_cross_entropy binary_cross_entropy_with_logits bincount binomial
    bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor blackman_window block_diag
    bmm broadcast_tensors broadcast_to bucketize cartesian_prod cat cauchy_ cdist ceil celu chain_matmul chalf
    channel_shuffle cholesky cholesky_inverse cholesky_solve chunk clamp clamp_max clamp_min clip clone col2im
    column_stack combinations complex concat concatenate conj conj_physical constant_pad_nd contiguous conv1d conv2d
    conv3d conv_depthwise3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution copy copysign
    corrcoef cos cosh cosine_embedding_loss cosine_similarity count_nonzero cov cross cross_entropy_loss ctc_loss
    cummax cummin cumprod cumsum cumulative_trapezoid deg2rad det detach detach_copy diag diag_embed diagflat diagonal
    diagonal_copy diagonal_scatter diff digamma dim dist div divide dot dropout dsplit dstack einsum element_size elu
    embedding embedding_bag embedding_renorm_ empty empty_like empty_permuted empty_strided eq equal erf erfc erfinv
    exp exp2 expand expand_as expand_copy expm1 exponential eye fake_quantize_per_channel_affine
    fake_quantize_per_tensor_affine feature_alpha_dropout feature_dropout fill fill_diagonal_ fix flatten flip fliplr
    flipud float_power floor floor_divide fmax fmin fmod frac fractional_max_pool2d fractional_max_pool3d frexp
    frobenius_norm full full_like gather gcd ge gelu geometric_ ger glu gradient greater greater_equal grid_sampler
    grid_sampler_2d grid_sampler_3d group_norm gru gru_cell gt hamming_window hann_window hardshrink hardsigmoid
    hardswish hardtanh heaviside hinge_embedding_loss histc histogram histogramdd hsplit hstack huber_loss hypot i0
    igamma igammac im2col imag index index_add index_copy index_fill index_put index_reduce index_select inner
    instance_norm inverse is_complex is_conj is_contiguous is_floating_point is_neg is_non_overlapping_and_dense
    is_nonzero is_same_size is_signed isclose isfinite isin isinf isnan isneginf isposinf isreal istft item
    kaiser_window kl_div kron kthvalue l1_loss layer_norm lcm ldexp le leaky_relu lerp less less_equal lgamma lift
    lift_fresh lift_fresh_copy linear linspace log log10 log1p log2 log_normal_ log_sigmoid log_sigmoid_forward
    log_softmax logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not logical_or logical_xor logit logspace
    logsumexp lstm lstm_cell lt lu_solve lu_unpack mH mT margin_ranking_loss masked_fill masked_scatter masked_select
    matmul matrix_H matrix_exp matrix_power max max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices
    max_pool3d max_pool3d_with_indices max_unpool2d max_unpool3d maximum mean median meshgrid min minimum mish mm mode
    moveaxis movedim mse_loss msort mul multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward
    multinomial multiply mv mvlgamma nan_to_num nanmean nanmedian nanquantile nansum narrow narrow_copy
    native_batch_norm native_channel_shuffle native_dropout native_group_norm native_layer_norm native_norm ne neg
    negative new_empty new_empty_strided new_full new_ones new_zeros nextafter nll_loss nll_loss2d nll_loss2d_forward
    nll_loss_forward nll_loss_nd nonzero nonzero_static norm norm_except_dim normal normal_functional not_equal
    nuclear_norm numel numpy_T one_hot ones ones_like orgqr ormqr outer pad pad_sequence pairwise_distance pdist
    permute permute_copy pinverse pixel_shuffle pixel_unshuffle poisson poisson_nll_loss polar polygamma positive pow
    prelu prod put qr quantile rad2deg rand rand_like randint randint_like randn randn_like random randperm ravel real
    reciprocal reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 remainder renorm repeat repeat_interleave
    replication_pad1d replication_pad2d replication_pad3d requires_grad_ reshape reshape_as resize resize_as
    resolve_conj resolve_neg result_type rms_norm rnn_relu rnn_relu_cell rnn_tanh rnn_tanh_cell roll rot90 round
    row_stack rrelu rrelu_with_noise rrelu_with_noise_functional rsqrt rsub scalar_tensor scaled_dot_product_attention
    scatter scatter_add scatter_reduce searchsorted select select_copy select_scatter selu sgn sigmoid sign signbit
    silu sin sinc sinh size slice slice_copy slice_scatter slogdet slow_conv3d slow_conv_dilated2d slow_conv_dilated3d
    slow_conv_transpose2d slow_conv_transpose3d smooth_l1_loss soft_margin_loss softmax softplus softshrink sort split
    split_copy split_with_sizes split_with_sizes_copy sqrt square squeeze squeeze_copy stack std std_mean stft
    storage_offset stride sub subtract sum sum_to_size svd swapaxes swapdims sym_constrain_range
    sym_constrain_range_for_size sym_is_contiguous sym_numel sym_size sym_storage_offset sym_stride t t_copy take
    take_along_dim tan tanh tensor_split tensordot thnn_conv2d threshold tile to topk trace transpose transpose_copy
    trapezoid trapz triangular_solve tril tril_indices triplet_margin_loss triu triu_indices true_divide trunc type_as
    unbind unbind_copy unflatten unfold unfold_copy uniform unique_consecutive unique_dim unique_dim_consecutive
    unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze unsqueeze_copy upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d vander var
    var_mean vdot view view_as view_as_complex view_as_complex_copy view_as_real view_as_real_copy view_copy vsplit
    vstack where xlogy zero zeros zeros_like
    __and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__
    _adaptive_avg_pool2d _adaptive_avg_pool3d _add_relu _addmm_activation _aminmax _assert_async _assert_scalar
    _assert_tensor_metadata _batch_norm_impl_index _batch_norm_no_update _batch_norm_with_update
    _batch_norm_with_update_functional _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long
    _cast_Short _cdist_forward _conj _conj_copy _conj_physical _convolution _convolution_mode _ctc_loss _dim_arange
    _efficientzerotensor _embedding_bag _embedding_bag_forward_only _euclidean_dist _fft_c2c _fft_c2r _fft_r2c
    _functional_assert_async _functional_assert_scalar _functional_sym_constrain_range
    _functional_sym_constrain_range_for_size _fused_dropout _fused_rms_norm _fused_sdp_choice _grouped_mm
    _index_put_impl _int_mm _is_all_true _is_any_true _linalg_check_errors _linalg_det _linalg_eigh _linalg_slogdet
    _linalg_solve_ex _linalg_svd _local_scalar_dense _log_softmax _logcumsumexp _masked_softmax
    _native_batch_norm_legit _native_batch_norm_legit_functional _native_batch_norm_legit_no_training
    _native_multi_head_attention _neg_view _neg_view_copy _new_zeros_with_same_feature_meta _pack_padded_sequence
    _pad_circular _pad_enum _pad_packed_sequence _pdist_forward _prelu_kernel _reshape_alias _reshape_alias_copy
    _reshape_copy _safe_softmax _sample_dirichlet _scaled_dot_product_attention_math
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable _scaled_mm
    _shape_as_tensor _softmax _stack _standard_gamma _thnn_fused_gru_cell _thnn_fused_lstm_cell _to_copy
    _transform_bias_rescale_qkv _transformer_encoder_layer_fwd _trilinear _unique _unique2 _unsafe_index
    _unsafe_index_put _unsafe_masked_index _unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_int4pack_mm
    _weight_int4pack_mm_for_cpu _weight_int8pack_mm _weight_norm _weight_norm_interface
"""
_COMPUTING = ("fft_", "linalg_", "special_")
"""Starts of the names of operators of which all compute only, those of a new torch too."""

_OTHERS = {
    "higher_order": """
        associative_scan cond map_impl scan while_loop wrap_with_autocast wrap_with_set_grad_enabled
    """,
    "prims": """
        convert_element_type view_of broadcast_in_dim iota cat where clone fill
    """,
    "mkldnn": "_convolution_pointwise _linear_pointwise",
    "quantized_decomposed": """
        choose_qparams dequantize_per_channel dequantize_per_tensor dequantize_per_token quantize_per_channel
        quantize_per_tensor quantize_per_token
    """,
    "torchvision": "deform_conv2d nms ps_roi_align ps_roi_pool roi_align roi_pool",
}
_DATA = frozenset({"Tensor", "int", "bool", "float", "number", "complex", "str", "Device", "Generator"})
_WITHIN = re.compile(r"(?:Optional\[|List\[)*(\w+)\]*")


@cache
def plain_operators() -> frozenset[str]:
    """Return the operators that are listed, as ``namespace::name``.

    >>> "aten::add" in plain_operators(), "aten::save" in plain_operators()
    (True, False)
    """
    spaces = {"aten": _ATEN, **_OTHERS}
    return frozenset(f"{space}::{name}" for space, names in spaces.items() for name in names.split())


def is_plain_operator(operator: object) -> bool:
    """Return whether an untrusted graph may call an operator: it is listed, and takes and returns nothing but data.

    >>> import torch
    >>> aten = torch.ops.aten
    >>> [is_plain_operator(each) for each in (aten.add.Tensor, aten.add_.Tensor, aten.from_file.default, aten.add.t)]
    [True, True, False, False]
    """
    path = operator_path(operator)
    if not path or not is_plain_name(path[1], path[0]):
        return False
    return not isinstance(operator, OpOverload) or takes_data(operator)


def is_plain_name(name: str, space: str = "aten") -> bool:
    """Return whether an untrusted graph may call operators of this name, in place or not."""
    if space == "aten" and name.startswith(_COMPUTING):
        return True
    listed = plain_operators()
    in_place = name.endswith("_") and not name.endswith("__")
    return f"{space}::{name}" in listed or (in_place and f"{space}::{name[:-1]}" in listed)


def takes_data(operator: OpOverload) -> bool:
    """Return whether an operator takes and returns tensors, numbers and lists of them; strings only with tensors."""
    schema = operator._schema
    kinds = [_WITHIN.sub(r"\1", str(each.type)) for each in (*schema.arguments, *schema.returns)]
    return _DATA.issuperset(kinds) and ("str" not in kinds or "Tensor" in kinds)
