"""What torch's schemas do not say: which operations return fresh memory, share it silently, write, or notice strides.

The tables were checked by running the operations on torch's own samples while watching storages and version counters,
and a test runs what follows from schemas and tags.
"""

from __future__ import annotations

from types import FunctionType

import torch.nn.functional as F
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear


def words(text: str) -> frozenset[str]:
    """Return the words of a text."""
    return frozenset(text.split())


#: Methods of Tensor that are written in Python and are not the operator of the same name.
PYTHON_METHODS_OF_THEIR_OWN = words("index resize resize_as")

#: Operators whose result is fresh if they take two tensors or more, and may be a view if they take one.
FRESH_OF_SEVERAL = words("chain_matmul einsum")

#: Operators that may return their input's memory though neither their schema nor a tag of torch says so.
SILENT_ALIASES = words("""
    _mkldnn_reshape _mkldnn_transpose _unsafe_view broadcast_tensors chalf data dequantize flatten_dense_tensors
    get_gradients histogramdd lift meshgrid nested_to_padded_tensor sum_to_size unflatten_dense_tensors
    unsafe_split unsafe_split_with_sizes
""")

#: Starts of the names of composite operators of which the same is assumed.
SILENT_PREFIXES = ("fbgemm_", "quantized_", "sparse_", "to_")

#: Functions that return their input itself in eval mode.
DROPOUTS = words("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout")

#: Functions of ``torch.nn.functional`` in Python whose result is fresh unless ``inplace`` or ``out`` is given.
FRESH_FUNCTIONALS = (
    frozenset(
        function.__name__
        for name, function in vars(F).items()
        if isinstance(function, FunctionType) and function.__module__ == F.__name__ and not name.startswith("_")
    )
    - DROPOUTS
    - {"triplet_margin_with_distance_loss"}  # which calls a function of the caller
)

#: Methods without their own operator that may return the tensor itself, or an object that reaches its memory.
ALIASING_METHODS = words("""
    bfloat16 bool byte cdouble cfloat char cpu cuda double float half int ipu long mtia short type xpu as_subclass
    numpy storage untyped_storage _typed_storage to_sparse_coo
""")

#: Methods without their own operator that write nothing and whose result shares no memory.
PURE_METHODS = words("""
    const_data_ptr data_ptr dim_order element_size is_shared is_sparse ndimension nelement new_tensor storage_type
    tolist unique __len__ __bool__ __int__ __float__ __index__ __hash__ __contains__ __repr__ __str__ __format__
""")

#: Attributes of a tensor that hold no memory.
PURE_ATTRIBUTES = words("""
    shape dtype device ndim layout itemsize nbytes requires_grad is_leaf is_cpu is_cuda is_meta is_sparse is_quantized
    is_nested is_mps is_xla is_xpu is_mkldnn name names output_nr
""")

#: Functions of ``operator`` that give a new tensor for tensors.
ARITHMETIC = words(
    "abs add and_ eq floordiv ge gt inv invert le lshift lt matmul mod mul ne neg or_ pow rshift sub truediv xor"
)

#: Functions of ``operator`` that write their first operand.
INPLACE_OPERATORS = words("iadd iand iconcat ifloordiv ilshift imatmul imod imul ior ipow irshift isub itruediv ixor")

#: Built-in functions that write nothing and whose result shares no memory.
PURE_BUILTINS = words("""
    len int float bool str complex round divmod isinstance issubclass print type range id hash callable hasattr repr
    any all
""")

#: Built-in functions that write nothing and whose result may hold, or be, their argument.
COLLECTING_BUILTINS = words(
    "tuple list dict set frozenset zip enumerate reversed sorted iter next max min sum slice abs map filter"
)

#: Functions of ``torch`` beside the operators that write nothing and whose result shares no memory.
PURE_TORCH_FUNCTIONS = words("""
    tensor _assert _check _check_index _check_is_size _check_value _check_type _check_with _check_tensor_all is_tensor
    broadcast_shapes sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum is_storage is_grad_enabled
    get_default_dtype unique unique_consecutive
""")

#: Functions of ``torch`` beside the operators whose result may share memory.
ALIASING_TORCH_FUNCTIONS = words("as_tensor asarray from_numpy frombuffer")

#: Operations that return their input, or a copy of it with the same layout.
SAME_LAYOUT = DROPOUTS | words("""
    alias detach lift lift_fresh positive conj conj_physical resolve_conj resolve_neg real to type_as bfloat16
    double float half type cpu cuda data pos nn.Identity nn.Dropout nn.Dropout1d nn.Dropout2d nn.Dropout3d
    nn.AlphaDropout nn.FeatureAlphaDropout
""")

#: Operations that fail for, reveal, or pass on the strides of their input, even where their result is fresh.
STRIDE_SENSITIVE = words("""
    _assert_tensor_metadata _is_view _reshape_alias _typed_storage as_strided as_strided_copy as_strided_scatter
    const_data_ptr data_ptr diagonal_scatter dim_order is_contiguous is_non_overlapping_and_dense is_set_to is_shared
    native_group_norm numpy select_scatter slice_scatter storage storage_offset storage_type stride sym_is_contiguous
    sym_storage_offset sym_stride take_along_dim untyped_storage view_as_complex
""")

#: Operators with a leading underscore that take any strides; all others of them count as sensitive.
SAFE_PRIVATE_OPERATORS = words("""
    _adaptive_avg_pool2d _adaptive_avg_pool3d _assert_async _assert_scalar _conv_depthwise2d _convolution _log_softmax
    _native_batch_norm_legit _native_batch_norm_legit_no_training _safe_softmax _scaled_dot_product_attention_math
    _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _softmax _to_copy _unsafe_index _unsafe_index_put _weight_norm
""")

#: Starts of the names of operators whose kernels may ask for contiguous inputs.
SENSITIVE_PREFIXES = ("cudnn_", "fbgemm_", "miopen_", "mkldnn_", "quantize", "sparse_", "to_mkldnn", "to_sparse")


#: Modules whose result may be their input, or a view of it.
ALIASING_MODULES: frozenset[type[nn.Module]] = frozenset({
    nn.AlphaDropout, nn.ChannelShuffle, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout,
    nn.Flatten, nn.Identity, nn.Unflatten,
})  # fmt: skip

_NO_LAYERS = words("torch.nn.modules.container torch.nn.modules.module torch.nn.modules.transformer")
#: Modules whose result is fresh memory unless they work in place.
FRESH_MODULES: frozenset[type[nn.Module]] = (
    frozenset(
        cls
        for cls in map(vars(nn).get, nn.modules.__all__)
        if isinstance(cls, type) and issubclass(cls, nn.Module) and cls.__module__ not in _NO_LAYERS
    )
    - ALIASING_MODULES
    - {nn.TripletMarginWithDistanceLoss}  # which calls a function of the caller
    | {NonDynamicallyQuantizableLinear}
)
