/* x86-64 without AVX2, and architectures without a file of their own: float16 is converted by integer operations. */
#if !defined(__aarch64__)

#define TARGET
#define VECTOR_BYTES 16
#include "vectors.h"

typedef int32_t signed_words __attribute__((vector_size(VECTOR_BYTES)));

/* Below 2^31, where SSE2 has only the comparison of signed integers. */
VECTOR_FUNCTION words at_least(words a, int32_t b) { return (words)((signed_words)a >= b); }

/* Moves exponent and mantissa into place; the multiplication corrects the exponent's bias and makes
 * subnormals normal, exactly. Infinity and NaN (exponent 31) get float32's largest exponent. */
VECTOR_FUNCTION floats floats_of_float16(words halves) {
  words magnitude = (halves & 0x7fffu) << 13;
  words bits = (words)((floats)magnitude * 0x1p112f);
  bits |= at_least(magnitude, 0x0f800000) & 0x7f800000u;
  return (floats)(bits | (halves & 0x8000u) << 16);
}

/* Normal results: re-bias the exponent and round the 13 lost bits. Subnormal results: adding 0.5 puts the
 * ten mantissa bits at the bottom of the sum, rounded by the addition. */
VECTOR_FUNCTION words float16_of_floats(floats value) {
  words bits = (words)value, magnitude = bits & 0x7fffffffu;
  words normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  words subnormal = (words)((floats)magnitude + 0.5f) - 0x3f000000u;
  words special = 0x7c00u | (at_least(magnitude, 0x7f800001) & 0x0200u);
  words half = select_words(at_least(magnitude, 113 << 23), normal, subnormal);
  return (bits >> 16 & 0x8000u) | select_words(at_least(magnitude, 143 << 23), special, half);
}

VECTOR_FUNCTION float_pair load_float16(const uint16_t *from) {
  words both = load_words(from);
  return (float_pair){floats_of_float16(both & 0xffffu), floats_of_float16(both >> 16)};
}

VECTOR_FUNCTION void store_float16(uint16_t *to, float_pair value) {
  store_words(to, float16_of_floats(value.first) | float16_of_floats(value.second) << 16);
}

VECTOR_FUNCTION floats sum_floats(floats a, floats b) { return a + b; }

/* The comparisons are false for NaN, so a NaN wins from either side. */
VECTOR_FUNCTION floats max_floats(floats a, floats b) {
  return (floats)select_words((words)((a >= b) | (a != a)), (words)a, (words)b);
}
VECTOR_FUNCTION floats min_floats(floats a, floats b) {
  return (floats)select_words((words)((a <= b) | (a != a)), (words)a, (words)b);
}

#include "half_kernels.h"
#include "kernels.h"

reduce_table reduce_baseline = {KERNEL_ROWS, HALF_ROWS};

#endif
