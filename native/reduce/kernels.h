/*
 * Kernels of every dtype but the 16-bit floats, for the instruction set of the including file: plain loops, which
 * compilers vectorize. The including file defines TARGET, the attribute of functions that use the instruction set,
 * and puts KERNEL_ROWS into its table.
 */
#include "isa.h"

#include <complex.h>
#include <string.h>

#ifndef CMPLXF /* glibc has it for GCC alone */
#define CMPLXF(real, imaginary) __builtin_complex((float)(real), (float)(imaginary))
#endif

/* `out` may be a source, but then exactly: no iteration depends on another. clang unrolls loops by itself; GCC needs a
 * pragma for it, where an iteration takes more instructions than the cache gives it time for. */
#if defined(__clang__)
#pragma clang diagnostic ignored "-Wpass-failed" /* without optimization it vectorizes nothing */
#define INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define UNROLLED INDEPENDENT
#else
#define INDEPENDENT _Pragma("GCC ivdep")
#define UNROLLED INDEPENDENT _Pragma("GCC unroll 2")
#endif

typedef float _Complex complex64;
typedef void (*combine_fn)(void* out, const void* a, const void* b, uint64_t count);

/* More than two sources: the partial results of one block stay in the first-level cache while the sources pass. */
static void combine_all(combine_fn combine, uint64_t size, void* out, const void* const* sources, int n,
                        uint64_t count) {
  if (n == 1) {
    memmove(out, sources[0], count * size);
    return;
  }
  if (n == 2) {
    combine(out, sources[0], sources[1], count);
    return;
  }
  _Alignas(64) char partial[4096];
  const uint64_t block = sizeof partial / size;
  for (uint64_t begin = 0; begin < count; begin += block) {
    uint64_t length = count - begin < block ? count - begin : block, offset = begin * size;
    const void* a = (const char*)sources[0] + offset;
    for (int s = 1; s < n; s++) {
      void* to = s == n - 1 ? (char*)out + offset : partial;
      combine(to, a, (const char*)sources[s] + offset, length);
      a = partial;
    }
  }
}

/* The loop is not inlined: within that over the sources GCC would unroll and jam both, and vectorize neither. */
#define KERNEL_LOOP(name, element, COMBINE, LOOP)                                                         \
  TARGET static __attribute__((noinline)) void combine_##name(void* out_, const void* a_, const void* b_, \
                                                              uint64_t n) {                               \
    element* out = out_;                                                                                  \
    const element *a = a_, *b = b_;                                                                       \
    LOOP for (uint64_t i = 0; i < n; i++) out[i] = COMBINE(a[i], b[i]);                                   \
  }                                                                                                       \
  static void name(void* out, const void* const* sources, int n, uint64_t count) {                        \
    combine_all(combine_##name, sizeof(element), out, sources, n, count);                                 \
  }
#define KERNEL(name, element, COMBINE) KERNEL_LOOP(name, element, COMBINE, INDEPENDENT)
#define KERNEL_UNROLLED(name, element, COMBINE) KERNEL_LOOP(name, element, COMBINE, UNROLLED)

#define OR(a, b) ((a) | (b))
#define AND(a, b) ((a) & (b))
#define SUM(a, b) ((a) + (b))
#define PROD(a, b) ((a) * (b))
/* uint16_t would be multiplied as int, which overflows. */
#define UNSIGNED_PROD(a, b) (1u * (a) * (b))
/* The comparisons are false for NaN, so a NaN wins from either side. */
#define MAX(a, b) ((a) >= (b) || (a) != (a) ? (a) : (b))
#define MIN(a, b) ((a) <= (b) || (a) != (a) ? (a) : (b))

/* numpy.maximum of complex numbers: a NaN in either part wins, then the real, then the imaginary part. Without
 * branches, which would be mispredicted half of the time. */
static inline int complex_nan(complex64 a) { return (crealf(a) != crealf(a)) | (cimagf(a) != cimagf(a)); }
static inline int complex_at_least(complex64 a, complex64 b) {
  return (crealf(a) > crealf(b)) | ((crealf(a) == crealf(b)) & (cimagf(a) >= cimagf(b)));
}
static inline complex64 complex_select(int first, complex64 a, complex64 b) {
  return CMPLXF(first ? crealf(a) : crealf(b), first ? cimagf(a) : cimagf(b));
}
static inline complex64 complex_max(complex64 a, complex64 b) {
  return complex_select(complex_nan(a) | (complex_at_least(a, b) & (!complex_nan(b))), a, b);
}
static inline complex64 complex_min(complex64 a, complex64 b) {
  return complex_select(complex_nan(a) | (complex_at_least(b, a) & (!complex_nan(b))), a, b);
}
static inline complex64 complex_prod(complex64 a, complex64 b) {
  return CMPLXF(crealf(a) * crealf(b) - cimagf(a) * cimagf(b), crealf(a) * cimagf(b) + cimagf(a) * crealf(b));
}

/* Sums and products of signed integers are computed unsigned, where wrapping is defined. */
#define INTEGER_KERNELS(bits)                                    \
  KERNEL(sum_int##bits, uint##bits##_t, SUM)                     \
  KERNEL_UNROLLED(prod_int##bits, uint##bits##_t, UNSIGNED_PROD) \
  KERNEL(max_int##bits, int##bits##_t, MAX)                      \
  KERNEL(min_int##bits, int##bits##_t, MIN)                      \
  KERNEL(max_uint##bits, uint##bits##_t, MAX)                    \
  KERNEL(min_uint##bits, uint##bits##_t, MIN)

#define FLOAT_KERNELS(suffix, element) \
  KERNEL(sum_##suffix, element, SUM)   \
  KERNEL(prod_##suffix, element, PROD) \
  KERNEL(max_##suffix, element, MAX)   \
  KERNEL(min_##suffix, element, MIN)

KERNEL(or_bool, uint8_t, OR)
KERNEL(and_bool, uint8_t, AND)
INTEGER_KERNELS(8)
INTEGER_KERNELS(16)
INTEGER_KERNELS(32)
INTEGER_KERNELS(64)
FLOAT_KERNELS(float32, float)
FLOAT_KERNELS(float64, double)
KERNEL(sum_complex64, complex64, SUM)
KERNEL_UNROLLED(prod_complex64, complex64, complex_prod)
KERNEL_UNROLLED(max_complex64, complex64, complex_max)
KERNEL_UNROLLED(min_complex64, complex64, complex_min)

#define UNSIGNED_ROW(bits) REDUCE_ROW_OF(sum_int##bits, prod_int##bits, max_uint##bits, min_uint##bits)

#define KERNEL_ROWS                                                                                              \
  [MLXDIST_BOOL] = REDUCE_ROW_OF(or_bool, and_bool, or_bool, and_bool), [MLXDIST_UINT8] = UNSIGNED_ROW(8),       \
  [MLXDIST_UINT16] = UNSIGNED_ROW(16), [MLXDIST_UINT32] = UNSIGNED_ROW(32), [MLXDIST_UINT64] = UNSIGNED_ROW(64), \
  [MLXDIST_INT8] = REDUCE_ROW(int8), [MLXDIST_INT16] = REDUCE_ROW(int16), [MLXDIST_INT32] = REDUCE_ROW(int32),   \
  [MLXDIST_INT64] = REDUCE_ROW(int64), [MLXDIST_FLOAT32] = REDUCE_ROW(float32),                                  \
  [MLXDIST_FLOAT64] = REDUCE_ROW(float64), [MLXDIST_COMPLEX64] = REDUCE_ROW(complex64)
