// One instruction set's table: CMake compiles this file once for each, with its flags and its name as FXOPT_UNIT.
#include "attention.h"
#include "conv.h"
#include "elementwise.h"
#include "kernels.h"
#include "linear.h"
#include "norms.h"
#include "pool.h"
#include "winograd.h"

extern const Kernels FXOPT_UNIT;
const Kernels FXOPT_UNIT = {
    FXOPT_UNIT_NAME, {MAX_ROWS, rows_of<BfloatStep>, rows_of<ByteStep>}, linear_row_bytes, linear_convert, linear_tiles, linear_norm,
    attention_pieces, attention_scratch, attention, norm_rows, embedding_rows,
    elementwise_rows, convolve, winograd_weights, winograd, largest_number, round_pixels, gather_rows, convolve_depthwise, pool_rows,
    channel_moments, normalize_channels,
};
