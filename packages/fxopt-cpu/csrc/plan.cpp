// fxopt::run: a plan of steps over one arena. operators/plan.py writes plans, and says what the numbers are.
//
// A plan is data that anybody can write: every operand is checked, as its step comes, against the tensors of this call.
#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "kernels.h"
#include "operators.h"
#include "threads.h"

namespace {

constexpr const char* OP = "fxopt::run";
constexpr int64_t FORMAT = 9;
enum StepKind : int64_t {
  LINEAR_STEP = 1, ATTENTION_STEP, NORM_STEP, EMBEDDING_STEP, ELEMENTWISE_STEP, CONVOLUTION_STEP, POOL_STEP,
  PICK_STEP, BLOCK_STEP, GROUP_NORM_STEP
};

// What operands lie in: the arena, the inputs, the outputs and the weights, in this order.
struct Slot {
  char* data;
  int64_t elements;
  ScalarType type;
  bool writable;
};

int64_t size_of(ScalarType type) {
  switch (type) {
    case ScalarType::Float:
    case ScalarType::Int:
      return 4;
    case ScalarType::Long:
      return 8;
    case ScalarType::BFloat16:
      return 2;
    case ScalarType::Char:
    case ScalarType::Bool:
      return 1;
    default:
      refuse(OP, ": a tensor is ", torch::headeronly::toString(type), ", which no step takes");
  }
}

int64_t product(std::initializer_list<int64_t> factors) { return ::product(OP, factors); }

// The elements from the first to the last of such sizes, of which the first `count` have strides and the rest lie together.
// Where there are none, it is 0, and so are the strides then: no operand bounds them.
template <size_t N>
int64_t extent(const int64_t (&sizes)[N], int64_t* strides, size_t count = N) {
  int64_t result = 1;
  for (const int64_t size : sizes)
    if (size == 0) result = 0;
  if (result == 0) std::fill(strides, strides + count, 0);
  for (size_t i = 0; i < N && result; ++i) result += product({sizes[i] - 1, i < count ? strides[i] : 1});
  return result;
}

class Reader {
 public:
  const int64_t *at, *end;
  std::vector<Slot> slots;
  int64_t step = -1;

  int64_t number() {
    if (at == end) refuse(OP, ": the plan ends within step ", step);
    return *at++;
  }
  int64_t size(int64_t least = 0, int64_t most = LARGEST) {
    const int64_t value = number();
    if (value < least || value > most)
      refuse(OP, ": step ", step, " of the plan has the number ", value, ", expected ", least, " to ", most);
    return value;
  }
  template <size_t N>
  void sizes(int64_t (&to)[N]) {
    for (int64_t& each : to) each = size();
  }
  float real() {
    const int64_t bits = number();
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }
  const Slot* slot(int64_t& offset) {
    const int64_t index = size(-1, int64_t(slots.size()) - 1);
    offset = size();
    return index < 0 ? nullptr : &slots[size_t(index)];
  }
  // An operand of so many elements, or null where the plan names none and `optional` allows it.
  const void* operand(ScalarType type, int64_t elements, bool optional = false) { return find(type, elements, optional, false); }
  const float* floats(int64_t elements, bool optional = false) {
    return static_cast<const float*>(operand(ScalarType::Float, elements, optional));
  }
  float* result(int64_t elements, bool optional = false) {
    return static_cast<float*>(find(ScalarType::Float, elements, optional, true));
  }
  void* find(ScalarType type, int64_t elements, bool optional, bool writable) {
    int64_t offset;
    const Slot* found = slot(offset);
    if (!found) {
      if (!optional) refuse(OP, ": step ", step, " of the plan lacks an operand");
      return nullptr;
    }
    if (found->type != type)
      refuse(OP, ": step ", step, " of the plan has an operand of ", torch::headeronly::toString(found->type), ", expected ",
             torch::headeronly::toString(type));
    if (writable && !found->writable) refuse(OP, ": step ", step, " of the plan writes to an input or a weight");
    if (offset > found->elements || elements > found->elements - offset)
      refuse(OP, ": step ", step, " of the plan has an operand of ", elements, " elements from ", offset, " on, where there are ",
             found->elements);
    return found->data + offset * size_of(type);
  }
};

// The bytes of a row of so many floats once it is rounded, or 0 where it does not become smaller or would need padding.
int64_t rounded_row(int64_t features) {
  Linear next{};
  next.format = BFLOAT16, next.depth = features;
  const int64_t bytes = features % 32 ? 0 : kernels().linear_row_bytes(next);
  return bytes < features * 4 ? bytes : 0;
}

void linear(Reader& plan) {
  Linear call{};
  const bool rounded_input = plan.size(0, 1), rounded_output = plan.size(0, 1);
  call.format = Format(plan.size(0, 2));
  call.rows = plan.size(), call.depth = plan.size(0, call.format == INT8 ? MOST_DEPTH : LARGEST), call.features = plan.size(1);
  call.activation = plan.size(0, 13), call.alpha = plan.real(), call.beta = plan.real();
  call.norm = plan.size(0, 2), call.epsilon = plan.real(), call.gated = plan.size(0, 1);
  const bool rounded = plan.size(0, call.format == INT8);
  call.input_stride = plan.size(), call.residual_stride = plan.size();
  const int64_t halves = call.gated ? 2 : 1, panels = (call.features + 15) / 16 * halves;
  const int64_t together = call.format == FLOAT32 ? 1 : call.format == BFLOAT16 ? 2 : 4;
  const ScalarType type =
      call.format == FLOAT32 ? ScalarType::Float : call.format == BFLOAT16 ? ScalarType::BFloat16 : ScalarType::Char;
  call.input = plan.floats(extent<2>({call.rows, call.depth}, &call.input_stride, 1));
  call.panels = plan.operand(type, product({panels, (call.depth + together - 1) / together, 16, together}));
  call.scale = plan.floats(panels * 16, call.format != INT8);
  call.sums = static_cast<const int32_t*>(plan.operand(ScalarType::Int, panels * (rounded ? 32 : 16), call.format != INT8));
  call.rounding = plan.floats(product({call.depth, 2}), !rounded);
  if (call.rounding && !rounded) refuse(OP, ": step ", plan.step, " of the plan rounds rows, and has an operand that rounds them");
  call.bias = plan.floats(call.features * halves, true);
  call.residual = plan.floats(extent<2>({call.rows, call.features}, &call.residual_stride, 1), true);
  call.norm_weight = plan.floats(call.features, true);
  call.norm_bias = plan.floats(call.features, true);
  call.output = plan.result(product({call.rows, call.features})), call.output_stride = call.features;
  if ((rounded_input && (call.format != BFLOAT16 || call.input_stride != call.depth)) || (rounded_output && call.norm))
    refuse(OP, ": step ", plan.step, " of the plan has rows that cannot be rounded");
  if (rounded_input) call.rounded_input = rounded_row(call.depth);
  if (rounded_output) call.rounded_output = rounded_row(call.features);
  if (call.rows) run_linear(call);
}

void attention(Reader& plan) {
  Attention call{};
  call.batch = plan.size(), call.heads = plan.size(1), call.kv_heads = plan.size(1, call.heads), call.queries = plan.size();
  call.keys = plan.size(), call.size = plan.size(), call.value_size = plan.size();
  call.causal = plan.size(0, 1), call.rounded = plan.size(0, 1), call.scale = plan.real();
  if (call.heads % call.kv_heads) refuse(OP, ": step ", plan.step, " of the plan has heads that do not divide into groups");
  plan.sizes(call.query_strides), plan.sizes(call.key_strides), plan.sizes(call.value_strides), plan.sizes(call.mask_strides);
  const auto rows = [](int64_t batch, int64_t heads, int64_t count, int64_t size, int64_t(&strides)[3]) {
    return extent<4>({batch, heads, count, size}, strides, 3);
  };
  call.query = plan.floats(rows(call.batch, call.heads, call.queries, call.size, call.query_strides));
  call.key = plan.floats(rows(call.batch, call.kv_heads, call.keys, call.size, call.key_strides));
  call.value = plan.floats(rows(call.batch, call.kv_heads, call.keys, call.value_size, call.value_strides));
  if (call.keys > 1 && !call.value_strides[2])  // then no operand bounds them
    refuse(OP, ": step ", plan.step, " of the plan has keys that overlap");
  const bool attended = plan.size(0, 1);
  const void* mask = plan.operand(attended ? ScalarType::Bool : ScalarType::Float,
                                  extent({call.batch, call.heads, call.queries, call.keys}, call.mask_strides), true);
  if (attended)
    call.attended = static_cast<const unsigned char*>(mask);
  else
    call.mask = static_cast<const float*>(mask);
  call.result = plan.result(product({call.batch, call.queries, call.heads, call.value_size}));
  if (call.batch && call.queries && call.value_size) run_attention(call);
}

void norm(Reader& plan) {
  Norm call{};
  call.rows = plan.size(), call.size = plan.size(1), call.kind = plan.size(1, 2), call.epsilon = plan.real();
  call.input_stride = plan.size(), call.residual_stride = plan.size();
  call.input = plan.floats(extent<2>({call.rows, call.size}, &call.input_stride, 1));
  call.residual = plan.floats(extent<2>({call.rows, call.size}, &call.residual_stride, 1), true);
  call.weight = plan.floats(call.size, true);
  call.bias = plan.floats(call.size, true);
  call.result = plan.result(product({call.rows, call.size}));
  call.sum = plan.result(product({call.rows, call.size}), true);
  if (call.rows) run_norm(call);
}

void embedding(Reader& plan) {
  Embedding call{};
  int64_t sizes[4];
  plan.sizes(sizes);
  call.rows = product({sizes[0], sizes[1], sizes[2], sizes[3]});
  call.size = plan.size(1), call.kind = plan.size(0, 2), call.epsilon = plan.real(), call.tables = plan.size(1, MOST_TABLES);
  // The rows of the result come first in the plan: where they have memory, there are not too many ids either.
  call.result = plan.result(product({call.rows, call.size}));
  call.weight = plan.floats(call.size, true);
  call.bias = plan.floats(call.size, true);
  std::vector<int64_t> ids(size_t(call.rows * call.tables));
  for (int64_t t = 0; t < call.tables; ++t) {
    const int64_t entries = plan.size();
    call.stride[t] = plan.size();
    int64_t strides[4];
    plan.sizes(strides);
    const int64_t* from = static_cast<const int64_t*>(plan.operand(ScalarType::Long, extent(sizes, strides)));
    call.table[t] = plan.floats(extent<2>({entries, call.size}, &call.stride[t], 1));
    for (int64_t row = 0; row < call.rows; ++row) {
      const int64_t outer = row / sizes[3] / sizes[2];
      const int64_t id = from[outer / sizes[1] * strides[0] + outer % sizes[1] * strides[1] +
                              row / sizes[3] % sizes[2] * strides[2] + row % sizes[3] * strides[3]];
      if (id < 0 || id >= entries) refuse(OP, ": index out of range in self: ", id, " in a table of ", entries, " entries");
      ids[size_t(row * call.tables + t)] = id;
    }
  }
  call.ids = ids.data();
  if (call.rows) run_embedding(call);
}

void elementwise(Reader& plan) {
  Elementwise call{};
  call.operation = plan.size(0, DIVIDE), call.activation = plan.size(0, 13), call.alpha = plan.real(), call.beta = plan.real();
  plan.sizes(call.sizes), plan.sizes(call.a_strides), plan.sizes(call.b_strides), plan.sizes(call.result_strides);
  call.a = plan.floats(extent(call.sizes, call.a_strides));
  call.b = plan.floats(extent(call.sizes, call.b_strides), call.operation == COPY);
  const int64_t elements = product({call.sizes[0], call.sizes[1], call.sizes[2], call.sizes[3]});
  const int64_t reached = extent(call.sizes, call.result_strides, 3);
  if (elements > reached) refuse(OP, ": step ", plan.step, " of the plan has results that overlap");
  call.result = plan.result(reached);
  if (elements) run_elementwise(call);
}

// The elements from the first to the last of images whose pixels are so far apart.
int64_t pixels_of(int64_t images, int64_t rows, int64_t columns, int64_t channels, int64_t pitch) {
  return product({product({images, rows, columns}) - 1, pitch}) + channels;
}

// result[image][y][x] = input[image][rows[y]][columns[x]], as images are enlarged to the nearest pixel.
void pick(Reader& plan) {
  const int64_t images = plan.size(1), height = plan.size(1), width = plan.size(1), channels = plan.size(1);
  const int64_t rows = plan.size(1), columns = plan.size(1);
  const int64_t pitch = plan.size(channels), result_pitch = plan.size(channels);
  const int64_t* places = plan.at;  // of the rows, then of the columns
  for (int64_t i = 0; i < rows; ++i) plan.size(0, height - 1);
  for (int64_t i = 0; i < columns; ++i) plan.size(0, width - 1);
  const float* input = plan.floats(pixels_of(images, height, width, channels, pitch));
  float* result = plan.result(pixels_of(images, rows, columns, channels, result_pitch));
  run_pieces(images * rows, double(images * rows) * double(columns) * double(channels) / 8, [&](int64_t row) {
    const float* from = input + (row / rows * height + places[row % rows]) * width * pitch;
    float* to = result + row * columns * result_pitch;
    for (int64_t x = 0; x < columns; ++x, to += result_pitch)
      std::memmove(to, from + places[rows + x] * pitch, size_t(channels) * 4);  // a plan may let them overlap
  });
}

// Sizes that a window moves over; returns how many taps it has.
int64_t window(Reader& plan, Window& call, int64_t (&padding)[4]) {
  constexpr int64_t most = int64_t(1) << 31;
  call.images = plan.size(1, most), call.height = plan.size(1, most);
  call.width = plan.size(1, most), call.channels = plan.size(1, most);
  for (int64_t& each : call.kernel) each = plan.size(1, 4096);
  for (int64_t& each : call.stride) each = plan.size(1, most);
  for (int64_t& each : padding) each = plan.size(0, most);
  for (int64_t& each : call.dilation) each = plan.size(1, most);
  call.pitch = plan.size(call.channels, most), call.result_pitch = plan.size(1, most);
  if (!fit(OP, call, padding)) refuse(OP, ": step ", plan.step, " of the plan has a kernel larger than its images");
  return product({call.kernel[0], call.kernel[1]});
}

// The layers of a block have no images between them: they read or write no operand.
Convolution convolution(Reader& plan, bool reads = true, bool writes = true) {
  Convolution call{};
  int64_t padding[4];
  const int64_t taps = window(plan, call, padding);
  call.features = plan.size(1), call.groups = plan.size(1, call.features);
  const bool planes = plan.size(0, 1);
  if (planes && !may_be_planes(call)) refuse(OP, ": step ", plan.step, " of the plan has images whose channels are not last");
  call.channel_stride = planes ? call.height * call.width : 1;
  call.activation = plan.size(0, 13), call.alpha = plan.real(), call.beta = plan.real();
  if (taps > 4096) refuse(OP, ": step ", plan.step, " of the plan has ", taps, " taps, expected at most 4096");
  if (call.channels % call.groups || call.features % call.groups)
    refuse(OP, ": step ", plan.step, " of the plan has channels or features that do not divide into groups");
  call.depthwise = is_depthwise(call.groups, call.channels, call.features);
  const int64_t groups = call.depthwise ? 1 : call.groups, padded = (call.features / groups + 15) / 16 * 16 * groups;
  if (call.result_pitch < call.features || (planes && call.pitch != call.channels))
    refuse(OP, ": step ", plan.step, " of the plan has pixels that overlap");
  const int64_t depth = product({taps, call.channels / call.groups});
  const bool integers = plan.size(0, 1), rounded = plan.size(0, integers);
  if (integers && (call.groups != 1 || planes || depth > MOST_DEPTH))
    refuse(OP, ": step ", plan.step, " of the plan has a layer that integers do not compute");
  if (reads) call.input = plan.floats(pixels_of(call.images, call.height, call.width, call.channels, call.pitch));
  if (integers)
    call.integers = plan.operand(ScalarType::Char, product({padded, divide_up(depth, 4), 4}));
  else
    call.panels = plan.floats(product({padded, depth}));
  call.scale = plan.floats(padded, !integers);
  call.sums = static_cast<const int32_t*>(plan.operand(ScalarType::Int, padded * (rounded ? 2 : 1), !integers));
  call.rounding = plan.floats(product({2, call.channels}), !rounded);
  if (call.rounding && !rounded) refuse(OP, ": step ", plan.step, " of the plan rounds images, and has an operand that rounds them");
  call.bias = plan.floats(call.features, true);
  call.residual = plan.floats(product({call.images, call.rows, call.columns, call.features}), true);
  if (writes) call.output = plan.result(pixels_of(call.images, call.rows, call.columns, call.features, call.result_pitch));
  return call;
}

bool follows(const Convolution& next, const Convolution& call) {
  return next.images == call.images && next.height == call.rows && next.width == call.columns &&
         next.channels == call.features && next.pitch == next.channels && call.result_pitch == call.features && !call.residual;
}

void block(Reader& plan) {
  const bool projects = plan.size(0, 1);
  const Convolution expand = convolution(plan, true, false), deep = convolution(plan, false, !projects);
  const Convolution project = projects ? convolution(plan, false) : deep;
  const bool ends = !projects || (is_pointwise(project) && !project.depthwise && follows(project, deep));
  const bool whole = expand.integers || project.integers || may_be_winograd(expand);
  if (whole || expand.depthwise || !deep.depthwise || !follows(deep, expand) || !ends)
    refuse(OP, ": step ", plan.step, " of the plan has layers that do not form a block");
  if (product({rows_read(deep), deep.width, deep.channels}) + product({deep.columns, deep.features}) > MOST_OF_STRIPE)
    refuse(OP, ": step ", plan.step, " of the plan has rows that are too large for a block");
  run_block(expand, deep, projects ? &project : nullptr);
}

void pool(Reader& plan) {
  Pool call{};
  int64_t padding[4];
  window(plan, call, padding);
  call.largest = plan.size(0, 1), call.counts_padding = plan.size(0, 1);
  call.after[0] = padding[1], call.after[1] = padding[3];
  if (call.result_pitch < call.channels) refuse(OP, ": step ", plan.step, " of the plan has pixels that overlap");
  call.input = plan.floats(pixels_of(call.images, call.height, call.width, call.channels, call.pitch));
  call.output = plan.result(pixels_of(call.images, call.rows, call.columns, call.channels, call.result_pitch));
  run_pool(call);
}

void group_norm(Reader& plan) {
  GroupNorm call{};
  call.images = plan.size(1), call.pixels = plan.size(1), call.channels = plan.size(1);
  call.groups = plan.size(1, call.channels), call.epsilon = plan.real();
  call.activation = plan.size(0, 13), call.alpha = plan.real(), call.beta = plan.real();
  call.pitch = plan.size(call.channels), call.result_pitch = plan.size(call.channels);
  if (call.channels % call.groups) refuse(OP, ": step ", plan.step, " of the plan has channels that do not divide into groups");
  call.input = plan.floats(pixels_of(call.images, call.pixels, 1, call.channels, call.pitch));
  call.weight = plan.floats(call.channels, true), call.bias = plan.floats(call.channels, true);
  call.result = plan.result(pixels_of(call.images, call.pixels, 1, call.channels, call.result_pitch));
  run_group_norm(call);
}

void run_steps(Reader& plan) {
  for (plan.step = 0; plan.at != plan.end; ++plan.step) switch (plan.number()) {
      case LINEAR_STEP:
        linear(plan);
        break;
      case ATTENTION_STEP:
        attention(plan);
        break;
      case NORM_STEP:
        norm(plan);
        break;
      case EMBEDDING_STEP:
        embedding(plan);
        break;
      case ELEMENTWISE_STEP:
        elementwise(plan);
        break;
      case CONVOLUTION_STEP:
        run_convolution(convolution(plan));
        break;
      case BLOCK_STEP:
        block(plan);
        break;
      case POOL_STEP:
        pool(plan);
        break;
      case PICK_STEP:
        pick(plan);
        break;
      case GROUP_NORM_STEP:
        group_norm(plan);
        break;
      default:
        refuse(OP, ": step ", plan.step, " of the plan is of an unknown kind");
    }
}

// This thread's arena; a larger one lasts no longer than its call.
constexpr int64_t KEPT = int64_t(16) << 20;

std::vector<Tensor> run(std::vector<Tensor> inputs, std::vector<Tensor> weights, Tensor plan) {
  check_type(OP, "plan", plan, ScalarType::Long);
  if (plan.dim() != 1 || !plan.is_contiguous())
    refuse(OP, ": plan has shape ", text_of(plan.sizes()), ", expected one dimension");
  Reader reader;
  reader.at = static_cast<const int64_t*>(plan.const_data_ptr());
  reader.end = reader.at + plan.numel();
  if (reader.number() != FORMAT) refuse(OP, ": the plan is of another format; make it again");
  const int64_t arena = reader.size(0, int64_t(1) << 36), nanoseconds = reader.size();
  const int64_t counts[3] = {reader.size(0, 1 << 20), reader.size(0, 1 << 20), reader.size(0, 1 << 20)};
  if (counts[0] != int64_t(inputs.size()) || counts[2] != int64_t(weights.size()))
    refuse(OP, ": ", inputs.size(), " inputs and ", weights.size(), " weights, the plan takes ", counts[0], " and ", counts[2]);

  std::optional<Tensor> large;
  float* floats;
  if (arena * 4 > KEPT) {
    large = empty(OP, {&arena, 1});
    floats = static_cast<float*>(large->mutable_data_ptr());
  } else {
    floats = reinterpret_cast<float*>(scratch<ARENA>(size_t(arena) * 4));
  }
  reader.slots.reserve(1 + inputs.size() + size_t(counts[1]) + weights.size());
  reader.slots.push_back({reinterpret_cast<char*>(floats), arena, ScalarType::Float, true});
  const auto add = [&](const char* kind, size_t i, Tensor& tensor) {
    if (!tensor.is_cpu()) refuse(OP, ": ", kind, " ", i, " is not on the CPU");
    if (!tensor.is_contiguous()) tensor = torch::stable::contiguous(tensor);
    reader.slots.push_back(
        {static_cast<char*>(const_cast<void*>(tensor.const_data_ptr())), tensor.numel(), tensor.scalar_type(), false});
  };
  int64_t sizes[64];
  for (size_t i = 0; i < inputs.size(); ++i) {
    const int64_t dimensions = reader.size(0, 64);
    for (int64_t d = 0; d < dimensions; ++d) sizes[d] = reader.size();
    const torch::headeronly::IntHeaderOnlyArrayRef wanted(sizes, size_t(dimensions));
    if (!inputs[i].sizes().equals(wanted))
      refuse(OP, ": input ", i, " has shape ", text_of(inputs[i].sizes()), ", the plan was made for ", text_of(wanted));
    add("input", i, inputs[i]);
  }
  std::vector<Tensor> outputs;
  for (int64_t i = 0; i < counts[1]; ++i) {
    const int64_t dimensions = reader.size(0, 64);
    for (int64_t d = 0; d < dimensions; ++d) sizes[d] = reader.size();
    outputs.push_back(empty(OP, {sizes, size_t(dimensions)}));
    Tensor& made = outputs.back();
    reader.slots.push_back({static_cast<char*>(made.mutable_data_ptr()), made.numel(), ScalarType::Float, true});
  }
  for (size_t i = 0; i < weights.size(); ++i) add("weight", i, weights[i]);

  Team::run(threads_for(double(nanoseconds)), [&] { run_steps(reader); });
  return outputs;
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(fxopt, CPU, library) { library.impl("run", TORCH_BOX(&run)); }
