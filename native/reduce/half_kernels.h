/*
 * Kernels of float16 and bfloat16 for the instruction set of the including file: accumulated in float32, in registers,
 * and rounded once. The including file has vectors.h, defines
 *   load_float16, store_float16         as vectors.h does for bfloat16
 *   sum_floats, max_floats, min_floats  in whatever way is best there
 * and puts HALF_ROWS into its table.
 */
#include "isa.h"

/* All of it is inlined into the kernels, where dtype and op are constants, and n and length too in their main loop. */

VECTOR_FUNCTION float_pair load_halves(int32_t dtype, const uint16_t* from, uint64_t length) {
  uint16_t padded[LANES] = {0};
  if (length < LANES) from = memcpy(padded, from, length * sizeof *padded);
  return dtype == MLXDIST_FLOAT16 ? load_float16(from) : load_bfloat16(from);
}

VECTOR_FUNCTION void store_halves(int32_t dtype, uint16_t* to, float_pair value, uint64_t length) {
  uint16_t padded[LANES];
  uint16_t* whole = length < LANES ? padded : to;
  if (dtype == MLXDIST_FLOAT16) {
    store_float16(whole, value);
  } else {
    store_bfloat16(whole, value);
  }
  if (length < LANES) memcpy(to, padded, length * sizeof *padded);
}

VECTOR_FUNCTION floats combine_floats(int32_t op, floats a, floats b) {
  switch (op) {
    case MLXDIST_SUM:
      return sum_floats(a, b);
    case MLXDIST_PROD:
      return a * b;
    case MLXDIST_MAX:
      return max_floats(a, b);
    default:
      return min_floats(a, b);
  }
}

/* Elements [i, i + length): LANES, or fewer at the end of the arrays. */
VECTOR_FUNCTION void reduce_step(int32_t dtype, int32_t op, uint16_t* out, const void* const* sources, int n,
                                 uint64_t i, uint64_t length) {
  float_pair a = load_halves(dtype, (const uint16_t*)sources[0] + i, length);
  for (int s = 1; s < n; s++) {
    float_pair b = load_halves(dtype, (const uint16_t*)sources[s] + i, length);
    a.first = combine_floats(op, a.first, b.first);
    a.second = combine_floats(op, a.second, b.second);
  }
  store_halves(dtype, out + i, a, length);
}

VECTOR_FUNCTION void reduce_halves(int32_t dtype, int32_t op, uint16_t* out, const void* const* sources, int n,
                                   uint64_t count) {
  uint64_t i = 0;
  if (n == 2) {
    for (; i + LANES <= count; i += LANES) reduce_step(dtype, op, out, sources, 2, i, LANES);
  } else {
    for (; i + LANES <= count; i += LANES) reduce_step(dtype, op, out, sources, n, i, LANES);
  }
  if (i < count) reduce_step(dtype, op, out, sources, n, i, count - i);
}

#define HALF_KERNEL(name, dtype, op)                                                      \
  TARGET static void name(void* out, const void* const* sources, int n, uint64_t count) { \
    reduce_halves(dtype, op, out, sources, n, count);                                     \
  }
#define HALF_KERNELS(suffix, dtype)               \
  HALF_KERNEL(sum_##suffix, dtype, MLXDIST_SUM)   \
  HALF_KERNEL(prod_##suffix, dtype, MLXDIST_PROD) \
  HALF_KERNEL(max_##suffix, dtype, MLXDIST_MAX)   \
  HALF_KERNEL(min_##suffix, dtype, MLXDIST_MIN)

HALF_KERNELS(float16, MLXDIST_FLOAT16)
HALF_KERNELS(bfloat16, MLXDIST_BFLOAT16)

#define HALF_ROWS [MLXDIST_FLOAT16] = REDUCE_ROW(float16), [MLXDIST_BFLOAT16] = REDUCE_ROW(bfloat16)
