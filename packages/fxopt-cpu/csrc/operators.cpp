// fxopt::linear: checks of every operand, the result, and the call of the product.
#include "operators.h"

#include "kernels.h"

namespace {

constexpr const char* LINEAR = "fxopt::linear";

Tensor linear(Tensor input, Tensor panels, std::optional<Tensor> scale, std::optional<Tensor> sums, std::optional<Tensor> bias,
              int64_t features, int64_t activation, double alpha, double beta, std::optional<Tensor> residual, int64_t norm,
              std::optional<Tensor> norm_weight, std::optional<Tensor> norm_bias, double epsilon, bool gated,
              std::optional<Tensor> rounding) {
  check_type(LINEAR, "input", input, ScalarType::Float);
  if (input.dim() < 1) refuse(LINEAR, ": input has no dimension, expected (..., in)");
  Linear call{};
  if (input.dim() > 64) refuse(LINEAR, ": input has ", input.dim(), " dimensions, expected at most 64");
  call.depth = within(LINEAR, "the last size of input", input.size(input.dim() - 1), 0);
  call.features = within(LINEAR, "features", features, 1);
  int64_t sizes[64];
  for (int64_t i = 0; i + 1 < input.dim(); ++i) sizes[i] = input.size(i);
  sizes[input.dim() - 1] = features;
  const torch::headeronly::IntHeaderOnlyArrayRef shape(sizes, size_t(input.dim()));
  product(LINEAR, shape);
  call.rows = product(LINEAR, {sizes, size_t(input.dim() - 1)});
  const int64_t halves = gated ? 2 : 1, columns = (features + 15) / 16 * halves * 16;

  const ScalarType type = panels.scalar_type();
  int64_t together = 1;
  if (type == ScalarType::BFloat16) {
    call.format = BFLOAT16, together = 2;
  } else if (type == ScalarType::Char) {
    call.format = INT8, together = 4;
    if (!scale || !sums) refuse(LINEAR, ": panels of int8 need scale and sums");
    if (call.depth > MOST_DEPTH)
      refuse(LINEAR, ": input has ", call.depth, " columns, and int8 sums hold ", MOST_DEPTH, "; use bfloat16");
  } else {
    check_type(LINEAR, "panels", panels, ScalarType::Float);
  }
  check_type(LINEAR, "panels", panels, type);
  const int64_t steps = (call.depth + together - 1) / together;
  if (panels.dim() != (together == 1 ? 3 : 4) || panels.size(0) != columns / 16 || panels.size(1) != steps ||
      panels.size(2) != 16 || (together > 1 && panels.size(3) != together) || !panels.is_contiguous())
    refuse(LINEAR, ": panels have shape ", text_of(panels.sizes()), ", expected (", columns / 16, ", ", steps, ", 16",
           together > 1 ? ", " + std::to_string(together) : std::string(), "), contiguous, for ", features, " features",
           gated ? ", gated," : "", " of inputs with ", call.depth);
  call.panels = panels.const_data_ptr();
  if (rounding && call.format != INT8) refuse(LINEAR, ": rounding is given, which only panels of int8 take");
  call.scale = vector_of<float>(LINEAR, "scale", scale, ScalarType::Float, columns);
  call.sums = vector_of<int32_t>(LINEAR, "sums", sums, ScalarType::Int, rounding ? columns * 2 : columns);
  call.rounding = vector_of<float>(LINEAR, "rounding", rounding, ScalarType::Float, call.depth * 2);
  call.bias = vector_of<float>(LINEAR, "bias", bias, ScalarType::Float, features * halves);
  call.norm_weight = vector_of<float>(LINEAR, "norm_weight", norm_weight, ScalarType::Float, features);
  call.norm_bias = vector_of<float>(LINEAR, "norm_bias", norm_bias, ScalarType::Float, features);
  if (norm < 0 || norm > 2) refuse(LINEAR, ": norm is ", norm, ", expected 0 (none), 1 (layer norm) or 2 (RMS norm)");
  call.activation = within(LINEAR, "activation", activation, 0, 13), call.alpha = float(alpha), call.beta = float(beta);
  call.norm = norm, call.epsilon = float(epsilon), call.gated = gated;

  if (residual) {
    check_type(LINEAR, "residual", *residual, ScalarType::Float);
    if (!residual->sizes().equals(shape))
      refuse(LINEAR, ": residual has shape ", text_of(residual->sizes()), ", expected ", text_of(shape));
    call.residual_stride = row_stride(*residual);
    call.residual = static_cast<const float*>(residual->const_data_ptr());
  }
  call.input_stride = row_stride(input);
  call.input = static_cast<const float*>(input.const_data_ptr());
  Tensor result = empty(LINEAR, shape);
  call.output = static_cast<float*>(result.mutable_data_ptr()), call.output_stride = features;
  if (call.rows) run_linear(call);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fxopt, CPU, library) { library.impl("linear", TORCH_BOX(&linear)); }
