// What operators need of torch: checks that name the operand, results, and the form of rows.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <optional>
#include <sstream>
#include <stdexcept>
#include <string>

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Throws "fxopt::linear: what was found and expected".
template <class... Parts>
[[noreturn]] void refuse(const Parts&... parts) {
  std::ostringstream text;
  ((text << parts), ...);
  throw std::runtime_error(text.str());
}

inline std::string text_of(torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  std::ostringstream text;
  text << '(';
  for (size_t i = 0; i < sizes.size(); ++i) text << (i ? ", " : "") << sizes[i];
  text << ')';
  return text.str();
}

// Sizes, strides and products of sizes are at most this: sums of a few, and a few thousand times one, do not overflow.
constexpr int64_t LARGEST = int64_t(1) << 40;

inline int64_t within(const char* op, const char* name, int64_t value, int64_t least, int64_t most = LARGEST) {
  if (value < least || value > most) refuse(op, ": ", name, " is ", value, ", expected ", least, " to ", most);
  return value;
}

// The one way to multiply sizes. What would be too large is refused also where another factor is 0.
inline int64_t product(const char* op, torch::headeronly::IntHeaderOnlyArrayRef factors) {
  int64_t result = 1;
  bool empty = false;
  for (const int64_t factor : factors) {
    empty = empty || factor == 0;
    if (factor < 0 || (factor && __builtin_mul_overflow(result, factor, &result)) || result > LARGEST)
      refuse(op, ": the sizes ", text_of(factors), " have a product that is too large, expected at most ", LARGEST);
  }
  return empty ? 0 : result;
}
inline int64_t product(const char* op, std::initializer_list<int64_t> factors) {
  return product(op, torch::headeronly::IntHeaderOnlyArrayRef(factors.begin(), factors.size()));
}

inline void check_type(const char* op, const char* operand, const Tensor& tensor, ScalarType type) {
  if (!tensor.is_cpu()) refuse(op, ": ", operand, " is not on the CPU; move it there, or use the layer that was packed");
  if (tensor.scalar_type() != type)
    refuse(op, ": ", operand, " is ", torch::headeronly::toString(tensor.scalar_type()), ", expected ",
           torch::headeronly::toString(type));
}

// The address of a vector of `size` elements, made contiguous in `holder`; null where there is none.
template <class T>
const T* vector_of(const char* op, const char* operand, std::optional<Tensor>& holder, ScalarType type, int64_t size) {
  if (!holder) return nullptr;
  check_type(op, operand, *holder, type);
  if (holder->numel() != size)
    refuse(op, ": ", operand, " has shape ", text_of(holder->sizes()), ", expected ", size, " elements");
  if (!holder->is_contiguous()) holder = torch::stable::contiguous(*holder);
  return static_cast<const T*>(holder->const_data_ptr());
}

// Leading dimensions as rows of one stride, where the last dimension lies together; else `tensor` is made contiguous.
inline int64_t row_stride(Tensor& tensor) {
  const auto sizes = tensor.sizes(), strides = tensor.strides();
  const int64_t last = tensor.dim() - 1;
  if (tensor.numel() == 0) return sizes[last];  // its strides may be anything
  bool regular = sizes[last] <= 1 || strides[last] == 1;
  int64_t stride = 0, expected = 0, seen = 0;
  for (int64_t i = last - 1; i >= 0 && regular; --i) {
    if (sizes[i] == 1) continue;
    if (!seen++) stride = expected = strides[i];
    regular = strides[i] == expected;
    expected *= sizes[i];
  }
  if (regular) return seen ? stride : sizes[last];
  tensor = torch::stable::contiguous(tensor);
  return sizes[last];
}

inline Tensor empty(const char* op, torch::headeronly::IntHeaderOnlyArrayRef sizes) {
  product(op, sizes);
  int64_t strides[64], size = 1;
  for (size_t i = sizes.size(); i-- > 0; size *= sizes[i] ? sizes[i] : 1) strides[i] = size;
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(int64_t(sizes.size()), sizes.data(), strides, aoti_torch_dtype_float32(),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  return Tensor(handle);
}
