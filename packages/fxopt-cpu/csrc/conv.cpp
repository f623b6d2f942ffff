// fxopt::conv: checks of every operand, the result, and how a convolution is split into pieces.
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "operators.h"
#include "threads.h"

namespace {

constexpr const char* CONV = "fxopt::conv";
constexpr int64_t BLOCK_BYTES = 256 << 10;   // of the pixels that a piece reads
constexpr int64_t STRIPE_BYTES = 384 << 10;  // of the rows between the layers of a block
constexpr int64_t MOST_TRANSFORMED = 1 << 18;  // elements of a weight that take 16 of 9 for Winograd's products

void check_sizes(const char* name, const std::vector<int64_t>& values, size_t count, int64_t least) {
  bool right = values.size() == count;
  for (int64_t value : values) right = right && value >= least && value < (int64_t(1) << 31);
  if (!right)
    refuse(CONV, ": ", name, " is ", text_of({values.data(), values.size()}), ", expected ", count, " numbers of at least ",
           least);
}

Tensor conv(Tensor input, Tensor panels, std::optional<Tensor> bias, int64_t features, std::vector<int64_t> kernel,
            std::vector<int64_t> stride, std::vector<int64_t> padding, std::vector<int64_t> dilation, int64_t groups,
            int64_t activation, double alpha, double beta, std::optional<Tensor> residual, std::optional<Tensor> scale,
            std::optional<Tensor> sums, std::optional<Tensor> rounding) {
  check_type(CONV, "input", input, ScalarType::Float);
  const bool integers = panels.scalar_type() == ScalarType::Char;
  check_type(CONV, "panels", panels, integers ? ScalarType::Char : ScalarType::Float);
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
  const int64_t depth = product(CONV, {taps, call.channels / groups});
  const int64_t dense[] = {panel_count, integers ? divide_up(depth, 4) : depth, 16, 4};
  const int64_t by_taps[] = {taps, divide_up(features, 16) * 16};
  if (integers && (groups != 1 || depth > MOST_DEPTH || !scale || !sums))
    refuse(CONV, ": panels of int8 need scale and sums, one group, and at most ", MOST_DEPTH, " weights of a feature");
  if (!integers && (scale || sums || rounding)) refuse(CONV, ": panels of float32 take no scale, sums and rounding");
  const torch::headeronly::IntHeaderOnlyArrayRef expected(call.depthwise ? by_taps : dense,
                                                          call.depthwise ? 2 : integers ? 4 : 3);
  if (!panels.sizes().equals(expected) || !panels.is_contiguous())
    refuse(CONV, ": panels have shape ", text_of(panels.sizes()), ", expected ", text_of(expected), ", contiguous");
  if (integers)
    call.integers = panels.const_data_ptr();
  else
    call.panels = static_cast<const float*>(panels.const_data_ptr());
  call.scale = vector_of<float>(CONV, "scale", scale, ScalarType::Float, panel_count * 16);
  call.sums = vector_of<int32_t>(CONV, "sums", sums, ScalarType::Int, panel_count * (rounding ? 32 : 16));
  call.rounding = vector_of<float>(CONV, "rounding", rounding, ScalarType::Float, call.channels * 2);
  call.features = features, call.pitch = call.channels, call.result_pitch = features;
  for (int i = 0; i < 2; ++i)
    call.kernel[i] = kernel[size_t(i)], call.stride[i] = stride[size_t(i)], call.dilation[i] = dilation[size_t(i)];
  if (!fit(CONV, call, {padding[0], padding[1], padding[2], padding[3]}))
    refuse(CONV, ": input has shape ", text_of(input.sizes()), ", padded less than the kernel ",
           text_of({kernel.data(), kernel.size()}), " dilated by ", text_of({dilation.data(), dilation.size()}));

  call.bias = vector_of<float>(CONV, "bias", bias, ScalarType::Float, features);
  call.activation = within(CONV, "activation", activation, 0, 13), call.alpha = float(alpha), call.beta = float(beta);
  const bool planes = !integers && may_be_planes(call) && input.is_contiguous();
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
  const int64_t of_group = features / groups;  // with 16, a group fills a panel
  return groups > 1 && groups == channels && of_group < 16 && (of_group & (of_group - 1)) == 0;
}

bool may_be_planes(const Convolution& call) {
  const int64_t taps = call.kernel[0] * call.kernel[1];
  const bool few = call.groups == 1 && call.channels < FEW_CHANNELS && taps > 1 && taps * call.channels <= MOST_COPIED;
  return few && call.dilation[0] == 1 && call.dilation[1] == 1;
}

bool may_be_winograd(const Convolution& call) {
  for (int i = 0; i < 2; ++i)
    if (call.kernel[i] != 3 || call.stride[i] != 1 || call.dilation[i] != 1) return false;
  return call.groups == 1 && !may_be_planes(call);
}

bool is_pointwise(const Convolution& call) {
  return call.kernel[0] * call.kernel[1] * call.stride[0] * call.stride[1] == 1 && call.rows == call.height &&
         call.columns == call.width && !call.padding[0] && !call.padding[1];
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

namespace {

// A convolution as kernels read it: its biases in whole panels, and zeros in whole vectors.
struct Prepared : Convolution {
  int64_t panel_count;
  double nanoseconds;

  explicit Prepared(const Convolution& call) : Convolution(call) {
    const int64_t parts = depthwise ? 1 : groups, of_part = features / parts, padded = divide_up(of_part, 16) * 16;
    panel_count = parts * padded / 16;
    for (repeats = 0; depthwise && channels << repeats < features;) ++repeats;
    constants_.resize(size_t(parts * padded + channels + 16), 0.0f);
    for (int64_t part = 0; call.bias && part < parts; ++part)
      std::memcpy(constants_.data() + part * padded, call.bias + part * of_part, size_t(of_part) * 4);
    bias = constants_.data(), zeros = constants_.data() + parts * padded;
    if (!input) input = zeros;  // images without a pixel, only padded
    const double products = double(images * rows * columns) * double(kernel[0] * kernel[1]);
    nanoseconds = depthwise ? products * double(features) / 25
                            : products * double(parts * padded) * double(channels / groups) / 75;
  }
  Prepared(const Prepared&) = delete;

 private:
  std::vector<float> constants_;
};

// Only the sizes of one image and its layer decide, so that the bits do not depend on threads or on other images. Weights
// are transformed at each call: below 25 tiles, that takes all the time that the fewer products save.
bool is_winograd(const Convolution& call) {
  const int64_t tiles = divide_up(call.rows, 2) * divide_up(call.columns, 2), weights = call.channels * call.features;
  return may_be_winograd(call) && call.features >= 16 && tiles >= 25 && tiles >= weights / 4096 && weights <= MOST_TRANSFORMED;
}

void run_winograd(const Prepared& call) {
  const Kernels& unit = kernels();
  const int64_t panels = call.panel_count, threads = threads_for(call.nanoseconds);
  float* const weights = reinterpret_cast<float*>(scratch<WEIGHTS>(size_t(16 * panels * call.channels * 16) * 4));
  const int64_t some = divide_up(panels, threads);
  run_pieces(divide_up(panels, some), call.nanoseconds, [&](int64_t piece) {
    unit.winograd_weights(call, weights, piece * some, std::min(panels, (piece + 1) * some));
  });
  // The transformed tiles of a piece stay in the L2 cache.
  const int64_t tiles = call.images * divide_up(call.rows, 2) * divide_up(call.columns, 2);
  const int64_t of_tile = 16 * (call.channels + MOST_TILE_PANELS * 16), fit = BLOCK_BYTES / 4 / of_tile / 12 * 12;
  const int64_t fair = divide_up(divide_up(tiles, threads > 1 ? threads * 4 : 1), 12) * 12;
  const int64_t part = std::min({std::max<int64_t>(fit, 12), MOST_TILES, fair});
  run_pieces(divide_up(tiles, part), call.nanoseconds, [&](int64_t piece) {
    float* const room = reinterpret_cast<float*>(scratch(size_t(part * of_tile + 2 * 16 * 16) * 4));
    unit.winograd(call, weights, room, piece * part, std::min(tiles, (piece + 1) * part));
  });
}

// Integers: inputs are rounded, the window of each pixel of the result becomes a row, and rows are multiplied like those of
// linear layers. Each image has its own scale, so that no image changes another's results.
constexpr float LEAST_NUMBER = 1e-30f;  // smaller ones are rounded as if the largest was this

class Integers {
 public:
  explicit Integers(const Convolution& call)
      : call_(call), image_(call.height * call.width), parts_(std::min<int64_t>(divide_up(image_, 64), 32)),
        nanoseconds_(double(call.images * image_) * double(call.channels) / 8), scales_(size_t(call.images), 1.f) {
    product_.format = INT8, product_.rows = call.images * call.rows * call.columns, product_.features = call.features;
    product_.depth = call.kernel[0] * call.kernel[1] * call.channels, product_.rounding = call.rounding;
    product_.panels = call.integers, product_.scale = call.scale, product_.sums = call.sums, product_.bias = call.bias;
    product_.activation = call.activation, product_.alpha = call.alpha, product_.beta = call.beta;
    product_.residual = call.residual, product_.residual_stride = call.features, product_.adds_first = true;
    product_.output = call.output, product_.output_stride = call.result_pitch;
    if (!call.rounding) measure();
  }
  void run() { is_pointwise(call_) ? multiply_pixels() : multiply_windows(); }

 private:
  const Convolution& call_;
  const int64_t image_, parts_;  // pixels, and the parts that they are worked on in
  const double nanoseconds_;
  std::vector<float> scales_, factors_;  // of each image; factors and shifts of its channels
  Linear product_{};

  const float* rounding(int64_t image) const {
    return call_.rounding ? call_.rounding : factors_.data() + image * call_.channels * 2;
  }
  template <class Function>
  void each_part(const Function& function) const {
    run_pieces(call_.images * parts_, nanoseconds_, [&](int64_t piece) {
      const int64_t image = piece / parts_, part = piece % parts_, start = image * image_;
      function(piece, image, start + image_ * part / parts_, start + image_ * (part + 1) / parts_);
    });
  }

  void measure() {
    std::vector<float> largest(size_t(call_.images * parts_));
    each_part([&](int64_t piece, int64_t, int64_t first, int64_t last) {
      largest[size_t(piece)] = kernels().largest_number(call_, first, last);
    });
    factors_.resize(size_t(call_.images * call_.channels * 2), 0.f);
    for (int64_t i = 0; i < call_.images; ++i) {
      float most = LEAST_NUMBER;
      for (int64_t part = 0; part < parts_; ++part) most = std::max(most, largest[size_t(i * parts_ + part)]);
      scales_[size_t(i)] = most / 127.f;
      std::fill_n(factors_.begin() + i * call_.channels * 2, call_.channels, 127.f / most);
    }
  }

  // A pixel is a row.
  void multiply_pixels() {
    product_.input = call_.input, product_.input_stride = call_.pitch;
    const int64_t row_bytes = kernels().linear_row_bytes(product_);
    run_linear(product_, [&](int64_t first, int64_t last, char* data, float* factors) {
      for (int64_t row = first, end; row < last; row = end) {
        const int64_t i = row / image_;
        end = std::min(last, (i + 1) * image_);
        Linear rounded = product_;
        rounded.rounding = rounding(i);
        kernels().linear_convert(rounded, row, end, data + (row - first) * row_bytes, factors + (row - first));
        for (int64_t r = row; r < end; ++r) factors[r - first] *= scales_[size_t(i)];
      }
    });
  }

  // Images become bytes, of which windows are copied.
  void multiply_windows() {
    const Kernels& unit = kernels();
    const int64_t all = call_.images * image_, pitch = divide_up(call_.channels, 16) * 16;
    char* const bytes = scratch<PIXELS>(size_t(all + 1) * size_t(pitch + 4));  // the last pixel is of zeros
    float* const finite = reinterpret_cast<float*>(bytes + (all + 1) * pitch);
    std::atomic<bool> special{false};
    each_part([&](int64_t, int64_t i, int64_t first, int64_t last) {
      unit.round_pixels(call_, first, last, rounding(i), pitch, bytes + first * pitch, finite + first);
      for (int64_t pixel = first; pixel < last; ++pixel)
        if (finite[pixel] != finite[pixel]) special = true;
    });
    const std::vector<float> zero(size_t(call_.channels), 0.f);
    Convolution zeros = call_, rounded = call_;
    zeros.input = zero.data();
    unit.round_pixels(zeros, 0, 1, rounding(0), pitch, bytes + all * pitch, finite + all);
    rounded.input = reinterpret_cast<const float*>(bytes), rounded.pitch = pitch / 4;
    rounded.zeros = reinterpret_cast<const float*>(bytes + all * pitch);
    const int64_t row_bytes = unit.linear_row_bytes(product_), of_result = call_.rows * call_.columns;
    std::vector<char> specials(special ? size_t(product_.rows) : 0);
    run_linear(product_, [&](int64_t first, int64_t last, char* data, float* factors) {
      unit.gather_rows(rounded, first, last, special ? finite : nullptr, row_bytes, data, factors);
      for (int64_t row = first; row < last; ++row, ++factors) {
        if (*factors != *factors) specials[size_t(row)] = 1, *factors = 0.f;  // computed below
        *factors *= scales_[size_t(row / of_result)];
      }
    });
    const double each = double(product_.depth) * double(product_.features) * 2;
    run_pieces(int64_t(specials.size()), each * double(specials.size()), [&](int64_t row) {
      if (specials[size_t(row)]) multiply_special(row);
    });
  }

  // A window with NaN or infinity: unrounded, times the integers of the weight.
  void multiply_special(int64_t row) {
    const int64_t pixel = row % (call_.rows * call_.columns), start = row / (call_.rows * call_.columns) * image_;
    std::vector<float> window(size_t(product_.depth), 0.f);
    for (int64_t tap = 0; tap < call_.kernel[0] * call_.kernel[1]; ++tap) {
      const int64_t y = pixel / call_.columns * call_.stride[0] - call_.padding[0] + tap / call_.kernel[1] * call_.dilation[0];
      const int64_t x = pixel % call_.columns * call_.stride[1] - call_.padding[1] + tap % call_.kernel[1] * call_.dilation[1];
      if (y < 0 || y >= call_.height || x < 0 || x >= call_.width) continue;
      const float* const from = call_.input + (start + y * call_.width + x) * call_.pitch;
      for (int64_t k = 0; k < call_.channels; ++k)
        window[size_t(tap * call_.channels + k)] = from[k] * (call_.rounding ? call_.rounding[k] : 1.f);
    }
    Linear one = product_;
    one.rows = 1, one.input = window.data(), one.rounding = nullptr, one.output += row * call_.result_pitch;
    if (one.residual) one.residual += row * call_.features;
    const int64_t bytes = kernels().linear_row_bytes(one);  // not by `run_linear`: a piece has no pieces of its own
    char* const data = scratch(size_t(bytes));
    float scale;
    kernels().linear_convert(one, 0, 1, data, &scale);
    kernels().linear_tiles(one, {data, bytes, &scale}, 0, 1, 0, divide_up(one.features, 16));
  }
};

}  // namespace

void run_convolution(const Convolution& given) {
  if (given.integers) return Integers(given).run();
  const Kernels& unit = kernels();
  const Prepared call(given);
  const int64_t lines = call.images * call.rows, pixels = lines * call.columns, panels = call.panel_count;
  const double nanoseconds = call.nanoseconds;
  if (call.depthwise) {
    const int64_t part = fair_part(lines, threads_for(nanoseconds), 8);
    run_pieces(divide_up(lines, part), nanoseconds, [&](int64_t piece) {
      unit.convolve_depthwise(call, piece * part, piece * part + part < lines ? piece * part + part : lines);
    });
    return;
  }
  if (is_winograd(call)) return run_winograd(call);
  // A piece is a block of pixels, whose inputs stay in the L2 cache, and some panels. Threads share the panels where
  // the panels are larger than the input, which each thread then reads, and the pixels otherwise.
  const int64_t threads = threads_for(nanoseconds), wanted = BLOCK_BYTES / (call.channels * 4) / 48 * 48;
  const int64_t most = wanted < 48 ? 48 : wanted, weights = panels * 16 * call.kernel[0] * call.kernel[1] / call.groups;
  int64_t blocks = divide_up(pixels * 4, most * 5), columns = panels;  // no small remainder
  if (threads > 1 && weights > pixels) {
    columns = fair_part(panels, threads, 4);
  } else if (threads > 1) {
    blocks = std::max(blocks, std::min(threads * 4, divide_up(pixels, 48)));
    if (blocks < threads * 4) columns = divide_up(divide_up(panels, divide_up(threads * 4, blocks)), 4) * 4;
  }
  const int64_t part = divide_up(pixels, blocks), column_pieces = divide_up(panels, columns);
  run_pieces(blocks * column_pieces, nanoseconds, [&](int64_t piece) {
    const int64_t first = piece / column_pieces * part, panel = piece % column_pieces * columns;
    unit.convolve(call, first, first + part < pixels ? first + part : pixels, panel,
                  panel + columns < panels ? panel + columns : panels);
  });
}

int64_t rows_read(const Window& window) {
  return std::min((window.kernel[0] - 1) * window.dilation[0] + 1, window.height);
}

void run_block(const Convolution& expand, const Convolution& deep, const Convolution* project) {
  const Kernels& unit = kernels();
  const Prepared first(expand), second(deep), third(project ? *project : deep);
  const int64_t step = deep.stride[0], reach = (deep.kernel[0] - 1) * deep.dilation[0] + 1, least = rows_read(deep);
  const int64_t line = deep.width * deep.channels, result = deep.columns * deep.features;  // of a row
  // A stripe of results, and the rows that it reads, stay in the L2 cache.
  int64_t stripe = (STRIPE_BYTES / 4 - least * line) / (std::min(step, deep.height) * line + result);
  stripe = stripe < 1 ? 1 : stripe < deep.rows ? stripe : deep.rows;
  const int64_t room = std::min((stripe - 1) * step + least, deep.height) * line;
  const double nanoseconds = first.nanoseconds + second.nanoseconds + (project ? third.nanoseconds : 0);
  // Where parts meet, both expand the rows that the windows share.
  const int64_t threads = threads_for(nanoseconds), wide_enough = deep.rows / (16 * std::max<int64_t>(reach - step, 1));
  const int64_t parts = threads > 1 ? std::min(std::clamp(wide_enough, threads, threads * 2), deep.rows) : 1;
  run_pieces(deep.images * parts, nanoseconds, [&](int64_t piece) {
    const int64_t image = piece / parts, part = piece % parts, end = deep.rows * (part + 1) / parts;
    float* const wide = reinterpret_cast<float*>(scratch(size_t(room + stripe * result) * 4));
    Convolution e = first, d = second, p = third;
    Convolution& last = project ? p : d;
    e.images = d.images = p.images = 1;
    e.input += image * e.height * e.width * (e.channel_stride == 1 ? e.pitch : e.channels);
    last.output += image * last.rows * last.columns * last.result_pitch;
    if (last.residual) last.residual += image * last.rows * last.columns * last.features;
    // `wide` holds rows `from` to `to` of what is expanded. Kernels take rows by their numbers in the image.
    int64_t from = 0, to = 0;
    for (int64_t y = deep.rows * part / parts, next; y < end; y = next) {
      next = std::min(y + stripe, end);
      const int64_t top = std::max<int64_t>(y * step - deep.padding[0], 0);
      const int64_t bottom = std::min((next - 1) * step - deep.padding[0] + reach, deep.height);
      if (top < to) {
        std::memmove(wide, wide + (top - from) * line, size_t((to - top) * line) * 4);
      } else {
        to = top;
      }
      from = top;
      e.output = wide - from * line, d.input = wide - from * line;
      if (to < bottom) unit.convolve(e, to * e.columns, bottom * e.columns, 0, first.panel_count), to = bottom;
      if (project) d.output = wide + room - y * result;
      unit.convolve_depthwise(d, y, next);
      p.input = d.output;
      if (project) unit.convolve(p, y * p.columns, next * p.columns, 0, third.panel_count);
    }
  });
}

STABLE_TORCH_LIBRARY_IMPL(fxopt, CPU, library) { library.impl("conv", TORCH_BOX(&conv)); }
