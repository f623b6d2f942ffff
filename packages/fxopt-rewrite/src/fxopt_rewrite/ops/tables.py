"""What torch's schemas do not say: which operations return fresh memory, share it silently, write, or notice strides.

The tables were checked by running the operations on torch's own samples while watching storages and version counters. A
missing name only costs precision: an operation that is not listed counts as sharing memory.
"""

from __future__ import annotations

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


PYTHON_OPERATORS = words(
    """
    atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors cartesian_prod cdist chain_matmul einsum meshgrid
    norm split stft tensordot
    """
)
"""Functions of ``torch`` that are written in Python around the operator of the same name."""

PYTHON_METHODS_OF_THEIR_OWN = words("index resize resize_as")
"""Methods of Tensor that are written in Python and are not the operator of the same name."""

# By hand, as torch's tags do not tell: `pointwise` and `reduction` are on 15 of these, and on four operators that may
# return their input itself, such as `conj_physical`.
FRESH_COMPOSITES = words(
    """
    _convolution _fused_rms_norm _scaled_dot_product_attention_math _upsample_bicubic2d_aa _upsample_bilinear2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d _weight_norm absolute
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d arccos arccosh arcsin arcsinh
    arctan arctan2 arctanh argsort argwhere avg_pool1d batch_norm bilinear cdist clip column_stack combinations concat
    concatenate conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d corrcoef cosine_embedding_loss
    cosine_similarity cov cross cross_entropy_loss ctc_loss cumulative_trapezoid diag diagflat diff divide dstack
    embedding_bag fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft
    fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn fix fliplr flipud float_power frobenius_norm greater
    greater_equal grid_sampler group_norm gru gru_cell hinge_embedding_loss hstack inner instance_norm inverse isclose
    isfinite isreal istft kl_div kron l1_loss layer_norm less less_equal linalg_cholesky linalg_cond linalg_det
    linalg_eigh linalg_inv linalg_matmul linalg_matrix_norm linalg_matrix_power linalg_matrix_rank linalg_multi_dot
    linalg_norm linalg_pinv linalg_slogdet linalg_solve linalg_solve_ex linalg_svd linalg_svdvals linalg_vecdot linear
    log_sigmoid log_softmax logdet lstm lstm_cell lu_solve margin_ranking_loss matmul matrix_exp max max_pool1d
    max_pool1d_with_indices max_pool2d max_pool3d min msort multiply nanmean nanquantile native_channel_shuffle
    negative nll_loss nll_loss_nd nonzero_numpy not_equal nuclear_norm one_hot outer pad pad_sequence
    pairwise_distance pdist pinverse poisson_nll_loss prelu qr quantile relu6 repeat_interleave rms_norm rnn_relu
    rnn_relu_cell rnn_tanh rnn_tanh_cell row_stack rrelu scaled_dot_product_attention selu slogdet softmax
    special_digamma special_erf special_erfc special_erfinv special_exp2 special_expit special_expm1 special_gammaln
    special_i0 special_log1p special_log_softmax special_logit special_logsumexp special_ndtr special_polygamma
    special_round special_sinc special_softmax special_xlogy square std std_mean stft subtract svd take_along_dim
    tensordot tile trapezoid trapz triplet_margin_loss true_divide upsample_bicubic2d upsample_bilinear2d
    upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d vander var
    var_mean vstack where
    """
)
"""Composite operators whose schema names no shared memory, and that really share none, unlike ``dropout``."""

FRESH_OF_SEVERAL = words("chain_matmul einsum")
"""Operators whose result is fresh if they take two tensors or more, and may be a view if they take one."""

SILENT_ALIASES = words(
    "_unsafe_view unsafe_split unsafe_split_with_sizes lift dequantize _mkldnn_reshape _mkldnn_transpose"
)
"""Operators with their own kernel that may return their input's memory though their schema does not say so."""

RUNNING_STATISTICS: dict[str, tuple[int, int, int | None]] = {
    "batch_norm": (3, 4, 5),
    "instance_norm": (3, 4, 5),
    "native_batch_norm": (3, 4, 5),
    "cudnn_batch_norm": (3, 4, 5),
    "miopen_batch_norm": (3, 4, 5),
    "_batch_norm_impl_index": (3, 4, 5),
    "batch_norm_update_stats": (1, 2, None),
    "batch_norm_gather_stats": (3, 4, None),
    "batch_norm_gather_stats_with_counts": (3, 4, None),
}
"""Operators that write running statistics: positions of mean, variance and of the flag for it (None: always)."""

FRESH_FUNCTIONALS = words(
    """
    _threshold adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool1d_with_indices
    adaptive_max_pool2d adaptive_max_pool2d_with_indices adaptive_max_pool3d adaptive_max_pool3d_with_indices
    affine_grid batch_norm binary_cross_entropy binary_cross_entropy_with_logits celu cosine_embedding_loss
    cross_entropy ctc_loss elu embedding embedding_bag fold fractional_max_pool2d fractional_max_pool2d_with_indices
    fractional_max_pool3d fractional_max_pool3d_with_indices gaussian_nll_loss glu grid_sample group_norm
    gumbel_softmax hardsigmoid hardswish hardtanh hinge_embedding_loss huber_loss instance_norm interpolate kl_div
    l1_loss layer_norm leaky_relu local_response_norm log_softmax lp_pool1d lp_pool2d lp_pool3d margin_ranking_loss
    max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices
    max_unpool1d max_unpool2d max_unpool3d mish mse_loss multi_head_attention_forward multi_margin_loss
    multilabel_margin_loss multilabel_soft_margin_loss nll_loss normalize pad poisson_nll_loss relu relu6 rms_norm
    rrelu selu sigmoid silu smooth_l1_loss soft_margin_loss softmax softmin softsign tanh tanhshrink threshold
    triplet_margin_loss unfold upsample upsample_bilinear upsample_nearest
    """
)
"""Functions of ``torch.nn.functional`` in Python whose result is fresh unless ``inplace`` or ``out`` is given."""

DROPOUTS = words("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout")
"""Functions that return their input itself in eval mode."""

SEVERAL_RESULTS = frozenset({"multi_head_attention_forward"}) | {
    name for name in FRESH_FUNCTIONALS if name.endswith("_with_indices") or "max_pool" in name
}
"""Functions of `FRESH_FUNCTIONALS` that may return a tuple instead of one tensor."""

ALIASING_METHODS = words(
    """
    bfloat16 bool byte cdouble cfloat char cpu cuda double float half int ipu long mtia short type xpu as_subclass
    numpy storage untyped_storage _typed_storage to_sparse_coo
    """
)
"""Methods without their own operator that may return the tensor itself, or an object that reaches its memory."""

PURE_METHODS = words(
    """
    const_data_ptr data_ptr dim_order element_size get_device is_shared ndimension nelement new_tensor storage_type
    tolist unique is_contiguous size stride dim numel storage_offset item __len__ __bool__ __int__ __float__ __index__
    __hash__ __contains__ __repr__ __str__ __format__ is_sparse is_floating_point is_complex is_signed
    """
)
"""Methods that write nothing and whose result shares no memory."""

PURE_ATTRIBUTES = words(
    """
    shape dtype device ndim layout itemsize nbytes requires_grad is_leaf is_cpu is_cuda is_meta is_sparse is_quantized
    is_nested is_mps is_xla is_xpu is_mkldnn name names output_nr
    """
)
"""Attributes of a tensor that hold no memory."""

PURE_BUILTINS = words(
    """
    len int float bool str complex round divmod isinstance issubclass print type range id hash callable hasattr repr
    any all
    """
)
"""Built-in functions that write nothing and whose result shares no memory."""

COLLECTING_BUILTINS = words(
    "tuple list dict set frozenset zip enumerate reversed sorted iter next max min sum slice abs map filter"
)
"""Built-in functions that write nothing and whose result may hold, or be, their argument."""

PURE_TORCH_FUNCTIONS = words(
    """
    tensor _assert _check _check_index _check_is_size _check_value _check_type _check_with _check_tensor_all is_tensor
    broadcast_shapes sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum is_storage is_grad_enabled
    get_default_dtype unique unique_consecutive
    """
)
"""Functions of ``torch`` beside the operators that write nothing and whose result shares no memory."""

ALIASING_TORCH_FUNCTIONS = words("as_tensor asarray from_numpy frombuffer")
"""Functions of ``torch`` beside the operators whose result may share memory."""

SAME_LAYOUT = (
    words(
        """
        alias detach lift lift_fresh positive conj conj_physical resolve_conj resolve_neg real to type_as bfloat16
        double float half type cpu cuda data pos nn.Identity nn.Dropout nn.Dropout1d nn.Dropout2d nn.Dropout3d
        nn.AlphaDropout nn.FeatureAlphaDropout
        """
    )
    | DROPOUTS
)
"""Operations that return their input, or a copy of it with the same layout."""

ANY_STRIDES = words(
    """
    T mT H mH adjoint broadcast_to chunk diagonal dsplit expand expand_as flatten getitem hsplit linalg_diagonal
    matrix_H movedim moveaxis narrow numpy_T permute ravel reshape reshape_as select slice split split_with_sizes
    squeeze swapaxes swapdims t tensor_split transpose unbind unflatten unfold unsafe_chunk unsafe_split
    unsafe_split_with_sizes unsqueeze vsplit nn.Flatten nn.Unflatten
    """
)
"""Operations that return a view or a copy of a value with any strides."""

STRIDE_SENSITIVE = words(
    """
    _assert_tensor_metadata _is_view _reshape_alias _typed_storage as_strided as_strided_copy as_strided_scatter
    const_data_ptr data_ptr diagonal_scatter dim_order is_contiguous is_non_overlapping_and_dense is_set_to is_shared
    native_group_norm numpy select_scatter slice_scatter storage storage_offset storage_type stride sym_is_contiguous
    sym_storage_offset sym_stride take_along_dim untyped_storage view_as_complex
    """
)
"""Operations that fail for, reveal, or pass on the strides of their input, even where their result is fresh."""

SAFE_PRIVATE_OPERATORS = words(
    """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _assert_async _assert_scalar _conv_depthwise2d _convolution _log_softmax
    _native_batch_norm_legit _native_batch_norm_legit_no_training _safe_softmax _scaled_dot_product_attention_math
    _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _softmax _to_copy _unsafe_index _unsafe_index_put
    """
)
"""Operators with a leading underscore that take any strides; all others of them count as sensitive."""

SENSITIVE_PREFIXES = ("cudnn_", "fbgemm_", "miopen_", "mkldnn_", "quantize", "sparse_", "to_mkldnn", "to_sparse")
"""Starts of the names of operators whose kernels may ask for contiguous inputs."""


def _module_types(text: str) -> frozenset[type[nn.Module]]:
    return frozenset(getattr(nn, name) for name in text.split())


TUPLE_MODULES = _module_types("AdaptiveLogSoftmaxWithLoss GRU LSTM LSTMCell MultiheadAttention RNN") | _module_types(
    """
    AdaptiveMaxPool1d AdaptiveMaxPool2d AdaptiveMaxPool3d FractionalMaxPool2d FractionalMaxPool3d MaxPool1d MaxPool2d
    MaxPool3d
    """
)
"""Modules of `FRESH_MODULES` that return, or may return, a tuple."""

FRESH_MODULES = (
    TUPLE_MODULES
    | {NonDynamicallyQuantizableLinear}
    | _module_types(
        """
        AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AvgPool1d AvgPool2d AvgPool3d BCELoss BCEWithLogitsLoss
        BatchNorm1d BatchNorm2d BatchNorm3d Bilinear CELU CTCLoss CircularPad1d CircularPad2d CircularPad3d
        ConstantPad1d ConstantPad2d ConstantPad3d Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d
        CosineEmbeddingLoss CosineSimilarity CrossEntropyLoss ELU Embedding EmbeddingBag Fold GELU GLU GRUCell
        GaussianNLLLoss GroupNorm Hardshrink Hardsigmoid Hardswish Hardtanh HingeEmbeddingLoss HuberLoss
        InstanceNorm1d InstanceNorm2d InstanceNorm3d KLDivLoss L1Loss LPPool1d LPPool2d LPPool3d LayerNorm LeakyReLU
        Linear LocalResponseNorm LogSigmoid LogSoftmax MSELoss MarginRankingLoss MaxUnpool1d MaxUnpool2d MaxUnpool3d
        Mish MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss NLLLoss PReLU PairwiseDistance PixelShuffle
        PixelUnshuffle PoissonNLLLoss RMSNorm RNNCell RReLU ReLU ReLU6 ReflectionPad1d ReflectionPad2d ReflectionPad3d
        ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU SiLU Sigmoid SmoothL1Loss SoftMarginLoss Softmax
        Softmax2d Softmin Softplus Softshrink Softsign SyncBatchNorm Tanh Tanhshrink Threshold TripletMarginLoss
        Unfold Upsample UpsamplingBilinear2d UpsamplingNearest2d ZeroPad1d ZeroPad2d ZeroPad3d
        """
    )
)
"""Modules whose result is fresh memory unless they work in place."""

ALIASING_MODULES = _module_types(
    "AlphaDropout ChannelShuffle Dropout Dropout1d Dropout2d Dropout3d FeatureAlphaDropout Flatten Identity Unflatten"
)
"""Modules whose result may be their input, or a view of it."""
