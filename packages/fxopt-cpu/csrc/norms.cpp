// fxopt::norm and fxopt::embedding_norm: checks of every operand, the results, and how the work is split.
#include <algorithm>
#include <cmath>
#include <vector>

#include "kernels.h"
#include "operators.h"
#include "threads.h"

namespace {

// Some rows at a time, each of about 5 us.
template <class Function>
void by_rows(int64_t rows, double nanoseconds_each, const Function& function) {
  const int64_t some = int64_t(5e3 / nanoseconds_each) + 1;
  run_pieces((rows + some - 1) / some, double(rows) * nanoseconds_each, [&](int64_t piece) {
    function(piece * some, piece * some + some < rows ? piece * some + some : rows);
  });
}

}  // namespace

void run_norm(const Norm& call) {
  by_rows(call.rows, double(call.size) / 8 + 10, [&](int64_t first, int64_t last) { kernels().norm_rows(call, first, last); });
}

// The moments of parts of an image are joined in double precision as in Chan, Golub and LeVeque, "Updating formulae and a
// pairwise algorithm for computing sample variances" (1979). A part is read twice, so it has to stay in the L2 cache; its sums
// are of floats, so it has at most 128 pixels: longer sums lose digits where the mean is far from zero.
void run_group_norm(const GroupNorm& call) {
  const int64_t channels = call.channels, of_group = channels / call.groups;
  const int64_t some = std::max<int64_t>(1, std::min<int64_t>(128, 32768 / channels)), parts = divide_up(call.pixels, some);
  const double nanoseconds = double(call.images * call.pixels) * double(channels) / 8;
  float* moments = reinterpret_cast<float*>(scratch(size_t((parts * 2 + 3) * call.images * channels) * 4));
  float* constants = moments + parts * 2 * call.images * channels;
  const auto by_parts = [&](const auto& function) {
    run_pieces(call.images * parts, nanoseconds, [&](int64_t piece) {
      const int64_t image = piece / parts, first = piece % parts * some;
      function(piece, image, image * call.pixels + first, std::min(some, call.pixels - first));
    });
  };
  by_parts([&](int64_t piece, int64_t, int64_t pixel, int64_t count) {
    kernels().channel_moments(call, call.input + pixel * call.pitch, count, moments + piece * 2 * channels);
  });
  run_pieces(call.images * call.groups, double(parts * call.images) * double(channels) * 2, [&](int64_t i) {
    const int64_t image = i / call.groups, start = i % call.groups * of_group;
    const auto over_parts = [&](const auto& term) {
      double total = 0;
      for (int64_t part = 0; part < parts; ++part) {
        const float* mean = moments + (image * parts + part) * 2 * channels + start;
        const double count = double(std::min(some, call.pixels - part * some));
        for (int64_t c = 0; c < of_group; ++c) total += term(count, double(mean[c]), double(mean[channels + c]));
      }
      return total / (double(call.pixels) * double(of_group));
    };
    const double mean = over_parts([](double count, double of_part, double) { return count * of_part; });
    const double variance = over_parts([mean](double count, double of_part, double square) {
      return square + count * (of_part - mean) * (of_part - mean);
    });
    const float factor = float(1 / std::sqrt(variance + double(call.epsilon)));
    for (int64_t c = start; c < start + of_group; ++c) {
      float* to = constants + image * 3 * channels + c;
      to[0] = float(mean), to[channels] = call.weight ? factor * call.weight[c] : factor;
      // With what a float cannot hold of the mean.
      to[2 * channels] = (call.bias ? call.bias[c] : 0.f) - float(mean - double(to[0])) * to[channels];
    }
  });
  by_parts([&](int64_t, int64_t image, int64_t pixel, int64_t count) {
    kernels().normalize_channels(call, call.input + pixel * call.pitch, count, constants + image * 3 * channels,
                                 call.result + pixel * call.result_pitch);
  });
}

void run_embedding(const Embedding& call) {
  by_rows(call.rows, double(call.size) / 8 * double(call.tables) + 10,
          [&](int64_t first, int64_t last) { kernels().embedding_rows(call, first, last); });
}

void run_elementwise(const Elementwise& call) {
  by_rows(call.sizes[0] * call.sizes[1] * call.sizes[2], double(call.sizes[3]) / 4 + 10,
          [&](int64_t first, int64_t last) { kernels().elementwise_rows(call, first, last); });
}

namespace {

Tensor norm(Tensor input, std::optional<Tensor> residual, std::optional<Tensor> weight, std::optional<Tensor> bias,
            double epsilon, int64_t kind) {
  constexpr const char* OP = "fxopt::norm";
  check_type(OP, "input", input, ScalarType::Float);
  if (input.dim() < 1 || input.dim() > 64) refuse(OP, ": input has ", input.dim(), " dimensions, expected 1 to 64");
  product(OP, input.sizes());
  if (kind != 1 && kind != 2) refuse(OP, ": kind is ", kind, ", expected 1 (layer norm) or 2 (RMS norm)");
  Norm call{};
  call.kind = kind, call.epsilon = float(epsilon), call.size = input.size(input.dim() - 1);
  call.rows = call.size ? input.numel() / call.size : 0;
  call.weight = vector_of<float>(OP, "weight", weight, ScalarType::Float, call.size);
  call.bias = vector_of<float>(OP, "bias", bias, ScalarType::Float, call.size);
  if (residual) {
    check_type(OP, "residual", *residual, ScalarType::Float);
    if (!residual->sizes().equals(input.sizes()))
      refuse(OP, ": residual has shape ", text_of(residual->sizes()), ", expected ", text_of(input.sizes()));
    call.residual_stride = row_stride(*residual);
    call.residual = static_cast<const float*>(residual->const_data_ptr());
  }
  call.input_stride = row_stride(input);
  call.input = static_cast<const float*>(input.const_data_ptr());
  Tensor result = empty(OP, input.sizes());
  call.result = static_cast<float*>(result.mutable_data_ptr());
  if (call.rows) run_norm(call);
  return result;
}

Tensor embedding_norm(std::vector<Tensor> ids, std::vector<Tensor> tables, std::optional<Tensor> weight,
                      std::optional<Tensor> bias, double epsilon, int64_t kind) {
  constexpr const char* OP = "fxopt::embedding_norm";
  constexpr int64_t MOST_DIMENSIONS = 8;
  const int64_t count = int64_t(tables.size());
  if (count < 1 || count > MOST_TABLES || int64_t(ids.size()) != count)
    refuse(OP, ": ", count, " tables and ", ids.size(), " ids, expected as many, 1 to ", MOST_TABLES);
  if (kind < 0 || kind > 2) refuse(OP, ": kind is ", kind, ", expected 0 (none), 1 (layer norm) or 2 (RMS norm)");
  Embedding call{};
  call.kind = kind, call.epsilon = float(epsilon), call.tables = count;
  int64_t dimensions = 0, sizes[MOST_DIMENSIONS + 1];
  for (const Tensor& part : ids) {
    check_type(OP, "ids", part, ScalarType::Long);
    if (part.dim() > MOST_DIMENSIONS) refuse(OP, ": ids have ", part.dim(), " dimensions, expected at most ", MOST_DIMENSIONS);
    dimensions = part.dim() > dimensions ? part.dim() : dimensions;
  }
  for (int64_t i = 0; i < dimensions; ++i) {
    sizes[i] = 1;
    for (const Tensor& part : ids) {
      const int64_t at = i - (dimensions - part.dim()), size = at < 0 ? 1 : part.size(at);
      if (size != 1 && sizes[i] != 1 && size != sizes[i])
        refuse(OP, ": ids of shapes ", text_of(ids[0].sizes()), " and ", text_of(part.sizes()), " do not broadcast");
      if (size != 1) sizes[i] = size;
    }
  }
  if (tables[0].dim() != 2)
    refuse(OP, ": a table has shape ", text_of(tables[0].sizes()), ", expected (entries, size)");
  call.size = sizes[dimensions] = tables[0].size(1);
  call.rows = product(OP, {sizes, size_t(dimensions)});
  // First the result: where its rows have memory, there are not too many ids either.
  Tensor result = empty(OP, {sizes, size_t(dimensions + 1)});
  if (call.rows == 0 || call.size == 0) return result;
  std::vector<int64_t> rows(size_t(call.rows * count));
  for (int64_t t = 0; t < count; ++t) {
    Tensor& table = tables[size_t(t)];
    const Tensor& part = ids[size_t(t)];
    check_type(OP, "tables", table, ScalarType::Float);
    if (table.dim() != 2 || table.size(1) != tables[0].size(1))
      refuse(OP, ": tables have shapes ", text_of(tables[0].sizes()), " and ", text_of(table.sizes()),
             ", expected (entries, size) with one size");
    if (table.size(1) > 1 && table.stride(1) != 1) table = torch::stable::contiguous(table);
    call.stride[t] = table.stride(0);
    call.table[t] = static_cast<const float*>(table.const_data_ptr());
    const int64_t* from = static_cast<const int64_t*>(part.const_data_ptr());
    const int64_t entries = table.size(0);
    int64_t index[MOST_DIMENSIONS] = {}, steps[MOST_DIMENSIONS] = {};
    for (int64_t i = 0; i < part.dim(); ++i)
      if (part.size(i) != 1) steps[dimensions - part.dim() + i] = part.stride(i);
    for (int64_t row = 0; row < call.rows; ++row) {
      int64_t at = 0;
      for (int64_t i = 0; i < dimensions; ++i) at += index[i] * steps[i];
      if (from[at] < 0 || from[at] >= entries)
        refuse(OP, ": index out of range in self: ", from[at], " in a table of ", entries, " entries");
      rows[size_t(row * count + t)] = from[at];
      for (int64_t i = dimensions - 1; i >= 0 && ++index[i] == sizes[i]; --i) index[i] = 0;
    }
  }
  call.ids = rows.data();
  call.weight = vector_of<float>(OP, "weight", weight, ScalarType::Float, call.size);
  call.bias = vector_of<float>(OP, "bias", bias, ScalarType::Float, call.size);
  call.result = static_cast<float*>(result.mutable_data_ptr());
  run_embedding(call);
  return result;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fxopt, CPU, library) {
  library.impl("norm", TORCH_BOX(&norm));
  library.impl("embedding_norm", TORCH_BOX(&embedding_norm));
}
