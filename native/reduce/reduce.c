#include "reduce.h"

#include "convert.h"
#include "mlxdist.h"

#include <complex.h>
#include <stdbool.h>

/* Partial results of one block stay in the first-level cache while the sources pass. */
#define BLOCK 1024

/* One source file serves every x86: the loader picks the AVX2 clone where the processor has it. */
#if defined(__x86_64__) && defined(__ELF__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define VECTORIZED __attribute__((target_clones("avx2", "default")))
#else
#define VECTORIZED
#endif

/* `out` may be a source, but then exactly: no iteration depends on another. */
#if defined(__clang__)
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#endif

typedef float _Complex complex64;

#define SAME(x) (x)

#define SUM(a, b) ((a) + (b))
#define PROD(a, b) ((a) * (b))
/* The comparisons are false for NaN, so a NaN wins from either side. */
#define MAX(a, b) ((a) >= (b) || (a) != (a) ? (a) : (b))
#define MIN(a, b) ((a) <= (b) || (a) != (a) ? (a) : (b))

/* numpy.maximum of complex numbers: a NaN in either part wins, then the real, then the imaginary part. */
static inline bool complex_nan(complex64 a) { return crealf(a) != crealf(a) || cimagf(a) != cimagf(a); }
static inline bool complex_at_least(complex64 a, complex64 b) {
  return crealf(a) > crealf(b) || (crealf(a) == crealf(b) && cimagf(a) >= cimagf(b));
}
static inline complex64 complex_max(complex64 a, complex64 b) {
  return complex_nan(a) || (!complex_nan(b) && complex_at_least(a, b)) ? a : b;
}
static inline complex64 complex_min(complex64 a, complex64 b) {
  return complex_nan(a) || (!complex_nan(b) && complex_at_least(b, a)) ? a : b;
}
static inline complex64 complex_prod(complex64 a, complex64 b) {
  return CMPLXF(crealf(a) * crealf(b) - cimagf(a) * cimagf(b), crealf(a) * cimagf(b) + cimagf(a) * crealf(b));
}

/* A kernel over elements of type `element`, accumulated in `wide`. Two sources, the most frequent case,
 * need no block of partial results. */
#define KERNEL(name, element, wide, LOAD, STORE, COMBINE)                                             \
  VECTORIZED static void name(void *out_, const void *const *sources, int n, uint64_t count) {       \
    element *out = out_;                                                                              \
    const element *first = sources[0];                                                                \
    if (n == 2) {                                                                                     \
      const element *second = sources[1];                                                             \
      INDEPENDENT for (uint64_t i = 0; i < count; i++) {                                              \
        wide a = LOAD(first[i]), b = LOAD(second[i]);                                                 \
        out[i] = STORE(COMBINE(a, b));                                                                \
      }                                                                                               \
      return;                                                                                         \
    }                                                                                                 \
    for (uint64_t begin = 0; begin < count; begin += BLOCK) {                                         \
      uint64_t length = count - begin < BLOCK ? count - begin : BLOCK;                                \
      wide partial[BLOCK];                                                                            \
      for (uint64_t i = 0; i < length; i++) partial[i] = LOAD(first[begin + i]);                      \
      for (int s = 1; s < n; s++) {                                                                   \
        const element *source = (const element *)sources[s] + begin;                                  \
        for (uint64_t i = 0; i < length; i++) {                                                       \
          wide a = partial[i], b = LOAD(source[i]);                                                   \
          partial[i] = COMBINE(a, b);                                                                 \
        }                                                                                             \
      }                                                                                               \
      for (uint64_t i = 0; i < length; i++) out[begin + i] = STORE(partial[i]);                       \
    }                                                                                                 \
  }

/* Sums and products of signed integers are computed unsigned, where wrapping is defined. */
#define INTEGER_KERNELS(bits)                                            \
  KERNEL(sum_int##bits, uint##bits##_t, uint##bits##_t, SAME, SAME, SUM)   \
  KERNEL(prod_int##bits, uint##bits##_t, uint##bits##_t, SAME, SAME, PROD) \
  KERNEL(max_int##bits, int##bits##_t, int##bits##_t, SAME, SAME, MAX)     \
  KERNEL(min_int##bits, int##bits##_t, int##bits##_t, SAME, SAME, MIN)     \
  KERNEL(max_uint##bits, uint##bits##_t, uint##bits##_t, SAME, SAME, MAX)  \
  KERNEL(min_uint##bits, uint##bits##_t, uint##bits##_t, SAME, SAME, MIN)

#define KERNELS(suffix, element, wide, LOAD, STORE)        \
  KERNEL(sum_##suffix, element, wide, LOAD, STORE, SUM)    \
  KERNEL(prod_##suffix, element, wide, LOAD, STORE, PROD)  \
  KERNEL(max_##suffix, element, wide, LOAD, STORE, MAX)    \
  KERNEL(min_##suffix, element, wide, LOAD, STORE, MIN)

#define OR(a, b) ((a) | (b))
#define AND(a, b) ((a) & (b))

KERNEL(or_bool, uint8_t, uint8_t, SAME, SAME, OR)
KERNEL(and_bool, uint8_t, uint8_t, SAME, SAME, AND)
INTEGER_KERNELS(8)
INTEGER_KERNELS(16)
INTEGER_KERNELS(32)
INTEGER_KERNELS(64)
KERNELS(float16, uint16_t, float, float_of_float16, float16_of_float)
KERNELS(bfloat16, uint16_t, float, float_of_bfloat16, bfloat16_of_float)
KERNELS(float32, float, float, SAME, SAME)
KERNELS(float64, double, double, SAME, SAME)
KERNEL(sum_complex64, complex64, complex64, SAME, SAME, SUM)
KERNEL(prod_complex64, complex64, complex64, SAME, SAME, complex_prod)
KERNEL(max_complex64, complex64, complex64, SAME, SAME, complex_max)
KERNEL(min_complex64, complex64, complex64, SAME, SAME, complex_min)

#define ROW(sum, prod, max, min) \
  { [MLXDIST_SUM] = sum, [MLXDIST_PROD] = prod, [MLXDIST_MAX] = max, [MLXDIST_MIN] = min }
#define SIGNED_ROW(bits) ROW(sum_int##bits, prod_int##bits, max_int##bits, min_int##bits)
#define UNSIGNED_ROW(bits) ROW(sum_int##bits, prod_int##bits, max_uint##bits, min_uint##bits)
#define FLOAT_ROW(suffix) ROW(sum_##suffix, prod_##suffix, max_##suffix, min_##suffix)

static const reduce_kernel_fn kernels[][4] = {
    [MLXDIST_BOOL] = ROW(or_bool, and_bool, or_bool, and_bool),
    [MLXDIST_UINT8] = UNSIGNED_ROW(8),       [MLXDIST_UINT16] = UNSIGNED_ROW(16),
    [MLXDIST_UINT32] = UNSIGNED_ROW(32),     [MLXDIST_UINT64] = UNSIGNED_ROW(64),
    [MLXDIST_INT8] = SIGNED_ROW(8),          [MLXDIST_INT16] = SIGNED_ROW(16),
    [MLXDIST_INT32] = SIGNED_ROW(32),        [MLXDIST_INT64] = SIGNED_ROW(64),
    [MLXDIST_FLOAT16] = FLOAT_ROW(float16),  [MLXDIST_FLOAT32] = FLOAT_ROW(float32),
    [MLXDIST_FLOAT64] = FLOAT_ROW(float64),  [MLXDIST_BFLOAT16] = FLOAT_ROW(bfloat16),
    [MLXDIST_COMPLEX64] = FLOAT_ROW(complex64),
};

reduce_kernel_fn reduce_kernel(int32_t dtype, int32_t op) {
  int32_t dtypes = sizeof kernels / sizeof *kernels, ops = sizeof *kernels / sizeof **kernels;
  return dtype >= 0 && dtype < dtypes && op >= 0 && op < ops ? kernels[dtype][op] : 0;
}
