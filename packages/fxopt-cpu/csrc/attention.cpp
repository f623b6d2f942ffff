// fxopt::attention and fxopt::attention_merged: checks of every operand, the result, and how the work is split.
#include <string>

#include "kernels.h"
#include "operators.h"
#include "threads.h"

void run_attention(const Attention& call) {
  constexpr int64_t most = (int64_t(1) << 31) - 256;  // places of a causal mask are compared in lanes of 32 bits
  if (call.causal && (call.queries > most || call.keys > most))
    refuse("fxopt::attention: causal with ", call.queries, " queries and ", call.keys, " keys, expected at most ", most);
  const Kernels& unit = kernels();
  const int64_t pieces = unit.attention_pieces(call);
  const size_t bytes = size_t(unit.attention_scratch(call)) * 4;
  const double products = double(call.batch * call.heads * call.queries) * double(call.keys) * double(call.size + call.value_size);
  run_pieces(pieces, products / 30,
             [&](int64_t piece) { unit.attention(call, piece, reinterpret_cast<float*>(scratch(bytes))); });
}

namespace {

// Sets the mask and its strides, as broadcast to (batch, heads, queries, keys).
void set_mask(const char* op, Attention& call, const std::optional<Tensor>& mask) {
  if (!mask) return;
  const bool attended = mask->scalar_type() == ScalarType::Bool;
  check_type(op, "mask", *mask, attended ? ScalarType::Bool : ScalarType::Float);
  const int64_t wanted[4] = {call.batch, call.heads, call.queries, call.keys}, missing = 4 - mask->dim();
  for (int64_t i = 0; i < 4; ++i) {
    const int64_t size = i < missing ? 1 : mask->size(i - missing);
    if (missing < 0 || (size != 1 && size != wanted[i]))
      refuse(op, ": mask has shape ", text_of(mask->sizes()), ", expected one that broadcasts to ", text_of({wanted, 4}));
    call.mask_strides[i] = size == 1 ? 0 : mask->stride(i - missing);
  }
  if (attended)
    call.attended = static_cast<const unsigned char*>(mask->const_data_ptr());
  else
    call.mask = static_cast<const float*>(mask->const_data_ptr());
}

Tensor attend(const char* op, Attention& call, const std::optional<Tensor>& mask, double scale, bool causal, bool rounded) {
  set_mask(op, call, mask);
  call.scale = float(scale), call.causal = causal, call.rounded = rounded;
  product(op, {call.batch, call.heads, call.queries, call.value_size});
  within(op, "the number of keys", call.keys, 0), within(op, "the size of a head", call.size, 0);
  const int64_t sizes[3] = {call.batch, call.queries, call.heads * call.value_size};
  Tensor result = empty(op, {sizes, 3});
  call.result = static_cast<float*>(result.mutable_data_ptr());
  if (sizes[0] && sizes[1] && sizes[2]) run_attention(call);
  return result;
}

const float* heads_of(const char* op, const char* operand, Tensor& tensor, int64_t (&strides)[3]) {
  check_type(op, operand, tensor, ScalarType::Float);
  if (tensor.dim() != 4)
    refuse(op, ": ", operand, " has shape ", text_of(tensor.sizes()), ", expected (batch, heads, rows, size)");
  if (tensor.size(3) > 1 && tensor.stride(3) != 1) tensor = torch::stable::contiguous(tensor);
  for (int i = 0; i < 3; ++i) strides[i] = tensor.numel() ? tensor.stride(i) : 0;  // those of nothing may be anything
  return static_cast<const float*>(tensor.const_data_ptr());
}

Tensor attention(Tensor query, Tensor key, Tensor value, std::optional<Tensor> mask, double scale, bool causal,
                 bool rounded) {
  constexpr const char* OP = "fxopt::attention";
  Attention call{};
  call.query = heads_of(OP, "query", query, call.query_strides);
  call.key = heads_of(OP, "key", key, call.key_strides);
  call.value = heads_of(OP, "value", value, call.value_strides);
  call.batch = query.size(0), call.heads = query.size(1), call.queries = query.size(2), call.size = query.size(3);
  call.kv_heads = key.size(1), call.keys = key.size(2), call.value_size = value.size(3);
  if (call.kv_heads < 1 || call.heads < 1 || call.heads % call.kv_heads)
    refuse(OP, ": key has ", call.kv_heads, " heads and query ", call.heads, ", expected a divisor of those");
  const int64_t keys[4] = {call.batch, call.kv_heads, call.keys, call.size};
  const int64_t values[4] = {call.batch, call.kv_heads, call.keys, call.value_size};
  if (!key.sizes().equals({keys, 4}))
    refuse(OP, ": key has shape ", text_of(key.sizes()), ", expected ", text_of({keys, 4}), " as query and value have it");
  if (!value.sizes().equals({values, 4}))
    refuse(OP, ": value has shape ", text_of(value.sizes()), ", expected ", text_of({values, 4}), " as key has it");
  return attend(OP, call, mask, scale, causal, rounded);
}

Tensor attention_merged(Tensor merged, int64_t heads, int64_t kv_heads, std::optional<Tensor> mask, double scale, bool causal,
                        bool rounded) {
  constexpr const char* OP = "fxopt::attention_merged";
  check_type(OP, "merged", merged, ScalarType::Float);
  if (kv_heads < 1 || heads < 1 || heads > LARGEST || heads % kv_heads)
    refuse(OP, ": heads is ", heads, " and kv_heads ", kv_heads, ", expected a divisor of heads, at least 1 and at most ", LARGEST);
  const int64_t parts = heads + 2 * kv_heads;
  if (merged.dim() != 3 || merged.size(2) % parts)
    refuse(OP, ": merged has shape ", text_of(merged.sizes()), ", expected (batch, rows, ", parts, " * head size)");
  if (merged.size(2) > 1 && merged.stride(2) != 1) merged = torch::stable::contiguous(merged);
  Attention call{};
  call.batch = merged.size(0), call.queries = call.keys = merged.size(1), call.heads = heads, call.kv_heads = kv_heads;
  call.size = call.value_size = merged.size(2) / parts;
  call.query = static_cast<const float*>(merged.const_data_ptr());
  call.key = call.query + heads * call.size;
  call.value = call.key + kv_heads * call.size;
  for (auto* strides : {&call.query_strides, &call.key_strides, &call.value_strides})
    (*strides)[0] = merged.stride(0), (*strides)[1] = call.size, (*strides)[2] = merged.stride(1);
  return attend(OP, call, mask, scale, causal, rounded);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fxopt, CPU, library) {
  library.impl("attention", TORCH_BOX(&attention));
  library.impl("attention_merged", TORCH_BOX(&attention_merged));
}
