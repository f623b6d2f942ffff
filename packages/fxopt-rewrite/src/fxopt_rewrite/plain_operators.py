"""The operators that an untrusted graph may call: they compute on tensors and numbers, and do nothing else.

An operator of a new torch is refused until it is listed, but for those that torch tags as pointwise or as core ATen,
synonyms of listed ones, and those of families such as convolutions and ``torch.fft``. None here opens, writes or maps a
file, takes a function or a pickle, or reads memory by its address; tests compare the list with all that torch has
registered.
"""

from __future__ import annotations

import re
from functools import cache

import torch
from torch._ops import OpOverload

from fxopt_core import operator_path
from fxopt_rewrite.ops.names import aten_overloads
from fxopt_rewrite.ops.vocabulary import SYNONYMS

#: A list rather than a rule about arguments: some operators that take only plain ones read raw memory.
_ATEN = """
    addbmm addmv addr adjoint affine_grid_generator all allclose alpha_dropout aminmax argsort argwhere
    as_strided_scatter atleast_1d atleast_2d atleast_3d baddbmm bartlett_window bernoulli bilinear binary_cross_entropy
    binary_cross_entropy_with_logits bincount binomial blackman_window block_diag broadcast_tensors broadcast_to
    bucketize cartesian_prod cauchy_ cdist chain_matmul chalf channel_shuffle cholesky cholesky_inverse cholesky_solve
    chunk column_stack combinations complex conj contiguous corrcoef cosine_embedding_loss cosine_similarity
    count_nonzero cov cross cross_entropy_loss ctc_loss cummax cummin cumprod cumulative_trapezoid det detach diag
    diag_embed diagflat diagonal_scatter diff dim dist dot dropout dsplit dstack einsum element_size embedding_bag
    embedding_renorm_ empty_like empty_permuted expand_as exponential eye fake_quantize_per_channel_affine
    fake_quantize_per_tensor_affine feature_alpha_dropout feature_dropout fill_diagonal_ flatten fliplr flipud
    floor_divide fractional_max_pool2d fractional_max_pool3d frobenius_norm geometric_ glu gradient grid_sampler
    grid_sampler_3d group_norm gru gru_cell hamming_window hann_window hardswish hinge_embedding_loss histc histogram
    histogramdd hsplit hstack huber_loss im2col imag index_add index_fill index_reduce inner instance_norm inverse
    is_complex is_conj is_contiguous is_floating_point is_neg is_non_overlapping_and_dense is_nonzero is_same_size
    is_signed isclose isin isreal istft item kaiser_window kl_div kron kthvalue l1_loss layer_norm lift lift_fresh
    linear linspace log_normal_ log_sigmoid log_sigmoid_forward log_softmax logcumsumexp logdet logspace logsumexp lstm
    lstm_cell lu_solve lu_unpack mH mT margin_ranking_loss masked_select matmul matrix_H matrix_exp matrix_power
    max_pool1d max_pool1d_with_indices max_pool2d max_pool3d max_unpool2d max_unpool3d median meshgrid mode movedim
    mse_loss msort multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward multinomial mv nanmean
    nanmedian nanquantile nansum narrow native_batch_norm native_channel_shuffle native_norm new_empty new_empty_strided
    new_full new_ones new_zeros nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward nll_loss_nd nonzero_static norm
    norm_except_dim normal normal_functional nuclear_norm numel numpy_T one_hot ones ones_like orgqr ormqr outer pad
    pad_sequence pairwise_distance pdist pinverse pixel_shuffle pixel_unshuffle poisson poisson_nll_loss polar prelu put
    qr quantile rand_like randint randint_like randn_like random ravel real renorm repeat_interleave replication_pad1d
    requires_grad_ reshape reshape_as resize resize_as resolve_conj resolve_neg result_type rms_norm rnn_relu
    rnn_relu_cell rnn_tanh rnn_tanh_cell roll rot90 row_stack rrelu_with_noise rrelu_with_noise_functional
    scaled_dot_product_attention searchsorted size slogdet smooth_l1_loss soft_margin_loss softmax split stack std
    std_mean stft storage_offset stride sum_to_size svd sym_constrain_range sym_constrain_range_for_size t take
    take_along_dim tensor_split tensordot thnn_conv2d tile to trace transpose trapezoid trapz triangular_solve tril
    tril_indices triplet_margin_loss triu triu_indices type_as unbind unflatten unfold uniform unique_consecutive
    unique_dim unique_dim_consecutive vander var_mean vdot view_as view_as_complex view_as_real vsplit vstack zero zeros
    zeros_like
    __iand__ __ior__ __irshift__ _add_relu _addmm_activation _aminmax _assert_async _assert_scalar
    _assert_tensor_metadata _conj _convolution _convolution_mode _ctc_loss _dim_arange _efficientzerotensor
    _embedding_bag_forward_only _euclidean_dist _fft_c2c _fused_dropout _fused_rms_norm _fused_sdp_choice _grouped_mm
    _index_put_impl _int_mm _is_all_true _is_any_true _logcumsumexp _masked_softmax _native_batch_norm_legit_functional
    _native_multi_head_attention _neg_view _new_zeros_with_same_feature_meta _pack_padded_sequence _pad_circular
    _pad_enum _pad_packed_sequence _prelu_kernel _reshape_alias _reshape_copy _safe_softmax _sample_dirichlet _scaled_mm
    _shape_as_tensor _stack _standard_gamma _thnn_fused_gru_cell _thnn_fused_lstm_cell _transform_bias_rescale_qkv
    _transformer_encoder_layer_fwd _trilinear _unique _unique2 _unsafe_index _unsafe_index_put _unsafe_masked_index
    _unsafe_view
"""
#: Prefixes of names: all operators that begin with one of these only compute, and those of a new torch are taken too.
_COMPUTING = """
    adaptive_ batch_norm conv fft_ linalg_ slow_conv special_ unsafe_ upsample_
    _batch_norm_ _cast_ _functional_ _linalg_ _scaled_dot_product_ _upsample_ _weight_
"""
_OTHERS = {
    "higher_order": "associative_scan cond map_impl scan while_loop wrap_with_autocast wrap_with_set_grad_enabled",
    "prims": "convert_element_type view_of broadcast_in_dim iota cat where clone fill",
    "mkldnn": "_convolution_pointwise _linear_pointwise",
    "quantized_decomposed": """
        choose_qparams dequantize_per_channel dequantize_per_tensor dequantize_per_token quantize_per_channel
        quantize_per_tensor quantize_per_token
    """,
    "torchvision": "deform_conv2d nms ps_roi_align ps_roi_pool roi_align roi_pool",
}
_DATA = frozenset({"Tensor", "int", "bool", "float", "number", "complex", "str", "Device", "Generator"})
#: Finds the innermost type: ``int`` in ``Optional[List[int]]``.
_WITHIN = re.compile(r"(?:Optional\[|List\[)*(\w+)\]*")


@cache
def plain_operators() -> frozenset[str]:
    """Return the operators that are listed, as ``namespace::name``.

    >>> "aten::matmul" in plain_operators(), "aten::save" in plain_operators()
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
    base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
    # `add_` computes what `add` does, `view_copy` what `view` does, and `multiply` what `mul` does.
    names = (name, base, base.removesuffix("_copy"), SYNONYMS.get(base, base) if space == "aten" else base)
    if any(f"{space}::{each}" in plain_operators() for each in names):
        return True
    return space == "aten" and any(map(_is_computing, names))


def _is_computing(name: str) -> bool:
    """Return whether an operator's name says that it computes, or torch's tags: elementwise, or a core operator."""
    if "_backward" in name:  # some make tensors of a size that is a number
        return False
    if name.startswith(tuple(_COMPUTING.split())):
        return True
    tags = {tag for overload in aten_overloads(name) for tag in overload.tags}
    return not tags.isdisjoint((torch.Tag.pointwise, torch.Tag.core))


def takes_data(operator: OpOverload) -> bool:
    """Return whether an operator takes and returns tensors, numbers and lists of them; strings only with these."""
    schema = operator._schema
    kinds = [_WITHIN.sub(r"\1", str(each.type)) for each in (*schema.arguments, *schema.returns)]
    return _DATA.issuperset(kinds) and ("str" not in kinds or not {"Tensor", "number"}.isdisjoint(kinds))
