// The units' functions: one table for each instruction set, and the table that this processor uses.
#pragma once

#include <cstdint>

enum Format : int64_t { FLOAT32, BFLOAT16, INT8 };
constexpr int64_t MOST_DEPTH = 65536;  // of products of integers, whose sums have 32 bits

// result = norm(activation(input @ weight.T + bias) + residual), or activation(gate) * up of two products.
// Pointers that are not needed are null. The result may overlap with nothing else.
struct Linear {
  Format format;
  int64_t rows, depth, features;
  const float* input;
  int64_t input_stride;  // from row to row, in elements
  const void* panels;    // (panels, steps, 64 bytes), see operators/linear.py
  const float* scale;    // int8: of each column, padded as the panels are
  const int32_t* sums;   // int8: of each column's integers; with `rounding`, then their sums times the shifts
  const float* bias;
  int64_t activation;
  float alpha, beta;
  const float* residual;
  int64_t residual_stride;
  int64_t norm;
  const float *norm_weight, *norm_bias;
  float epsilon;
  bool gated;
  const float* rounding;  // int8: factor and shift of each element of a row, or null for a scale of each row
  bool adds_first;        // the residual before the activation
  float* output;          // rows of `features` elements
  int64_t output_stride;  // from row to row, in elements
  // Bytes of a row of `input` or `output` that is rounded to bfloat16 already, as `linear_convert` does it; else 0.
  int64_t rounded_input, rounded_output;
};

// Rows in the form that the unit multiplies: where they begin, and their stride in bytes.
struct Rows {
  const char* data;
  int64_t stride;
  const float* scales;  // int8: NaN for rows that hold NaN or infinity
};

// A window that moves over images with the channels last: (images, height, width, channels) -> (images, rows, columns, ...).
struct Window {
  int64_t images, height, width, channels, rows, columns;
  int64_t kernel[2], stride[2], padding[2], dilation[2];  // padding: before the first row and column
  int64_t pitch, result_pitch;  // from pixel to pixel of the input and of the result: parts of wider images have more
};

// result = activation(convolution(input) + bias + residual). With integers, inputs are rounded too: each image with its
// own scale, or each channel by `rounding`.
constexpr int64_t FEW_CHANNELS = 8;  // below this, images may also have each channel by itself
constexpr int64_t MOST_COPIED = 4096;  // elements that a pixel of the result reads of such images
struct Convolution : Window {
  int64_t features, groups;  // of channels and of features, in order
  int64_t channel_stride;    // 1 with the channels last, or the size of an image of one channel
  bool depthwise;            // a group for each channel, with 1, 2, 4 or 8 features
  int64_t repeats;           // of `run_convolution`, for depthwise ones: 2 to this power is the number of those features
  const float* input;
  const float* panels;    // (groups * panels of a group, taps * channels of a group, 16); depthwise: (taps, padded features)
  const void* integers;   // those panels in int8, as a linear layer's, instead; with its scale, sums and rounding
  const float* scale;
  const int32_t* sums;
  const float* rounding;  // factor and shift of each channel
  const float* bias;      // `run_convolution` takes `features` of them or null; kernels take them in panels, as the weight
  const float* residual;  // (images, rows, columns, features), or null
  const float* zeros;     // of `run_convolution`: as many as there are channels
  float* output;
  int64_t activation;
  float alpha, beta;
};

// Winograd's convolutions: the most tiles of a piece, and the most panels whose products lie beside them.
constexpr int64_t MOST_TILES = 48, MOST_TILE_PANELS = 4;

// The mean or the largest of each window; torch's means count the padding, or do not.
struct Pool : Window {
  bool largest, counts_padding;
  int64_t after[2];  // padding after the last row and column
  const float* input;
  float* output;
};

// softmax(scale * query @ key^T + mask) @ value for every head. Strides are those of batch, head and row (and, of a mask, of
// columns), in elements; the elements of a row lie side by side.
struct Attention {
  const float *query, *key, *value;
  const float* mask;              // added to the scores; null without one
  const unsigned char* attended;  // 0 where a key is not attended; null without such a mask
  float* result;                  // (batch, queries, heads * value_size), contiguous
  int64_t batch, heads, kv_heads, queries, keys, size, value_size;
  int64_t query_strides[3], key_strides[3], value_strides[3], mask_strides[4];
  float scale;
  bool causal;
  bool rounded;  // products of bfloat16, where the unit has tiles for them
};

// result = norm(input + residual), and their sum.
struct Norm {
  int64_t rows, size, kind;
  const float* input;
  int64_t input_stride;
  const float* residual;
  int64_t residual_stride;
  const float *weight, *bias;
  float epsilon;
  float *result, *sum;  // rows of `size` elements; `sum` may be null
};

// result = activation(norm(input)) over groups of channels of each image, whose channels lie last.
struct GroupNorm {
  int64_t images, pixels, channels, groups, pitch, result_pitch, activation;
  float alpha, beta, epsilon;
  const float *input, *weight, *bias;  // the last two of `channels` elements, or null
  float* result;
};

// result = norm(sum of rows of tables).
constexpr int64_t MOST_TABLES = 8;
struct Embedding {
  int64_t rows, size, kind, tables;
  const int64_t* ids;  // (rows, tables), all of them inside of their tables
  const float* table[MOST_TABLES];
  int64_t stride[MOST_TABLES];
  const float *weight, *bias;
  float epsilon;
  float* result;
};

// result = activation(a), or of their sum, difference, product or quotient; four dimensions, of which the first may be 1. The elements
// of a row of the result lie together.
enum Operation : int64_t { COPY, ADD, SUBTRACT, MULTIPLY, DIVIDE };
struct Elementwise {
  int64_t operation, activation;
  float alpha, beta;
  int64_t sizes[4], a_strides[4], b_strides[4], result_strides[3];
  const float *a, *b;
  float* result;
};

struct Kernels {
  const char* name;
  int64_t most_rows[3];  // of one tile, by format
  // How many bytes a converted row takes; 0 where rows are multiplied as they lie.
  int64_t (*linear_row_bytes)(const Linear&);
  // Converts rows first to last of the input to `data`, and writes their scales.
  void (*linear_convert)(const Linear&, int64_t first, int64_t last, char* data, float* scales);
  // Computes these rows and columns (panel `first_panel` to `last_panel`) without the norm; `rows` begins at row `first`.
  void (*linear_tiles)(const Linear&, Rows rows, int64_t first, int64_t last, int64_t first_panel, int64_t last_panel);
  void (*linear_norm)(const Linear&, int64_t first, int64_t last);
  // The pieces that attention falls into, the floats of scratch that each needs, and one piece.
  int64_t (*attention_pieces)(const Attention&);
  int64_t (*attention_scratch)(const Attention&);
  void (*attention)(const Attention&, int64_t piece, float* scratch);
  void (*norm_rows)(const Norm&, int64_t first, int64_t last);
  void (*embedding_rows)(const Embedding&, int64_t first, int64_t last);
  void (*elementwise_rows)(const Elementwise&, int64_t first, int64_t last);  // of sizes[0] * sizes[1] * sizes[2]
  // Pixels first to last of all images, panel `first_panel` to `last_panel`.
  void (*convolve)(const Convolution&, int64_t first, int64_t last, int64_t first_panel, int64_t last_panel);
  // The weight in the form that `winograd` takes, panel `first_panel` to `last_panel`; and tiles first to last of all images.
  void (*winograd_weights)(const Convolution&, float* to, int64_t first_panel, int64_t last_panel);
  void (*winograd)(const Convolution&, const float* weights, float* room, int64_t first, int64_t last);
  // Of integers: the largest finite number of pixels first to last of the input; these pixels as integers, each in `pitch`
  // bytes, and 1 or NaN for each; and what pixels first to last of the result read, of an image `c` of such bytes, as rows
  // of so many bytes, and 1 or NaN for each. `finite` may be null.
  float (*largest_number)(const Convolution&, int64_t first, int64_t last);
  void (*round_pixels)(const Convolution&, int64_t first, int64_t last, const float* rounding, int64_t pitch, char* to,
                       float* finite);
  void (*gather_rows)(const Convolution& c, int64_t first, int64_t last, const float* finite, int64_t row_bytes, char* to,
                      float* scales);
  // Rows first to last of all images.
  void (*convolve_depthwise)(const Convolution&, int64_t first, int64_t last);
  void (*pool_rows)(const Pool&, int64_t first, int64_t last);
  // Of so many pixels from `from` on: the mean of each channel, then the sum of squared differences from it, to `to`; and the
  // result for them, by the mean, factor and shift of each channel at `constants`.
  void (*channel_moments)(const GroupNorm&, const float* from, int64_t pixels, float* to);
  void (*normalize_channels)(const GroupNorm&, const float* from, int64_t pixels, const float* constants, float* to);
};

// The table in use. `limit_kernels` takes the highest that this processor has and the limit allows, and says which:
// 0 portable, 1 avx2, 2 avxvnni, 3 avx512, 4 avx512vnni, 5 avx512bf16, 6 amx.
const Kernels& kernels();
extern "C" __attribute__((visibility("default"))) int fxopt_limit_kernels(int limit);

// Computes a product with torch's threads; linear.cpp.
void run_linear(const Linear&);
// conv.cpp. `fit` fills in rows and columns, says whether there are any, and refuses images that are too large when padded.
bool fit(const char* op, Window&, const int64_t (&padding)[4]);
bool is_depthwise(int64_t groups, int64_t channels, int64_t features);
bool may_be_planes(const Convolution&);
bool may_be_winograd(const Convolution&);
bool is_pointwise(const Convolution&);  // over single pixels, all of them
void run_convolution(const Convolution&);
// Elements between the layers of a block that one row of results needs. It bounds the memory that a plan from a file
// can ask for; the planner asks for a tenth (`MOST_OF_STRIPE` in operators/plan.py), so that a stripe stays in the cache.
constexpr int64_t MOST_OF_STRIPE = 1 << 20;
int64_t rows_read(const Window&);  // by one row of results
// A convolution, a depthwise one of its result and, unless null, one over single pixels of that, without images between.
void run_block(const Convolution& expand, const Convolution& deep, const Convolution* project);
void run_pool(const Pool&);
// attention.cpp and norms.cpp.
void run_attention(const Attention&);
void run_norm(const Norm&);
void run_group_norm(const GroupNorm&);
void run_embedding(const Embedding&);
void run_elementwise(const Elementwise&);
