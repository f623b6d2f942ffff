// fxopt::conv: checks of every operand, the result, and how a convolution is split into pieces.
#include <cstring>
#include <vector>

#include "kernels.h"
#include "operators.h"
#include "threads.h"

namespace {

constexpr const char* CONV = "fxopt::conv";
constexpr int64_t BLOCK_BYTES = 256 << 10;  // of the pixels that a piece reads

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_sizes(const char* name, const std::vector<int64_t>& values, size_t count, int64_t least) {
  bool right = values.size() == count;
  for (int64_t value : values) right = right && value >= least && value < (int64_t(1) << 31);
  if (!right)
    refuse(CONV, ": ", name, " is ", text_of({values.data(), values.size()}), ", expected ", count, " numbers of at least ",
           least);
}

Tensor conv(Tensor input, Tensor panels, std::optional<Tensor> bias, int64_t features, std::vector<int64_t> kernel,
            std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups,
            int64_t activation, double alpha, double beta, std::optional<Tensor> residual) {
  check_type(CONV, "input", input, ScalarType::Float);
  check_type(CONV, "panels", panels, ScalarType::Float);
  if (input.dim() != 4) refuse(CONV, ": input has ", input.dim(), " dimensions, expected 4: (images, channels, height, width)");
  check_sizes("kernel", kernel, 2, 1), check_sizes("stride", stride, 2, 1), check_sizes("dilation", dilation, 2, 1);
  check_sizes("padding", padding, 4, 0);
  Convolution call{};
  call.images = input.size(0), call.channels = input.size(1), call.height = input.size(2), call.width = input.size(3);
  product(CONV, input.sizes());
  if (call.channels < 1) refuse(CONV, ": input has shape ", text_of(input.sizes()), ", expected at least one channel");
  within(CONV, "features", features, 1);
  if (groups < 1 || call.channels % groups || features % groups)
    refuse(CONV, ": groups is ", groups, " for ", call.channels, " channels and ", features,
           " features, expected a number that divides both");
  call.groups = groups, call.depthwise = is_depthwise(groups, call.channels, features);
  const int64_t taps = product(CONV, {kernel[0], kernel[1]}), panel_count = divide_up(features / groups, 16) * groups;
  if (taps > 4096) refuse(CONV, ": kernel has ", taps, " taps, expected at most 4096");
  const int64_t dense[] = {panel_count, product(CONV, {taps, call.channels / groups}), 16};
  const int64_t by_taps[] = {taps, divide_up(features, 16) * 16};
  const torch::headeronly::IntHeaderOnlyArrayRef expected(call.depthwise ? by_taps : dense, call.depthwise ? 2 : 3);
  if (!panels.sizes().equals(expected) || !panels.is_contiguous())
    refuse(CONV, ": panels have shape ", text_of(panels.sizes()), ", expected ", text_of(expected), ", contiguous");
  call.panels = static_cast<const float*>(panels.const_data_ptr());
  call.features = features, call.pitch = call.channels, call.result_pitch = features;
  for (int i = 0; i < 2; ++i)
    call.kernel[i] = kernel[size_t(i)], call.stride[i] = stride[size_t(i)], call.dilation[i] = dilation[size_t(i)];
  if (!fit(CONV, call, {padding[0], padding[1], padding[2], padding[3]}))
    refuse(CONV, ": input has shape ", text_of(input.sizes()), ", padded less than the kernel ",
           text_of({kernel.data(), kernel.size()}), " dilated by ", text_of({dilation.data(), dilation.size()}));

  call.bias = vector_of<float>(CONV, "bias", bias, ScalarType::Float, features);
  call.activation = within(CONV, "activation", activation, 0, 13), call.alpha = float(alpha), call.beta = float(beta);
  const bool planes = may_be_planes(call) && input.is_contiguous();
  if (!planes) input = torch::stable::contiguous(input, torch::headeronly::MemoryFormat::ChannelsLast);
  call.channel_stride = planes ? call.height * call.width : 1;
  call.input = static_cast<const float*>(input.const_data_ptr());
  const int64_t shape[] = {call.images, features, call.rows, call.columns};
  product(CONV, {shape, 4});
  if (residual) {
    check_type(CONV, "residual", *residual, ScalarType::Float);
    if (!residual->sizes().equals({shape, 4}))
      refuse(CONV, ": residual has shape ", text_of(residual->sizes()), ", expected ", text_of({shape, 4}));
    residual = torch::stable::contiguous(*residual, torch::headeronly::MemoryFormat::ChannelsLast);
    call.residual = static_cast<const float*>(residual->const_data_ptr());
  }
  const int64_t strides[] = {call.rows * call.columns * features, 1, call.columns * features, features};
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(4, shape, strides, aoti_torch_dtype_float32(),
                                                         aoti_torch_device_type_cpu(), 0, &handle));
  Tensor result(handle);
  call.output = static_cast<float*>(result.mutable_data_ptr());
  if (call.images) run_convolution(call);
  return result;
}

}  // namespace

bool is_depthwise(int64_t groups, int64_t channels, int64_t features) {
  return groups > 1 && groups == channels && groups == features;
}

bool may_be_planes(const Convolution& call) {
  const int64_t taps = call.kernel[0] * call.kernel[1];
  const bool few = call.groups == 1 && call.channels < FEW_CHANNELS && taps > 1 && taps * call.channels <= MOST_COPIED;
  return few && call.dilation[0] == 1 && call.dilation[1] == 1;
}

bool fit(const char* op, Window& window, const int64_t (&padding)[4]) {
  int64_t sizes[2];
  product(op, {window.height + padding[0] + padding[1], window.width + padding[2] + padding[3], window.channels});
  for (int i = 0; i < 2; ++i) {
    window.padding[i] = padding[i * 2];
    const int64_t length = i ? window.width : window.height;
    const int64_t room = length + padding[i * 2] + padding[i * 2 + 1] - window.dilation[i] * (window.kernel[i] - 1) - 1;
    sizes[i] = room < 0 ? 0 : room / window.stride[i] + 1;
  }
  window.rows = sizes[0], window.columns = sizes[1];
  return sizes[0] > 0 && sizes[1] > 0;
}

void run_pool(const Pool& call) {
  const int64_t lines = call.images * call.rows;
  const double nanoseconds = double(lines * call.columns * call.channels) * double(call.kernel[0] * call.kernel[1]) / 20;
  const int64_t part = divide_up(lines, threads_for(nanoseconds) * 4);
  run_pieces(divide_up(lines, part), nanoseconds, [&](int64_t piece) {
    kernels().pool_rows(call, piece * part, piece * part + part < lines ? piece * part + part : lines);
  });
}

void run_convolution(Convolution call) {
  const Kernels& unit = kernels();
  const int64_t lines = call.images * call.rows, pixels = lines * call.columns;
  const int64_t groups = call.depthwise ? 1 : call.groups, features = call.features / groups;
  const int64_t of_group = divide_up(features, 16), panels = groups * of_group;
  const double taps = double(call.kernel[0] * call.kernel[1]), results = double(pixels) * double(call.features);
  // Biases are read in whole panels, and zeros in whole vectors.
  std::vector<float> constants(size_t(panels * 16 + call.channels + 16), 0.0f);
  for (int64_t group = 0; call.bias && group < groups; ++group)
    std::memcpy(constants.data() + group * of_group * 16, call.bias + group * features, size_t(features) * 4);
  call.bias = constants.data(), call.zeros = constants.data() + panels * 16;
  if (!call.input) call.input = call.zeros;  // images without a pixel, only padded
  if (call.depthwise) {
    const double nanoseconds = results * taps / 25;
    const int64_t part = divide_up(lines, threads_for(nanoseconds) * 4);
    run_pieces(divide_up(lines, part), nanoseconds, [&](int64_t piece) {
      unit.convolve_depthwise(call, piece * part, piece * part + part < lines ? piece * part + part : lines);
    });
    return;
  }
  // A piece is a block of pixels, whose inputs stay in the second cache, and some panels.
  const double nanoseconds = double(pixels) * double(panels * 16) * taps * double(call.channels / groups) / 75;
  const int64_t threads = threads_for(nanoseconds), wanted = BLOCK_BYTES / (call.channels * 4) / 48 * 48;
  const int64_t fair = divide_up(pixels, threads > 1 ? threads * 4 : 1), most = wanted < 48 ? 48 : wanted;
  int64_t part = most < pixels ? most : pixels;
  if (fair < part) part = fair < 48 ? 48 : fair;
  const int64_t blocks = divide_up(pixels, part);
  int64_t columns = panels;
  if (threads > 1 && blocks < threads * 4) columns = divide_up(divide_up(panels, divide_up(threads * 4, blocks)), 4) * 4;
  const int64_t column_pieces = divide_up(panels, columns);
  run_pieces(blocks * column_pieces, nanoseconds, [&](int64_t piece) {
    const int64_t first = piece / column_pieces * part, panel = piece % column_pieces * columns;
    unit.convolve(call, first, first + part < pixels ? first + part : pixels, panel,
                  panel + columns < panels ? panel + columns : panels);
  });
}

STABLE_TORCH_LIBRARY_IMPL(fxopt, CPU, library) { library.impl("conv", TORCH_BOX(&conv)); }
